"""linear_gelu on every backend."""

import pytest
import torch
import torch.nn.functional as F

from bertfast import BackendError, ops
from helpers import poison
from helpers.op_cases import ALL_DTYPES, LinearGelu, backends_for, random
from helpers.poison import LAYOUTS, poisoned_memory  # noqa: F401
from helpers.tolerance import assert_parity, random_cotangents

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SERVED = backends_for("linear_gelu")
EVERY = backends_for("linear_gelu", ALL_DTYPES)
BACKENDS = sorted({backend for backend, _ in SERVED})


def case(*shape, width_out, dtype, bias=True, layout=poison.contiguous, scale=None, grad=True, **settings):
    width = shape[-1]
    scale = scale or max(width, 1) ** -0.5
    inputs = {
        "x": layout(random(*shape, dtype=dtype, seed=1, grad=grad)),
        "weight": layout(random(width_out, width, dtype=dtype, seed=2, scale=scale, grad=grad)),
        "bias": layout(random(width_out, dtype=dtype, seed=3, grad=grad)) if bias else None,
    }
    return LinearGelu(inputs, settings)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 48), (2, 9, 33), (1, 1, 768), (2, 3, 2, 17), (48,)])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_parity(backend, dtype, shape, bias, approximate, grad):
    assert_parity(case(*shape, width_out=40, dtype=dtype, bias=bias, approximate=approximate, grad=grad), backend)


@pytest.mark.parametrize("width_out", [1, 3, 17, 48, 384, 1000, 1025])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_widths(backend, dtype, width_out):
    for width in (1, 3, 48, 129):
        assert_parity(case(5, width, width_out=width_out, dtype=dtype), backend)


@pytest.mark.parametrize("rows", [1, 7, 63, 127, 129])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_rows(backend, dtype, rows):
    assert_parity(case(rows, 64, width_out=33, dtype=dtype), backend)


@pytest.mark.parametrize(("shape", "width_out"), [((0, 8), 5), ((2, 0, 8), 5), ((3, 8), 0), ((3, 0), 5)])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_empty(backend, dtype, shape, width_out):
    results = assert_parity(case(*shape, width_out=width_out, dtype=dtype), backend)
    assert results["out"].shape == (*shape[:-1], width_out)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shift", [3.0, -3.0, 1e3, -1e3])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_data_far_from_zero(backend, dtype, shift, approximate):
    whole = case(9, 48, width_out=33, dtype=dtype, approximate=approximate)
    x = random(9, 48, dtype=dtype, seed=1, shift=shift)
    assert_parity(LinearGelu({**whole.inputs, "x": x}, whole.settings), backend)


GRADS = {**LAYOUTS, "expanded": poison.expanded}


@pytest.mark.parametrize("grad_layout", GRADS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_layouts(backend, dtype, layout, grad_layout):
    strided = case(3, 5, 24, width_out=17, dtype=dtype, layout=LAYOUTS[layout])
    assert_parity(strided, backend, cotangents=lambda out: {"out": GRADS[grad_layout](random_cotangents(out)["out"])})


@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_expanded_inputs(backend, dtype):
    x = random(1, 24, dtype=dtype, seed=1, grad=False).expand(5, 24).requires_grad_()
    weight = random(1, 24, dtype=dtype, seed=2, grad=False).expand(17, 24).requires_grad_()
    bias = random(1, dtype=dtype, seed=3, grad=False).expand(17).requires_grad_()
    assert_parity(LinearGelu({"x": x, "weight": weight, "bias": bias}), backend)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_dtype_is_that_of_stock(dtype, grad):
    whole = case(3, 8, width_out=5, dtype=torch.float32, grad=grad)
    with torch.autocast("cpu", dtype):
        for x in (whole.inputs["x"], whole.inputs["x"].to(dtype)):
            stock = F.gelu(F.linear(x, whole.inputs["weight"], whole.inputs["bias"]))
            ours = ops.linear_gelu(x, whole.inputs["weight"], whole.inputs["bias"])
            assert ours.dtype == stock.dtype == dtype
    if grad:
        ours.backward(torch.ones_like(ours))
        assert whole.inputs["weight"].grad.dtype == torch.float32


def test_the_torch_backend_is_twice_differentiable():
    inputs = case(3, 4, width_out=5, dtype=torch.float64).inputs
    assert torch.autograd.gradgradcheck(lambda *t: ops.linear_gelu(*t, backend="torch"), tuple(inputs.values()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinity_and_nan_of_the_input_stay_where_they_are(backend):
    x = torch.tensor([[float("nan"), 0.0], [float("inf"), 0.0], [-float("inf"), 0.0], [1.0, 1.0]])
    eye = torch.eye(2)
    stock = F.gelu(F.linear(x, eye))
    torch.testing.assert_close(ops.linear_gelu(x, eye, backend=backend), stock, equal_nan=True)


def _arguments(**changes):
    return {"x": torch.ones(2, 8), "weight": torch.ones(5, 8), "bias": torch.ones(5), **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight": torch.ones(5, 7)}, ValueError, r"weight must have shape \(N, 8\), got \(5, 7\)"),
        ({"weight": torch.ones(8)}, ValueError, r"weight must have shape \(N, 8\), got \(8,\)"),
        ({"bias": torch.ones(8)}, ValueError, r"bias must have shape \(5,\), got \(8,\)"),
        (
            {"weight": torch.ones(5, 8).half()},
            ValueError,
            "weight must have the dtype torch.float32 of x, got torch.float16",
        ),
        ({"bias": torch.ones(5).double()}, ValueError, "bias must have the dtype torch.float32 of x"),
        ({"x": torch.ones(2, 8).long()}, TypeError, "x must be a floating point tensor"),
        ({"x": torch.ones(())}, ValueError, "x must have at least 1"),
        ({"bias": torch.ones(5, device="meta")}, ValueError, "bias is on meta, expected cpu"),
        ({"approximate": "erf"}, ValueError, "approximate must be 'none' or 'tanh', got 'erf'"),
        ({"backend": "cuda"}, BackendError, "cuda: "),
    ],
)
def test_wrong_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        ops.linear_gelu(**_arguments(**changes))
