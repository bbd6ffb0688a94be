"""Attention of sequences packed end to end: bertfast, and what PyTorch does without packing, which is to pad them,
attend with a mask, and take the tokens out again (`eager`: by the formula, `sdpa`).

python -m bertfast.benchmarks.bench_varlen_attention [options of `bertfast bench`]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bertfast import ops, reference
from bertfast.benchmarks import roofline, suite
from bertfast.benchmarks.bench_attention import formula
from bertfast.benchmarks.cases import HEAD_DIM, HEADS, WIDTH, Draw, Inputs, Op, key_mask, lengths_of
from bertfast.benchmarks.records import FILLS, Cell

QKV = ("query", "key", "value")


def draw_inputs(draw: Draw, cell: Cell) -> Inputs:
    """Packed query, key and value (T, H, D), their ends, and where the tokens are when padded."""
    lengths = lengths_of(cell)
    mask = key_mask(lengths, cell.length, cell.device)
    ends = torch.tensor([0, *lengths], device=cell.device).cumsum(0).int()
    tensors: Inputs = {name: draw(sum(lengths), HEADS, HEAD_DIM) for name in QKV}
    return {**tensors, "ends": ends, "longest": max(lengths), "mask": mask, "rows": mask.flatten().nonzero().squeeze(1)}


def padded(attend: Callable[..., Tensor]) -> Callable[[Inputs], Tensor]:
    def call(inputs: Inputs) -> Tensor:
        mask, rows = inputs["mask"], inputs["rows"]

        def pad(x: Tensor) -> Tensor:
            empty = x.new_zeros(mask.numel(), *x.shape[1:])
            return empty.index_copy(0, rows, x).unflatten(0, mask.shape).transpose(1, 2)

        query, key, value = (pad(inputs[name]) for name in QKV)
        out = attend(query, key, value, mask[:, None, None, :])
        return out.transpose(1, 2).flatten(0, 1).index_select(0, rows)

    return call


def ours(inputs: Inputs, backend: str | None) -> Tensor:
    ends, longest = inputs["ends"], inputs["longest"]
    return ops.varlen_attention(*(inputs[name] for name in QKV), ends, ends, longest, longest, backend=backend)


SUBJECT = Op(
    "varlen_attention",
    draw=draw_inputs,
    eager=padded(formula),
    ours=ours,
    exact=lambda inputs: reference.varlen_attention(*(inputs[name] for name in QKV), inputs["ends"], inputs["ends"]),
    cost=lambda pass_, cell, lengths, e: roofline.attention(pass_, lengths, WIDTH, e),
    facts=lambda cell: {"head_dim": HEAD_DIM},
    others={"sdpa": padded(F.scaled_dot_product_attention)},
    fills=FILLS,
)

if __name__ == "__main__":
    suite.script(SUBJECT.name)
