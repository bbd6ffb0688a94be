"""What the compile gate calls: launchers, on tensors of the shapes and dtypes that BERT-base, BERT-large and MiniLM
give them, and some that nothing is tuned for.

Each call makes its kernels compile for its targets, so the list is a budget: a variant costs about a second on one
core and per target. A new kernel is one more entry of `CALLS`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bertfast.kernels import (
    attention,
    attention_bwd,
    attention_mask_bwd,
    bias_activation,
    embed_layer_norm,
    layer_norm,
    linear_gelu,
    qkv_projection,
    varlen_attention,
)

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

GEMM_TARGETS = (80, 90, 100, 120)
# Memory-bound kernels serve capability 7.5 too.
TARGETS = (75, *GEMM_TARGETS)


class Call(NamedTuple):
    """One way to call launchers.

    Attributes:
        name: what the table of compiled kernels calls it.
        run: calls them with this many rows.
        rows: a number of rows.
        targets: capabilities to compile for.
        aligned: tensors start at multiples of 16 bytes; memory-bound kernels then have 128-bit accesses.
        tf32: the user allowed TF32, and fp32 dots are to use it.
        most_variants: where set, 199 numbers of rows may not make more variants of any kernel.
    """

    name: str
    run: Callable[[int], object]
    rows: int = 256
    targets: tuple[int, ...] = TARGETS
    aligned: bool = True
    tf32: bool = False
    most_variants: int | None = None


def fresh(*shape: int, dtype: torch.dtype, aligned: bool = True) -> Tensor:
    """A tensor whose values nobody reads; unaligned, one that starts an element past a multiple of 16 bytes."""
    if aligned:
        return torch.empty(shape, dtype=dtype)
    x = torch.empty(torch.Size(shape).numel() + 1, dtype=dtype)[1:].view(shape)
    assert x.data_ptr() % 16 != 0
    return x


def _add_layer_norm(
    rows: int,
    width: int,
    dtype: torch.dtype,
    *,
    residual: torch.dtype | None = None,
    bare: bool = False,
    train: bool = True,
    dropout_p: float = 0.0,
    dsum: bool = False,
    aligned: bool = True,
) -> None:
    make = partial(fresh, aligned=aligned)
    x = make(rows, width, dtype=dtype)
    skip = None if bare else make(rows, width, dtype=residual or dtype)
    x_bias = None if bare else make(width, dtype=dtype)
    weight, bias = make(width, dtype=dtype), make(width, dtype=dtype)
    seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
    out, total, mean, rstd = layer_norm.add_layer_norm_fwd(
        x, skip, weight, bias, x_bias, seed, 1e-12, dropout_p, train and not bare
    )
    if train:
        dout = make(rows, width, dtype=out.dtype)
        total = x if bare else total if aligned else make(rows, width, dtype=out.dtype)
        upstream = make(rows, width, dtype=out.dtype) if dsum else None
        layer_norm.add_layer_norm_bwd(dout, upstream, total, mean, rstd, weight, seed, dropout_p, not bare, not bare)


def _layer_norm_calls() -> list[Call]:
    def call(name: str, width: int, dtype: torch.dtype, *, most_variants: int | None = None, **how) -> Call:
        return Call(
            f"add_layer_norm {width} {name}",
            partial(_add_layer_norm, width=width, dtype=dtype, **how),
            aligned=how.get("aligned", True),
            most_variants=most_variants,
        )

    return [
        call("bf16 training", 768, BF16, dropout_p=0.1, most_variants=1),
        call("bf16 inference", 768, BF16, train=False),
        call("bf16 pre-norm", 768, BF16, bare=True, dsum=True),
        call("bf16 unaligned", 768, BF16, dropout_p=0.1, aligned=False),
        call("bf16 with an fp32 residual", 768, BF16, residual=FP32, dropout_p=0.1),
        call("fp32 training", 768, FP32, dropout_p=0.1),
        call("bf16 inference", 384, BF16, train=False),
        call("bf16 training", 1024, BF16, dropout_p=0.1),
        call("fp16 training", 8192, FP16, dropout_p=0.1),
        call("fp32 training", 8192, FP32, dropout_p=0.1),
    ]


def _embed_layer_norm(
    rows: int,
    width: int,
    dtype: torch.dtype,
    *,
    ids: torch.dtype = torch.int64,
    positions: bool = False,
    embeds: bool = False,
    token_types: bool = True,
    train: bool = True,
    dropout_p: float = 0.0,
    aligned: bool = True,
) -> None:
    make = partial(fresh, dtype=dtype, aligned=aligned)
    input_ids = torch.zeros(1, rows, dtype=ids)
    word, position, token_type = make(30522, width), make(512, width), make(2, width)
    weight, bias = make(width), make(width)
    seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
    out, total, mean, rstd = embed_layer_norm.embed_layer_norm_fwd(
        None if embeds else input_ids,
        input_ids if token_types else None,
        input_ids if positions else None,
        make(1, rows, width) if embeds else None,
        word,
        position,
        token_type if token_types else None,
        weight,
        bias,
        seed,
        1e-12,
        dropout_p,
        dtype,
        train,
    )
    if train:
        dout, total = make(1, rows, width), total if aligned else make(1, rows, width)
        embed_layer_norm.embed_layer_norm_bwd(dout, total, mean, rstd, weight, seed, dropout_p)


def _embed_layer_norm_calls() -> list[Call]:
    def call(name: str, width: int, dtype: torch.dtype, *, most_variants: int | None = None, **how) -> Call:
        return Call(
            f"embed_layer_norm {width} {name}",
            partial(_embed_layer_norm, width=width, dtype=dtype, **how),
            aligned=how.get("aligned", True),
            most_variants=most_variants,
        )

    return [
        call("bf16 training", 768, BF16, dropout_p=0.1, most_variants=1),
        call("bf16 training on embeddings", 768, BF16, embeds=True, token_types=False, dropout_p=0.1),
        call("bf16 unaligned", 768, BF16, dropout_p=0.1, aligned=False),
        call("fp32 training", 768, FP32, dropout_p=0.1),
        call("bf16 inference, int32 ids", 384, BF16, ids=torch.int32, positions=True, train=False),
        call("fp16 inference", 1024, FP16, train=False),
    ]


def _linear_gelu(
    rows: int,
    width_in: int,
    dtype: torch.dtype,
    *,
    activation: str = "gelu",
    train: bool = False,
    dropout_p: float = 0.0,
    aligned: bool = True,
    tf32: bool = False,
) -> None:
    make = partial(fresh, dtype=dtype, aligned=aligned)
    width = 4 * width_in
    x, weight, bias = make(rows, width_in), make(width, width_in), make(width)
    seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        linear_gelu.linear_gelu_fwd(x, weight, bias, activation, seed, dropout_p, train)
    finally:
        matmul.fp32_precision = before


def _linear_gelu_bwd(
    rows: int,
    width: int,
    dtype: torch.dtype,
    *,
    activation: str = "gelu",
    need_out: bool = False,
    bias: bool = True,
    dropout_p: float = 0.0,
    aligned: bool = True,
) -> None:
    dout, pre = (fresh(rows, width, dtype=dtype, aligned=aligned) for _ in range(2))
    seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
    bias_activation.linear_gelu_bwd(dout, pre, activation, seed, dropout_p, need_out, bias)


def _linear_gelu_calls() -> list[Call]:
    def forward(name: str, rows: int, width_in: int, dtype: torch.dtype, **how) -> Call:
        return Call(
            f"linear_gelu {rows} x {width_in} {name}",
            partial(_linear_gelu, width_in=width_in, dtype=dtype, **how),
            rows=rows,
            targets=GEMM_TARGETS,
            aligned=how.get("aligned", True),
            tf32=how.get("tf32", False),
        )

    def backward(name: str, width: int, dtype: torch.dtype, *, targets=GEMM_TARGETS, most=None, **how) -> Call:
        return Call(
            f"linear_gelu backward {width} {name}",
            partial(_linear_gelu_bwd, width=width, dtype=dtype, **how),
            targets=targets,
            aligned=how.get("aligned", True),
            most_variants=most,
        )

    return [
        forward("bf16 inference", 4096, 768, BF16),
        forward("bf16 training", 4096, 768, BF16, train=True),
        forward("fp16 inference", 4096, 1024, FP16),
        forward("bf16 unaligned", 4096, 768, BF16, aligned=False),
        forward("bf16 inference", 128, 768, BF16),
        forward("bf16 inference", 8, 768, BF16),
        forward("bf16 training with dropout", 128, 768, BF16, train=True, dropout_p=0.1),
        forward("fp32 inference", 32, 768, FP32),
        forward("fp32 inference with tf32", 4096, 768, FP32, tf32=True),
        backward("bf16", 3072, BF16, most=1),
        backward("bf16 with dropout, recomputing", 3072, BF16, need_out=True, dropout_p=0.1),
        backward("bf16 unaligned", 3072, BF16, aligned=False),
        backward("fp16", 4096, FP16),
        backward("fp32", 3072, FP32),
    ]


def _qkv_projection(
    rows: int, width: int, dtype: torch.dtype, *, bias: bool = True, aligned: bool = True, pack: bool = False
) -> None:
    make = partial(fresh, dtype=dtype, aligned=aligned)
    weights = [make(width, width) for _ in range(3)]
    biases = [make(width) if bias else None for _ in range(3)]
    if pack:
        qkv_projection.update_pack(*weights, *biases, make(3 * width, width), make(3 * width) if bias else None)
    else:
        qkv_projection.qkv_projection_fwd(make(rows, width), *weights, *biases)


def _qkv_projection_calls() -> list[Call]:
    def call(name: str, rows: int, width: int, dtype: torch.dtype, **how) -> Call:
        return Call(
            f"qkv_projection {rows} x {width} {name}",
            partial(_qkv_projection, width=width, dtype=dtype, **how),
            rows=rows,
            targets=GEMM_TARGETS,
            aligned=how.get("aligned", True),
        )

    return [
        call("bf16", 4096, 768, BF16),
        call("bf16", 128, 768, BF16),
        call("bf16", 8, 768, BF16),
        call("bf16 unaligned", 4096, 768, BF16, aligned=False),
        call("fp32", 4096, 768, FP32),
        call("bf16 pack", 1, 768, BF16, pack=True),
    ]


HEADS = 12


def _attention(
    rows: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    mask: tuple[int, ...] | None = None,
    mask_dtype: torch.dtype = torch.bool,
    train: bool = True,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    aligned: bool = True,
) -> None:
    """Two sequences of `rows` queries and keys; a mask of shape `mask` whose dimensions above 1 are those of the
    scores."""

    def make() -> Tensor:
        return fresh(2, rows, HEADS, head_dim, dtype=dtype, aligned=aligned).transpose(1, 2)

    query, key, value = make(), make(), make()
    if mask is not None:
        whole = (2, HEADS, rows, rows)
        mask = fresh(*(1 if own == 1 else size for own, size in zip(mask, whole, strict=True)), dtype=mask_dtype)
    seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
    settings = dropout_p, is_causal, head_dim**-0.5
    out, stats = attention.attention_fwd(query, key, value, mask, seed, *settings)
    if train:
        dout = make()
        *_, delta = attention_bwd.attention_bwd(dout, query, key, value, mask, seed, out, stats, *settings)
        if mask is not None and mask.is_floating_point():
            attention_mask_bwd.attention_mask_bwd(dout, query, key, value, mask, seed, stats, delta, *settings)


def _varlen_attention(
    rows: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    sequences: int,
    train: bool = False,
    dropout_p: float = 0.0,
    aligned: bool = True,
) -> None:
    """`sequences` of `rows` tokens each, as views of one packed projection."""
    total = rows * sequences
    views = fresh(total, 3, HEADS, head_dim, dtype=dtype, aligned=aligned).unbind(1)
    ends = torch.arange(sequences + 1, dtype=torch.int32) * rows
    seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
    settings = dropout_p, False, head_dim**-0.5
    out, stats = varlen_attention.varlen_attention_fwd(*views, ends, ends, seed, *settings)
    if train:
        varlen_attention.varlen_attention_bwd(out, *views, ends, ends, seed, out, stats, *settings)


def _attention_calls() -> list[Call]:
    def padded(name: str, rows: int, head_dim: int, dtype: torch.dtype, *, most: int | None = None, **how) -> Call:
        return Call(
            f"attention {rows} x {head_dim} {name}",
            partial(_attention, head_dim=head_dim, dtype=dtype, **how),
            rows=rows,
            targets=GEMM_TARGETS,
            aligned=how.get("aligned", True),
            most_variants=most,
        )

    def packed(name: str, rows: int, dtype: torch.dtype, *, most: int | None = None, **how) -> Call:
        return Call(
            f"varlen_attention {rows} x 64 {name}",
            partial(_varlen_attention, head_dim=64, dtype=dtype, **how),
            rows=rows,
            targets=GEMM_TARGETS,
            aligned=how.get("aligned", True),
            most_variants=most,
        )

    of_keys, of_scores = (2, 1, 1, 2), (2, HEADS, 2, 2)
    worst = dict(mask=of_scores, mask_dtype=BF16, dropout_p=0.1)
    return [
        padded("bf16 inference", 512, 64, BF16, train=False),
        padded("bf16 training", 512, 64, BF16, mask=of_keys, dropout_p=0.1),
        padded("bf16 training without dropout", 512, 64, BF16, mask=of_keys),
        padded("bf16 training with a bias", 512, 64, BF16, **worst),
        padded("bf16 bias of keys", 512, 64, BF16, mask=of_keys, mask_dtype=BF16),
        padded("fp16 causal", 512, 64, FP16, is_causal=True),
        padded("bf16 unaligned", 512, 64, BF16, train=False, aligned=False),
        padded("bf16 training", 128, 32, BF16, mask=of_keys, dropout_p=0.1),
        padded("bf16 training", 16, 64, BF16, mask=of_keys, dropout_p=0.1),
        padded("bf16 training with a bias", 512, 80, BF16, **worst),
        padded("bf16 training with a bias", 512, 256, BF16, **worst),
        padded("bf16 inference", 512, 128, BF16, train=False),
        padded("bf16 inference", 512, 256, BF16, train=False),
        padded("fp32 training", 128, 64, FP32, mask=of_keys, dropout_p=0.1),
        padded("fp32 training with a bias", 128, 64, FP32, mask=of_scores, mask_dtype=FP32),
        packed("bf16 inference", 40, BF16, sequences=100, most=6),
        packed("bf16 inference", 512, BF16, sequences=4),
        packed("bf16 training", 512, BF16, sequences=4, train=True, dropout_p=0.1),
        packed("bf16 training without dropout", 128, BF16, sequences=4, train=True),
    ]


CALLS = [
    *_layer_norm_calls(),
    *_embed_layer_norm_calls(),
    *_linear_gelu_calls(),
    *_qkv_projection_calls(),
    *_attention_calls(),
]
