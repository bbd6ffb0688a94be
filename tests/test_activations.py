"""Every activation against a formula of its own in float64, forward and derivative."""

import math

import pytest
import torch

from bertfast.activations import ACTIVATIONS, get_activation
from helpers.op_cases import DTYPES
from helpers.tolerance import assert_within, eps_of


def _erf_gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _mish(x):
    return x * torch.tanh(torch.log1p(torch.exp(-x.abs())) + x.clamp_min(0))


def _sigmoid(x):
    return torch.where(x >= 0, 1 / (1 + torch.exp(-x.abs())), torch.exp(-x.abs()) / (1 + torch.exp(-x.abs())))


FORMULAS = {
    "gelu": _erf_gelu,
    "gelu_python": _erf_gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_python_tanh": _tanh_gelu,
    "gelu_accurate": _tanh_gelu,
    "gelu_fast": lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "relu6": lambda x: torch.where(x > 6, torch.full_like(x, 6), torch.where(x > 0, x, torch.zeros_like(x))),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "elu": lambda x: torch.where(x > 0, x, torch.exp(x.clamp_max(0)) - 1),
    "silu": lambda x: x * _sigmoid(x),
    "swish": lambda x: x * _sigmoid(x),
    "mish": _mish,
    "tanh": lambda x: torch.sign(x) * (1 - torch.exp(-2 * x.abs())) / (1 + torch.exp(-2 * x.abs())),
    "sigmoid": _sigmoid,
    "linear": lambda x: 1.0 * x,
}
NORMAL = torch.arange(-8, 8.005, 0.01, dtype=torch.float64)
EXTREME = torch.tensor([5, 10, 11, 12, 20, 40, 41, 50, 100, 1e3, 1e4], dtype=torch.float64)


def _forward_and_derivative(function, x):
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


def test_every_name_has_a_formula():
    assert FORMULAS.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMULAS)
def test_forward_and_derivative(name, dtype):
    """Within a few roundings of x and of the result: there is no stock to compare with but itself. Stock takes the
    derivatives of tanh and sigmoid from their rounded results, which are about 1."""
    x = torch.cat([NORMAL, EXTREME, -EXTREME]).to(dtype)
    x = x[(x.abs() > 1e-6) & (x != 6)]  # at a corner the derivative is a matter of taste
    ours = _forward_and_derivative(ACTIVATIONS[name], x)
    exact = _forward_and_derivative(FORMULAS[name], x.double())
    fp32 = 4 * eps_of(torch.float32) * x.double().abs().clamp(1, 16)
    for what, mine, true in zip(("forward", "derivative"), ours, exact, strict=True):
        assert mine.dtype == dtype
        size = true.abs() + (1.0 if name in ("tanh", "sigmoid") else 0.0)
        assert_within(mine, [], true, fp32 + eps_of(dtype) * size, f"{name} {what}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in FORMULAS if "gelu" in name])
def test_gelu_far_out(name, dtype):
    x = torch.cat([EXTREME[EXTREME > 15], torch.tensor([3e4], dtype=torch.float64)]).to(dtype)
    y, dy = _forward_and_derivative(ACTIVATIONS[name], x)
    assert torch.equal(y, x) and torch.equal(dy, torch.ones_like(x))
    y, dy = _forward_and_derivative(ACTIVATIONS[name], -x)
    assert y.double().abs().max() < 1e-12 and dy.double().abs().max() < 1e-12


def test_the_forms_of_gelu_differ_as_they_should():
    x = NORMAL
    for name, gap in (("gelu_new", 4.7e-4), ("gelu_fast", 4.7e-4), ("quick_gelu", 2.0e-2)):
        found = (ACTIVATIONS["gelu"](x) - ACTIVATIONS[name](x)).abs().max().item()
        assert abs(found / gap - 1) < 0.05


def test_agrees_with_transformers():
    stock = pytest.importorskip("transformers.activations").ACT2FN
    for name in FORMULAS:
        if name in stock:
            torch.testing.assert_close(ACTIVATIONS[name](NORMAL), stock[name](NORMAL))
    assert FORMULAS.keys() - stock.keys() <= {"elu", "gelu_python_tanh"}


def test_callables_pass_and_unknown_names_do_not():
    assert get_activation(torch.sin) is torch.sin
    assert get_activation("gelu") is ACTIVATIONS["gelu"]
    for name in ("GELU", "gelu_10", "", "erf"):
        with pytest.raises(ValueError, match=f"activation must be a callable or one of gelu, .*; got '{name}'"):
            get_activation(name)
    for other in (None, 3, ["gelu"]):
        with pytest.raises(ValueError, match="activation must be a callable"):
            get_activation(other)
