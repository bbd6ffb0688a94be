"""Liger's LayerNorm of a sum that PyTorch adds: its fused sum and norm is an RMSNorm. Run in Triton's interpreter, not
on a GPU yet.
"""

from __future__ import annotations

from torch import Tensor

from bertfast.benchmarks.bench_layer_norm import EPS
from bertfast.benchmarks.cases import Forward, Inputs
from bertfast.benchmarks.records import Cell


def add_layer_norm(cell: Cell) -> Forward:
    """Of x and residual (..., N), the output (..., N).

    Raises:
        ImportError: liger-kernel is missing.
    """
    from liger_kernel.transformers.functional import liger_layer_norm

    def formula(inputs: Inputs) -> Tensor:
        return liger_layer_norm(inputs["x"] + inputs["residual"], inputs["weight"], inputs["bias"], EPS)

    return formula
