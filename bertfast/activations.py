"""Activation functions of the BERT family by their configuration names, in plain differentiable PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _in_float32(formula: Activation) -> Activation:
    """fp16 and bf16 go through fp32: x**3 overflows fp16 from 40.5 on, and the derivative is then inf * 0."""

    def activation(x: Tensor) -> Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):
            return formula(x.float()).to(x.dtype)
        return formula(x)

    return activation


def _gelu_fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _gelu_accurate(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _linear(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "gelu_accurate": _in_float32(_gelu_accurate),
    "gelu_fast": _in_float32(_gelu_fast),
    "quick_gelu": _in_float32(_quick_gelu),
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "silu": F.silu,
    "swish": F.silu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "linear": _linear,
}

# The formula behind each configuration name, as kernels know it. `gelu_fast` and `gelu_accurate` write the tanh form in
# other ways: in fp32 their constants are the same numbers.
FORMULAS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu6": "relu6",
    "leaky_relu": "leaky_relu",
    "elu": "elu",
    "silu": "silu",
    "swish": "silu",
    "mish": "mish",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "linear": "linear",
}

# The configuration names whose formula `torch.nn.functional.gelu` has, and its `approximate` for each.
GELU_FORMS = {
    "gelu": "none",
    "gelu_python": "none",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
}


def get_activation(activation: str | Activation) -> Activation:
    """The function of a configuration name such as `"gelu"` (exact, by erf); a callable is returned as it is.

    Raises:
        ValueError: the name is unknown. It is never replaced by another activation.
    """
    if callable(activation):
        return activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation must be a callable or one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    return ACTIVATIONS[activation]
