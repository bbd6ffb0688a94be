"""linear_gelu on every backend."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F

from bertfast import BackendError, ops
from helpers import cuda_on_cpu, poison
from helpers.op_cases import ALL_DTYPES, DTYPES, LinearGelu, backends_for, random
from helpers.poison import LAYOUTS, poisoned_memory  # noqa: F401
from helpers.saved import saved_bytes
from helpers.tolerance import assert_parity, random_cotangents

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SERVED = backends_for("linear_gelu")
EVERY = backends_for("linear_gelu", ALL_DTYPES)
BACKENDS = sorted({backend for backend, _ in SERVED})
HALF = (torch.bfloat16, torch.float16)


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
    # Interpreted programs take time, and there is one for 64 columns.
    for width in (129,) if backend == "triton" and width_out > 100 else (1, 3, 48, 129):
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


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_a_bias_that_cancels_the_product(backend, dtype, rows):
    """A product that is rounded before its bias is added has lost what is left of it. K is beyond what is fused."""
    width = 4352
    x = random(rows, width, dtype=dtype, seed=1, shift=2.0, scale=0.01)
    weight = random(16, width, dtype=dtype, seed=2, shift=1.0, scale=0.01)
    bias = -(x.detach().double() @ weight.detach().double().T).mean(0).to(dtype)
    assert_parity(LinearGelu({"x": x, "weight": weight, "bias": bias.requires_grad_()}), backend)


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


@pytest.fixture
def form(request, monkeypatch):
    """Pins one form of the Triton kernels, on a small card of capability 9.0. fp32 and unaligned tensors have no
    persistent form and take the first."""
    tiles, launch = (pytest.importorskip(f"bertfast.kernels.{name}") for name in ("tiles", "launch"))
    monkeypatch.setattr(launch, "INTERPRETED_AS", launch.Device(90, 3))
    seen = []

    def plan(rows, width_out, width_in, item_size, tensor_cores, dropout, aligned, descriptors, *device):
        name = request.param
        if name == "persistent" and (item_size == 4 or not descriptors):
            name = "tile"
        if name == "persistent":
            tile = tiles.persistent_tile(rows, width_out, device[1])
        else:
            tile = tiles.gemm_tile(rows, width_out, item_size, *device, aligned)
        steps = tiles.cdiv(width_in, tile.block_k)
        splits = tiles.cdiv(steps, tiles.cdiv(steps, 3)) if name == "split" else 1
        seen.append(name)
        return tiles.GemmPlan(name, tile, splits)

    monkeypatch.setattr(tiles, "linear_gelu_fwd", plan)
    yield request.param
    assert set(seen) <= {request.param, "tile"}


FORMS = pytest.mark.parametrize("form", ["tile", "split", "persistent", "separate"], indirect=True)


@pytest.mark.parametrize(
    ("shape", "width_out"), [((7, 264), 72), ((130, 88), 136), ((33, 129), 40), ((2, 3, 8), 8), ((5, 24), 1040)]
)
@pytest.mark.parametrize("dtype", HALF)
def test_torchs_gemm_and_the_pass_of_the_cuda_kernels(dtype, shape, width_out):
    """In half precision as well, where `cuda` has a GEMM of its own (test_cuda_gemm.py)."""
    for settings in ({}, {"bias": False, "approximate": "tanh"}):
        with cuda_on_cpu.separate_gemm():
            assert_parity(case(*shape, width_out=width_out, dtype=dtype, **settings), "cuda")


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton kernels are not interpreted here")
@FORMS
@pytest.mark.parametrize(
    ("shape", "width_out"), [((7, 264), 72), ((130, 88), 136), ((1, 48), 264), ((33, 129), 40), ((3, 8), 8)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_of_the_triton_kernels(form, dtype, shape, width_out):
    for settings in ({}, {"bias": False, "approximate": "tanh"}):
        assert_parity(case(*shape, width_out=width_out, dtype=dtype, **settings), "triton")


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton kernels are not interpreted here")
@FORMS
@pytest.mark.parametrize(("shape", "width_out"), [((48, 40), 56), ((33, 48), 24), ((47, 24), 32)])
def test_every_form_over_many_tiles(form, shape, width_out, monkeypatch):
    """Small ones: several rows and columns of tiles, steps of the sum, and tiles of one persistent program."""
    tiles = importlib.import_module("bertfast.kernels.tiles")
    for table in ("gemm_tile", "persistent_tile"):
        monkeypatch.setattr(tiles, table, lambda *_: tiles.GemmTile(16, 16, 16, 2, 4, 2))
    assert_parity(case(*shape, width_out=width_out, dtype=torch.bfloat16), "triton")


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton kernels are not interpreted here")
@FORMS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_form_takes_every_layout(form, layout):
    assert_parity(case(5, 72, width_out=24, dtype=torch.bfloat16, layout=LAYOUTS[layout]), "triton")


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton kernels are not interpreted here")
@pytest.mark.parametrize(
    ("width", "stride", "aligned", "descriptors"),
    [(64, 64, True, True), (72, 72, False, True), (71, 72, False, True), (71, 71, False, False)],
)
def test_strides_that_triton_knows_and_strides_that_descriptors_take(monkeypatch, width, stride, aligned, descriptors):
    tiles = importlib.import_module("bertfast.kernels.tiles")
    original, seen = tiles.linear_gelu_fwd, []
    monkeypatch.setattr(tiles, "linear_gelu_fwd", lambda *facts: seen.append(facts[6:8]) or original(*facts))
    x, weight = (random(rows, stride, dtype=torch.bfloat16, seed=1, grad=False)[:, :width] for rows in (3, 16))
    ops.linear_gelu(x, weight, backend="triton")
    assert seen == [(aligned, descriptors)]


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton kernels are not interpreted here")
@pytest.mark.parametrize(
    ("dtype", "allowed", "expected"),
    [
        (torch.float32, "none", "ieee"),
        (torch.float32, "ieee", "ieee"),
        (torch.float32, "tf32", "tf32"),
        (torch.bfloat16, "tf32", "ieee"),
    ],
)
def test_fp32_is_multiplied_in_fp32_unless_tf32_is_allowed(monkeypatch, dtype, allowed, expected):
    kernels = importlib.import_module("bertfast.kernels.linear_gelu")
    launched = []
    monkeypatch.setattr(kernels, "_fwd", lambda grid, *arguments, **options: launched.append(arguments))
    x = torch.ones(3, 8, dtype=dtype)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = allowed
    try:
        kernels.linear_gelu_fwd(x, x, None, "gelu", None, 0.0, False)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    precisions = {argument for argument in launched[0] if isinstance(argument, str)} - {"gelu"}
    assert precisions == {expected}


@pytest.mark.parametrize(("backend", "dtype"), backends_for("linear_gelu", grad=True))
def test_recomputing_the_activation_saves_its_memory_and_changes_nothing(backend, dtype):
    whole = case(5, 24, width_out=33, dtype=dtype)
    saved = [
        saved_bytes(
            whole.inputs,
            lambda recompute=recompute: ops.linear_gelu(
                **whole.inputs, recompute_activation=recompute, backend=backend
            ),
        )
        for recompute in (False, True)
    ]
    assert saved == [5 * 33 * dtype.itemsize, 0]
    kept = assert_parity(whole, backend)
    recomputed = assert_parity(LinearGelu(whole.inputs, {"recompute_activation": True}), backend)
    assert torch.equal(kept["out"], recomputed["out"])


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_single_gradients(backend, name):
    whole = case(3, 8, width_out=5, dtype=torch.float32)
    inputs = {n: t.detach().requires_grad_(n == name) for n, t in whole.inputs.items()}
    assert_parity(LinearGelu(inputs), backend)


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


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["x", "weight", "bias"])
@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"torch"}))
def test_no_second_derivative_of_a_fused_backend_is_left_out(backend, name, recompute):
    """Also where other paths lead to the leaf, and autograd would take what they give for the whole."""
    leaf = torch.ones((), requires_grad=True)
    inputs = {key: t.detach() for key, t in case(3, 8, width_out=5, dtype=torch.float32).inputs.items()}
    inputs[name] = inputs[name] * leaf
    out = ops.linear_gelu(**inputs, recompute_activation=recompute, backend=backend)
    grad = torch.autograd.grad(out.sum(), leaf, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="linear_gelu is differentiable once"):
        torch.autograd.grad(grad * leaf, leaf)


def test_the_torch_backend_is_twice_differentiable():
    inputs = case(3, 4, width_out=5, dtype=torch.float64).inputs
    assert torch.autograd.gradgradcheck(lambda *t: ops.linear_gelu(*t, backend="torch"), tuple(inputs.values()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinity_and_nan_of_the_input_stay_where_they_are(backend):
    x = torch.tensor([[float("nan"), 0.0], [float("inf"), 0.0], [-float("inf"), 0.0], [1.0, 1.0]])
    eye = torch.eye(2)
    out = ops.linear_gelu(x, eye, backend=backend)
    if backend == "torch":
        # Vectorised for AVX-512, stock's GELU of inf is NaN.
        torch.testing.assert_close(out, F.gelu(F.linear(x, eye)), equal_nan=True)
        return
    nan, gelu_of_1 = math.nan, 0.5 * (1.0 + math.erf(0.5**0.5))
    expected = torch.tensor([[nan, nan], [math.inf, nan], [nan, nan], [gelu_of_1, gelu_of_1]])
    torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "backend", [b for b, _ in backends_for("linear_gelu", (torch.float32,), grad=True) if b != "torch"]
)
def test_backward_is_in_the_dtypes_of_forward_whatever_autocast_is_in_force(backend, recompute):
    inputs = case(5, 24, width_out=33, dtype=torch.float32).inputs
    found = []
    for enabled in (False, True):
        out = ops.linear_gelu(**inputs, recompute_activation=recompute, backend=backend)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(out.square().sum(), list(inputs.values())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _arguments(**changes):
    return {"x": torch.ones(2, 8), "weight": torch.ones(5, 8), "bias": torch.ones(5), **changes}


def _in_float64():
    return {name: t.double() for name, t in _arguments().items()}


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
        ({**_in_float64(), "backend": "cuda"}, BackendError, "cuda: dtype float64"),
    ],
)
def test_wrong_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        ops.linear_gelu(**_arguments(**changes))
