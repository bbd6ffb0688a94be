"""The first half of the feed-forward, a linear layer and GELU: bertfast, and PyTorch's two ops.

python -m bertfast.benchmarks.bench_linear_gelu [options of `bertfast bench`]
"""

from __future__ import annotations

import torch.nn.functional as F

from bertfast import ops, reference
from bertfast.benchmarks import roofline, suite
from bertfast.benchmarks.cases import INNER, WIDTH, Draw, Inputs, Op
from bertfast.benchmarks.records import Cell


def draw_inputs(draw: Draw, cell: Cell) -> Inputs:
    return {
        "x": draw(cell.batch, cell.length, WIDTH),
        "weight": draw.parameter(INNER, WIDTH, scale=WIDTH**-0.5),
        "bias": draw.parameter(INNER, scale=0.1),
    }


SUBJECT = Op(
    "linear_gelu",
    draw=draw_inputs,
    eager=lambda inputs: F.gelu(F.linear(inputs["x"], inputs["weight"], inputs["bias"])),
    ours=lambda inputs, backend: ops.linear_gelu(**inputs, backend=backend),
    exact=lambda inputs: reference.linear_gelu(**inputs),
    cost=lambda pass_, cell, lengths, e: roofline.linear(pass_, sum(lengths), WIDTH, INNER, e),
)

if __name__ == "__main__":
    suite.script(SUBJECT.name)
