"""Every activation against a formula of its own in float64, forward and derivative."""

import importlib
import math

import pytest
import torch

from bertfast.activations import ACTIVATIONS, FORMULAS, get_activation
from helpers.op_cases import DTYPES, backends_for
from helpers.tolerance import assert_within, eps_of


def _erf_gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _mish(x):
    return x * torch.tanh(torch.log1p(torch.exp(-x.abs())) + x.clamp_min(0))


def _sigmoid(x):
    return torch.where(x >= 0, 1 / (1 + torch.exp(-x.abs())), torch.exp(-x.abs()) / (1 + torch.exp(-x.abs())))


EXACT = {
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


def _plain(name, x):
    return _forward_and_derivative(ACTIVATIONS[name], x)


def _triton(name, x):
    kernels = importlib.import_module("bertfast.kernels.bias_activation")
    rows, formula = x.reshape(1, -1), FORMULAS[name]
    y = torch.empty_like(rows)
    kernels.bias_activation_fwd(rows[None], None, formula, None, 0.0, y, rows.new_empty(0))
    dy, again, _ = kernels.linear_gelu_bwd(torch.ones_like(rows), rows, formula, None, 0.0, True, False)
    torch.testing.assert_close(again, y, rtol=0, atol=0, equal_nan=True)
    return y.view_as(x), dy.view_as(x)


def _cuda(name, x):
    """The product with the one weight 1 is x."""
    column, one = x.reshape(-1, 1), torch.ones(1, 1, dtype=x.dtype)
    y, pre = torch.ops.bertfast.linear_gelu_fwd_cuda(column, one, None, FORMULAS[name], None, 0.0, True)
    arguments = torch.ones_like(pre), pre, FORMULAS[name], None, 0.0, True, False
    dy, again, _ = torch.ops.bertfast.linear_gelu_bwd_cuda(*arguments)
    torch.testing.assert_close(again, y, rtol=0, atol=0, equal_nan=True)
    return y.view_as(x), dy.view_as(x)


def _cpu(name, x):
    """As `_cuda`, and by the passes alone: other loops, whose products and sums the compiler may fuse in other ways."""
    column, one = x.reshape(-1, 1), torch.ones(1, 1, dtype=x.dtype)
    y, pre = torch.ops.bertfast.linear_gelu_fwd_cpu(column, one, None, FORMULAS[name], None, 0.0, True)
    dy, again, _ = torch.ops.bertfast.linear_gelu_bwd_cpu(
        torch.ones_like(pre), pre, FORMULAS[name], None, 0.0, True, False
    )
    alone, _, _ = torch.ops.bertfast.linear_gelu_bwd_cpu(
        torch.ones_like(pre), pre, FORMULAS[name], None, 0.0, False, False
    )
    of_a_row = torch.ops.bertfast.activation_fwd_cpu(x, FORMULAS[name], None, 0.0)
    for value, same in ((y, again), (y, of_a_row.view_as(y)), (dy, alone)):
        torch.testing.assert_close(same, value, rtol=2 * eps_of(x.dtype), atol=eps_of(torch.float32), equal_nan=True)
    return of_a_row, dy.view_as(x)


SERVED = {backend for backend, _ in backends_for("feed_forward")}
KERNELS = [_cuda, *(kernel for kernel, backend in ((_triton, "triton"), (_cpu, "cpu")) if backend in SERVED)]
IMPLEMENTATIONS = [_plain, *KERNELS]


def test_every_name_has_a_formula():
    assert EXACT.keys() == ACTIVATIONS.keys() == FORMULAS.keys()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_forward_and_derivative(implementation, name, dtype):
    """Within a few roundings of x and of the result: there is no stock to compare with but itself. Stock takes the
    derivatives of tanh and sigmoid from their rounded results, which are about 1."""
    x = torch.cat([NORMAL, EXTREME, -EXTREME]).to(dtype)
    x = x[(x.abs() > 1e-6) & (x != 6)]  # at a corner the derivative is a matter of taste
    ours = implementation(name, x)
    exact = _forward_and_derivative(EXACT[name], x.double())
    fp32 = 4 * eps_of(torch.float32) * x.double().abs().clamp(1, 16)
    for what, mine, true in zip(("forward", "derivative"), ours, exact, strict=True):
        assert mine.dtype == dtype
        size = true.abs() + (1.0 if name in ("tanh", "sigmoid") else 0.0)
        assert_within(mine, [], true, fp32 + eps_of(dtype) * size, f"{name} {what}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in EXACT if "gelu" in name])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gelu_far_out(implementation, name, dtype):
    x = torch.cat([EXTREME[EXTREME > 15], torch.tensor([3e4], dtype=torch.float64)]).to(dtype)
    y, dy = implementation(name, x)
    assert torch.equal(y, x) and torch.equal(dy, torch.ones_like(x))
    y, dy = implementation(name, -x)
    assert y.double().abs().max() < 1e-12 and dy.double().abs().max() < 1e-12


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", EXACT)
def test_kernels_far_beyond_fp32_squares(name, kernel):
    """Out there every activation is linear or constant, and no square, cube or exponential on the way makes it NaN."""
    x = torch.tensor([1e10, 1e14, 1e20, 3e38, -1e10, -1e14, -1e20, -3e38])
    y, dy = kernel(name, x)
    held, slope = _forward_and_derivative(EXACT[name], x.double().clamp(-1e4, 1e4))
    torch.testing.assert_close(dy.double(), slope)
    torch.testing.assert_close(y.double(), torch.where(slope == 0, held, x.double() * slope))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", EXACT)
def test_kernels_take_the_side_of_stock_at_corners(name, kernel):
    x = torch.tensor([0.0, -0.0, 6.0, -6.0])
    for ours, stock in zip(kernel(name, x), _plain(name, x), strict=True):
        torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("name", "exact"), [("elu", torch.expm1), ("tanh", torch.tanh)])
def test_kernels_keep_every_digit_of_small_results(name, exact, kernel):
    """exp(x) - 1 near 0 would keep those of 1 only."""
    x = -torch.cat([torch.logspace(-6, 0, 200, dtype=torch.float64), torch.linspace(0.1, 0.8, 701).double()]).float()
    y, true = kernel(name, x)[0].double(), exact(x.double())
    assert ((y - true) / true).abs().max() < 2.5 * eps_of(torch.float32)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", EXACT)
def test_kernels_pass_nan_on(name, kernel):
    x = torch.full((1, 5), float("nan"))
    y, dy = kernel(name, x)
    assert y.isnan().all()
    stock = _plain(name, x)[1]
    assert torch.equal(dy.isnan(), stock.isnan())


def test_the_forms_of_gelu_differ_as_they_should():
    x = NORMAL
    for name, gap in (("gelu_new", 4.7e-4), ("gelu_fast", 4.7e-4), ("quick_gelu", 2.0e-2)):
        found = (ACTIVATIONS["gelu"](x) - ACTIVATIONS[name](x)).abs().max().item()
        assert abs(found / gap - 1) < 0.05


def test_agrees_with_transformers():
    stock = pytest.importorskip("transformers.activations").ACT2FN
    for name in EXACT:
        if name in stock:
            torch.testing.assert_close(ACTIVATIONS[name](NORMAL), stock[name](NORMAL))
    assert EXACT.keys() - stock.keys() <= {"elu", "gelu_python_tanh"}


def test_callables_pass_and_unknown_names_do_not():
    assert get_activation(torch.sin) is torch.sin
    assert get_activation("gelu") is ACTIVATIONS["gelu"]
    for name in ("GELU", "gelu_10", "", "erf"):
        with pytest.raises(ValueError, match=f"activation must be a callable or one of gelu, .*; got '{name}'"):
            get_activation(name)
    for other in (None, 3, ["gelu"]):
        with pytest.raises(ValueError, match="activation must be a callable"):
            get_activation(other)
