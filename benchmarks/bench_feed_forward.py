"""Two linear layers with GELU between them: bertfast, and PyTorch's three ops.

python -m bertfast.benchmarks.bench_feed_forward [options of `bertfast bench`]
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from bertfast import ops, reference
from bertfast.benchmarks import roofline, suite
from bertfast.benchmarks.cases import INNER, WIDTH, Draw, Inputs, Op
from bertfast.benchmarks.records import Cell


def draw_inputs(draw: Draw, cell: Cell) -> Inputs:
    return {
        "x": draw(cell.batch, cell.length, WIDTH),
        "w_in": draw.parameter(INNER, WIDTH, scale=WIDTH**-0.5),
        "b_in": draw.parameter(INNER, scale=0.1),
        "w_out": draw.parameter(WIDTH, INNER, scale=INNER**-0.5),
        "b_out": draw.parameter(WIDTH, scale=0.1),
    }


def eager(inputs: Inputs) -> Tensor:
    hidden = F.gelu(F.linear(inputs["x"], inputs["w_in"], inputs["b_in"]))
    return F.linear(hidden, inputs["w_out"], inputs["b_out"])


SUBJECT = Op(
    "feed_forward",
    draw=draw_inputs,
    eager=eager,
    ours=lambda inputs, backend: ops.feed_forward(**inputs, backend=backend),
    exact=lambda inputs: reference.feed_forward(**inputs),
    cost=lambda pass_, cell, lengths, e: roofline.feed_forward(pass_, sum(lengths), WIDTH, INNER, e),
    facts=lambda cell: {"features": ("gelu",)},
)

if __name__ == "__main__":
    suite.script(SUBJECT.name)
