"""Attention of 12 heads of 64 with a mask of keys where there is padding: bertfast, the formula, SDPA.

python -m bertfast.benchmarks.bench_attention [options of `bertfast bench`]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bertfast import ops, reference
from bertfast.benchmarks import roofline, suite
from bertfast.benchmarks.cases import HEAD_DIM, HEADS, WIDTH, Draw, Inputs, Op, key_mask, lengths_of
from bertfast.benchmarks.records import FILLS, Cell


def draw_inputs(draw: Draw, cell: Cell) -> Inputs:
    """Query, key and value as projections leave them, (B, S, H, D)."""
    tensors: Inputs = {name: draw(cell.batch, cell.length, HEADS, HEAD_DIM) for name in ("query", "key", "value")}
    padded = cell.fill != "dense"
    mask = key_mask(lengths_of(cell), cell.length, cell.device)[:, None, None, :] if padded else None
    return {**tensors, "mask": mask}


def by_head(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    query, key, value = (inputs[name].transpose(1, 2) for name in ("query", "key", "value"))
    return query, key, value, inputs["mask"]


def formula(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention, one op after the other."""
    scores = query @ key.transpose(-1, -2) * HEAD_DIM**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1) @ value


def facts(cell: Cell) -> dict[str, Any]:
    return {"head_dim": HEAD_DIM, "mask": "none" if cell.fill == "dense" else "bool"}


def cost(pass_: str, cell: Cell, lengths: list[int], e: int) -> roofline.Cost:
    mask_bytes = 0 if cell.fill == "dense" else cell.batch * cell.length
    return roofline.attention(pass_, lengths, WIDTH, e, rows=cell.length, mask_bytes=mask_bytes)


SUBJECT = Op(
    "attention",
    draw=draw_inputs,
    eager=lambda inputs: formula(*by_head(inputs)),
    ours=lambda inputs, backend: ops.attention(*by_head(inputs), backend=backend),
    exact=lambda inputs: reference.attention(*by_head(inputs))[0],
    cost=cost,
    facts=facts,
    others={"sdpa": lambda inputs: F.scaled_dot_product_attention(*by_head(inputs))},
    fills=FILLS,
)

if __name__ == "__main__":
    suite.script(SUBJECT.name)
