"""FusedAddLayerNorm: residual add, dropout and LayerNorm in one module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertfast import ops


class FusedAddLayerNorm(nn.Module):
    """LN(residual + dropout(x)); without a residual, plain LayerNorm. Drop-in for `dropout`, `+` and
    `nn.LayerNorm` with the parameters `weight` and `bias` of the latter.

    Args:
        width: size N of the last dimension.
        eps: added to the variance.
        dropout: probability of dropping `x`, in training only.
    """

    def __init__(
        self,
        width: int,
        eps: float = 1e-12,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.width, self.eps, self.dropout = width, eps, dropout
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(width, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x and residual (..., N) to (..., N); see `ops.add_layer_norm`."""
        dropout_p = self.dropout if self.training else 0.0
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps, dropout_p=dropout_p)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}, dropout={self.dropout}"
