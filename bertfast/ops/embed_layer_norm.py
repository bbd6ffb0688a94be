"""embed_layer_norm: word + token type + position embeddings, LayerNorm, dropout.

Memory floor for T tokens of width N at e bytes an element: one gathered word row and one output row each, 2 T N e; the
position and token type rows stay in cache.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bertfast.backends import FLOAT, Capability, choose, describe, needs_grad, register
from bertfast.dropout import apply_dropout, check_probability, seed_for
from bertfast.kernels.tiles import MAX_WIDTH
from bertfast.ops._autocast import normalises_in_float32
from bertfast.ops._checks import (
    check_broadcast,
    check_device,
    check_eps,
    check_range,
    check_rank,
    check_required,
    check_shape,
    check_tensors,
    values_are_checked,
)
from bertfast.ops._library import TRITON_DEVICES, cuda_unavailable, define, extension_unavailable, triton_unavailable
from bertfast.ops._once import distinct, once
from bertfast.ops.layer_norm import add_layer_norm

_BACKENDS = ("triton", "cuda", "cpu")


def _fwd_fake(
    input_ids,
    token_type_ids,
    position_ids,
    inputs_embeds,
    word,
    position,
    token_type,
    weight,
    bias,
    seed,
    eps,
    dropout_p,
    dtype,
    need_sum,
):
    tokens = input_ids.shape if inputs_embeds is None else inputs_embeds.shape[:-1]
    out = word.new_empty((*tokens, word.shape[1]), dtype=dtype)
    total = word.new_empty(out.shape if need_sum else (0,), dtype=dtype)
    mean = word.new_empty(tokens, dtype=torch.float32)
    return out, total, mean, torch.empty_like(mean)


def _bwd_fake(dout, total, mean, rstd, weight, seed, dropout_p):
    dweight = weight.new_empty(weight.shape, dtype=torch.float32)
    return total.new_empty(total.shape), dweight, torch.empty_like(dweight)


_FWD = define(
    "embed_layer_norm_fwd",
    "(Tensor? input_ids, Tensor? token_type_ids, Tensor? position_ids, Tensor? inputs_embeds, Tensor word,"
    " Tensor position, Tensor? token_type, Tensor weight, Tensor bias, Tensor? seed, float eps, float dropout_p,"
    " ScalarType dtype, bool need_sum) -> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)",
    _fwd_fake,
    _BACKENDS,
    launcher="embed_layer_norm",
)
_BWD = define(
    "embed_layer_norm_bwd",
    "(Tensor dout, Tensor sum, Tensor mean, Tensor rstd, Tensor weight, Tensor? seed, float dropout_p)"
    " -> (Tensor dsum, Tensor dweight, Tensor dbias)",
    _bwd_fake,
    _BACKENDS,
    launcher="embed_layer_norm",
)


def _table_gradient(dsum: Tensor, ids: Tensor | None, rows: int, padding_idx: int | None) -> Tensor:
    """dsum (..., S, N) summed by id, (rows, N): over broadcast dimensions first, then by torch's embedding backward,
    which sorts and needs no atomics. What is padding or outside the table goes to a row behind it, which torch leaves
    alone."""
    ids = ids.reshape((1,) * (dsum.dim() - 1 - ids.dim()) + ids.shape)
    repeated = [dim for dim, size in enumerate(ids.shape) if size != dsum.shape[dim]]
    if repeated:
        dsum = dsum.sum(repeated, keepdim=True)
    counted = (ids >= 0) & (ids < rows)
    if padding_idx is not None:
        counted &= ids != padding_idx
    ids = torch.where(counted, ids, rows)
    return torch.ops.aten.embedding_dense_backward(dsum, ids, rows + 1, rows, False)[:rows]


def _backward(
    backend, dropout_p, rows, paddings, dout, total, mean, rstd, weight, input_ids, token_type_ids, position_ids, seed
):
    """Gradients of the sum, of weight and bias, and of the word, position and token type tables; of a table whose
    `rows` are None it is not wanted."""
    dsum, dweight, dbias = _BWD[backend](dout, total, mean, rstd, weight, seed, dropout_p)
    _, position_rows, token_type_rows = rows
    if token_type_ids is None and token_type_rows is not None:
        token_type_ids = dsum.new_zeros(1, dtype=torch.int64)
    if position_ids is None and position_rows is not None:
        position_ids = torch.arange(dsum.shape[-2], device=dsum.device)
    ids = input_ids, position_ids, token_type_ids
    tables = (
        None if count is None else _table_gradient(dsum, i, count, padding)
        for i, count, padding in zip(ids, rows, (*paddings, None), strict=True)
    )
    return dsum, dweight, dbias, *tables


class _EmbedLayerNorm(torch.autograd.Function):
    """Saves the ids, the sum, the statistics and the seed; the dropout mask is regenerated. Differentiable once.

    As in add_layer_norm the sum is an output in eager mode, so that the saved one leads back to the inputs.
    """

    @staticmethod
    def forward(
        ctx,
        input_ids,
        token_type_ids,
        position_ids,
        inputs_embeds,
        word,
        position,
        token_type,
        weight,
        bias,
        seed,
        eps,
        dropout_p,
        padding_idx,
        position_padding_idx,
        dtype,
        sum_is_output,
        backend,
    ):
        tables = (inputs_embeds, word, position, token_type)
        ids = (input_ids, token_type_ids, position_ids)
        out, total, mean, rstd = _FWD[backend](*ids, *tables, weight, bias, seed, eps, dropout_p, dtype, True)
        ctx.save_for_backward(total, mean, rstd, weight, *ids, seed)
        ctx.backend, ctx.dropout_p = backend, dropout_p
        ctx.paddings = padding_idx, position_padding_idx
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (*tables, weight, bias))
        ctx.rows = tuple(None if t is None else t.shape[0] for t in tables[1:])
        ctx.set_materialize_grads(False)
        return (out, total) if sum_is_output else (out, None)

    @staticmethod
    def backward(ctx, dout, _):
        total, mean, rstd, weight, input_ids, token_type_ids, position_ids, seed = ctx.saved_tensors
        _, _, _, need_embeds, need_word, *need_others = ctx.needs_input_grad
        needed = need_word and input_ids is not None, *need_others[:2]
        rows = tuple(count if need else None for count, need in zip(ctx.rows, needed, strict=True))
        backward = partial(_backward, ctx.backend, ctx.dropout_p, rows, ctx.paddings)
        dsum, dweight, dbias, *tables = once("embed_layer_norm", backward)(
            torch.zeros_like(total) if dout is None else dout,
            total,
            mean,
            rstd,
            weight,
            input_ids,
            token_type_ids,
            position_ids,
            seed,
        )
        gradients = (dsum if need_embeds else None, *tables, dweight, dbias)
        cast = (None if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True))
        return (*(None,) * 3, *cast, *(None,) * 8)


def _promoted(inputs_embeds, word, position, token_type):
    dtype = torch.promote_types((word if inputs_embeds is None else inputs_embeds).dtype, position.dtype)
    return dtype if token_type is None else torch.promote_types(dtype, token_type.dtype)


def _fused(
    backend,
    input_ids,
    token_type_ids,
    position_ids,
    word,
    position,
    token_type,
    weight,
    bias,
    eps,
    dropout_p,
    padding_idx,
    position_padding_idx,
    inputs_embeds,
    seed,
    grad,
):
    seed = seed_for(dropout_p, seed, word.device)
    dtype = torch.float32 if normalises_in_float32(word) else _promoted(inputs_embeds, word, position, token_type)
    tensors = (input_ids, token_type_ids, position_ids, inputs_embeds, word, position, token_type, weight, bias)
    if not grad:
        return _FWD[backend](*tensors, seed, eps, dropout_p, dtype, False)[0]
    paddings = (
        None if row is None else row % table.shape[0]
        for row, table in ((padding_idx, word), (position_padding_idx, position))
    )
    settings = (seed, eps, dropout_p, *paddings, dtype)
    return _EmbedLayerNorm.apply(*distinct(*tensors), *settings, not torch.compiler.is_compiling(), backend)[0]


def _gather(ids, table, padding_idx=None):
    """Rows of a table. Where ids are not looked at beforehand, an id outside the table reads row 0 and gives NaN: torch
    would stop the whole device on it."""
    if values_are_checked(ids):
        return F.embedding(ids, table, padding_idx)
    inside = (ids >= 0) & (ids < table.shape[0])
    rows = F.embedding(torch.where(inside, ids, 0), table, padding_idx)
    return rows.masked_fill(~inside.unsqueeze(-1), math.nan)


def _composed(
    input_ids,
    token_type_ids,
    position_ids,
    word,
    position,
    token_type,
    weight,
    bias,
    eps,
    dropout_p,
    padding_idx,
    position_padding_idx,
    inputs_embeds,
    seed,
    grad,
):
    if position_ids is None:
        position_ids = torch.arange(
            (input_ids.shape if inputs_embeds is None else inputs_embeds.shape[:-1])[-1], device=word.device
        )
    total = _gather(input_ids, word, padding_idx) if inputs_embeds is None else inputs_embeds
    if token_type is not None:
        total = total + (token_type[0] if token_type_ids is None else _gather(token_type_ids, token_type))
    places = _gather(position_ids, position, position_padding_idx).expand_as(total)
    normalised = add_layer_norm(total, places, weight, bias, eps, backend="torch")
    return apply_dropout(normalised, dropout_p, "embed_layer_norm", seed)


def embed_layer_norm(
    input_ids: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    word: Tensor,
    position: Tensor,
    token_type: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-12,
    *,
    dropout_p: float = 0.0,
    padding_idx: int | None = None,
    position_padding_idx: int | None = None,
    inputs_embeds: Tensor | None = None,
    backend: str | None = None,
    _seed: Tensor | None = None,
) -> Tensor:
    """The embedding layer of BERT: three gathers, their sum, LayerNorm, dropout.

    Equivalent PyTorch::

        total = F.embedding(input_ids, word, padding_idx) + F.embedding(token_type_ids, token_type)
        total = total + F.embedding(position_ids, position)
        return F.dropout(F.layer_norm(total, (N,), weight, bias, eps), dropout_p)

    Args:
        input_ids: (..., S) int32 or int64; None when `inputs_embeds` is given.
        token_type_ids: shape of `input_ids`, or broadcasting to it; None means type 0.
        position_ids: shape of `input_ids`, or broadcasting to it; None means 0 .. S - 1.
        word, position, token_type: (rows, N) tables; `token_type` None for models without token types.
        weight, bias: (N,) of the LayerNorm.
        eps: added to the variance in fp32.
        dropout_p: dropout of the output, applied whenever it is above 0.
        padding_idx: the row of `word` that gets no gradient.
        position_padding_idx: the row of `position` that gets no gradient (RoBERTa's padding has a position of its own).
        inputs_embeds: (..., S, N) rows that take the place of `word[input_ids]`.
        backend: a backend's name, or None for the one in force.
        _seed: int64 tensor of one element that fixes the dropout mask (see `ops.dropout_mask`).

    Returns:
        (..., S, N) in the promoted dtype of the tables.

    Raises:
        ValueError: shapes or devices that do not fit, both or neither of `input_ids` and `inputs_embeds`, a padding row
            outside its table, `dropout_p` outside [0, 1], `eps` below 0.
        TypeError: tables or embeddings that are not floating point, ids that are not int32 or int64.
        IndexError: an id outside its table. On a GPU and in a trace values are not looked at, and such an id makes its
            row NaN; `BERTFAST_VALIDATE=1` has them looked at on a GPU.
        BackendError: `backend` cannot serve these inputs.
    """
    check_probability(dropout_p)
    check_eps(eps)
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("exactly one of input_ids and inputs_embeds must be given")
    check_required(("word", "position", "weight", "bias"), word, position, weight, bias)
    floats = (word, position, token_type, weight, bias, inputs_embeds)
    check_tensors(("word", "position", "token_type", "weight", "bias", "inputs_embeds"), *floats)
    ids = (("input_ids", input_ids), ("token_type_ids", token_type_ids), ("position_ids", position_ids))
    for name, tensor in ids:
        check_device(name, tensor, word.device)
    check_rank("word", word, 2)
    width = word.shape[-1]
    for name, table in (("word", word), ("position", position), ("token_type", token_type)):
        if table is not None and (table.dim() != 2 or table.shape[1] != width):
            raise ValueError(f"{name} must have shape (rows, {width}), got {tuple(table.shape)}")
    if token_type is not None and token_type_ids is None and token_type.shape[0] == 0:
        raise ValueError("token_type has no row 0, which is every token's without token_type_ids")
    for name, row, table in (
        ("padding_idx", padding_idx, word),
        ("position_padding_idx", position_padding_idx, position),
    ):
        if row is not None and not -table.shape[0] <= row < table.shape[0]:
            raise ValueError(f"{name} must be a row of a table of {table.shape[0]}, got {row}")
    check_shape("weight", weight, (width,))
    check_shape("bias", bias, (width,))
    if token_type_ids is not None and token_type is None:
        raise ValueError("token_type_ids were given, but there is no token_type table")
    if inputs_embeds is not None and (inputs_embeds.dim() < 2 or inputs_embeds.shape[-1] != width):
        raise ValueError(f"inputs_embeds must have shape (..., S, {width}), got {tuple(inputs_embeds.shape)}")
    if input_ids is not None:
        check_rank("input_ids", input_ids, 1)
    shape = input_ids.shape if inputs_embeds is None else inputs_embeds.shape[:-1]
    if position_ids is None:
        if shape[-1] > position.shape[0]:
            raise IndexError(f"the sequence has {shape[-1]} tokens, but position has only {position.shape[0]} rows")
    else:
        check_broadcast("position_ids", position_ids, shape)
        check_range("position_ids", position_ids, position.shape[0], "position")
    if token_type_ids is not None:
        check_broadcast("token_type_ids", token_type_ids, shape)
        check_range("token_type_ids", token_type_ids, token_type.shape[0], "token_type")
    check_range("input_ids", input_ids, word.shape[0], "word")
    grad = needs_grad(*floats)
    call = describe("embed_layer_norm", floats, grad=grad, dropout_p=dropout_p, width=width)
    return choose(call, backend).implementation(
        input_ids,
        token_type_ids,
        position_ids,
        word,
        position,
        token_type,
        weight,
        bias,
        eps,
        dropout_p,
        padding_idx,
        position_padding_idx,
        inputs_embeds,
        _seed,
        grad,
    )


register(Capability("embed_layer_norm", "torch", _composed))
register(
    Capability(
        "embed_layer_norm",
        "triton",
        partial(_fused, "triton"),
        devices=TRITON_DEVICES,
        dtypes=FLOAT,
        min_compute=(7, 5),
        max_width=MAX_WIDTH,
        unavailable=triton_unavailable,
    )
)
register(
    Capability(
        "embed_layer_norm",
        "cuda",
        partial(_fused, "cuda"),
        devices=frozenset({"cuda"}),
        dtypes=FLOAT,
        min_compute=(8, 0),
        max_width=MAX_WIDTH,
        unavailable=cuda_unavailable,
    )
)
register(
    Capability(
        "embed_layer_norm",
        "cpu",
        partial(_fused, "cpu"),
        devices=frozenset({"cpu"}),
        dtypes=FLOAT,
        unavailable=extension_unavailable,
    )
)
