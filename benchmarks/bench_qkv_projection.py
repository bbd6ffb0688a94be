"""Query, key and value of one input: bertfast, and PyTorch's three linear layers.

python -m bertfast.benchmarks.bench_qkv_projection [options of `bertfast bench`]
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from bertfast import ops, reference
from bertfast.benchmarks import roofline, suite
from bertfast.benchmarks.cases import WIDTH, Draw, Inputs, Op
from bertfast.benchmarks.records import Cell


def draw_inputs(draw: Draw, cell: Cell) -> Inputs:
    weights = {f"w{name}": draw.parameter(WIDTH, WIDTH, scale=WIDTH**-0.5) for name in "qkv"}
    biases = {f"b{name}": draw.parameter(WIDTH, scale=0.1) for name in "qkv"}
    return {"x": draw(cell.batch, cell.length, WIDTH), **weights, **biases}


def arguments(inputs: Inputs) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    return inputs["x"], tuple(inputs[f"w{name}"] for name in "qkv"), tuple(inputs[f"b{name}"] for name in "qkv")


def eager(inputs: Inputs) -> tuple[Tensor, ...]:
    return tuple(F.linear(inputs["x"], inputs[f"w{name}"], inputs[f"b{name}"]) for name in "qkv")


SUBJECT = Op(
    "qkv_projection",
    draw=draw_inputs,
    eager=eager,
    ours=lambda inputs, backend: ops.qkv_projection(*arguments(inputs), backend=backend),
    exact=lambda inputs: reference.qkv_projection(*arguments(inputs)),
    cost=lambda pass_, cell, lengths, e: roofline.qkv_projection(pass_, sum(lengths), WIDTH, e),
    outputs=("q", "k", "v"),
)

if __name__ == "__main__":
    suite.script(SUBJECT.name)
