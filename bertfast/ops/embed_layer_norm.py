"""embed_layer_norm: word + token type + position embeddings, LayerNorm, dropout.

Memory floor for T tokens of width N at e bytes an element: one gathered word row and one output row each, 2 T N e; the
position and token type rows stay in cache.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bertfast.backends import FLOAT, Capability, choose, describe, needs_grad, register
from bertfast.dropout import apply_dropout, check_probability
from bertfast.ops._checks import (
    check_broadcast,
    check_device,
    check_range,
    check_rank,
    check_required,
    check_shape,
    check_tensors,
    values_are_checked,
)
from bertfast.ops._library import extension_unavailable
from bertfast.ops.layer_norm import add_layer_norm


def _gather(ids, table, padding_idx=None):
    """Rows of a table. Where ids are not looked at beforehand, an id outside the table reads row 0 and gives NaN: torch
    would stop the whole device on it."""
    if values_are_checked(ids):
        return F.embedding(ids, table, padding_idx)
    inside = (ids >= 0) & (ids < table.shape[0])
    rows = F.embedding(torch.where(inside, ids, 0), table, padding_idx)
    return rows.masked_fill(~inside.unsqueeze(-1), math.nan)


def _composed(
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
):
    total = _gather(input_ids, word, padding_idx) if inputs_embeds is None else inputs_embeds
    if token_type is not None:
        total = total + (token_type[0] if token_type_ids is None else _gather(token_type_ids, token_type))
    places = _gather(position_ids, position, position_padding_idx).expand_as(total)
    normalised = add_layer_norm(total, places, weight, bias, eps, backend=backend)
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
            outside its table, `dropout_p` outside [0, 1].
        TypeError: tables or embeddings that are not floating point, ids that are not int32 or int64.
        IndexError: an id outside its table. On a GPU and in a trace values are not looked at, and such an id makes its
            row NaN; `BERTFAST_VALIDATE=1` has them looked at on a GPU.
        BackendError: `backend` cannot serve these inputs.
    """
    check_probability(dropout_p)
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
        position_ids = torch.arange(shape[-1], device=word.device)
    else:
        check_broadcast("position_ids", position_ids, shape)
        check_range("position_ids", position_ids, position.shape[0], "position")
    if token_type_ids is not None:
        check_broadcast("token_type_ids", token_type_ids, shape)
        check_range("token_type_ids", token_type_ids, token_type.shape[0], "token_type")
    check_range("input_ids", input_ids, word.shape[0], "word")
    call = describe("embed_layer_norm", floats, grad=needs_grad(*floats), dropout_p=dropout_p, width=width)
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
    )


register(Capability("embed_layer_norm", "torch", functools.partial(_composed, "torch")))
register(
    Capability(
        "embed_layer_norm",
        "cpu",
        functools.partial(_composed, "cpu"),
        devices=frozenset({"cpu"}),
        dtypes=FLOAT,
        unavailable=extension_unavailable,
    )
)
