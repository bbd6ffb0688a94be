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

from bertfast.kernels import layer_norm

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


CALLS = [*_layer_norm_calls()]
