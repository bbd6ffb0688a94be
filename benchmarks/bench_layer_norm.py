"""Residual and LayerNorm in one: bertfast, and PyTorch's sum and LayerNorm one after the other.

python -m bertfast.benchmarks.bench_layer_norm [options of `bertfast bench`]
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from bertfast import ops, reference
from bertfast.benchmarks import roofline, suite
from bertfast.benchmarks.cases import WIDTH, Draw, Inputs, Op
from bertfast.benchmarks.records import Cell

EPS = 1e-12


def draw_inputs(draw: Draw, cell: Cell) -> Inputs:
    shape = cell.batch, cell.length, WIDTH
    return {
        "x": draw(*shape),
        "residual": draw(*shape),
        # As a module's: TransformerEngine takes nothing else.
        "weight": draw.parameter(WIDTH, scale=0.1, shift=1.0),
        "bias": draw.parameter(WIDTH, scale=0.1),
    }


def eager(inputs: Inputs) -> Tensor:
    return F.layer_norm(inputs["x"] + inputs["residual"], (WIDTH,), inputs["weight"], inputs["bias"], EPS)


SUBJECT = Op(
    "add_layer_norm",
    draw=draw_inputs,
    eager=eager,
    ours=lambda inputs, backend: ops.add_layer_norm(**inputs, eps=EPS, backend=backend),
    exact=lambda inputs: reference.add_layer_norm(**inputs, eps=EPS)[0],
    cost=lambda pass_, cell, lengths, e: roofline.add_layer_norm(pass_, sum(lengths), WIDTH, e),
    facts=lambda cell: {"width": WIDTH},
)

if __name__ == "__main__":
    suite.script(SUBJECT.name)
