"""feed_forward on every backend: every activation, dropout between the GEMMs, layouts, errors."""

import pytest
import torch
import torch.nn.functional as F

from bertfast import BackendError, ops, use_backend
from bertfast.activations import ACTIVATIONS
from bertfast.nn import FusedFeedForward
from helpers import poison
from helpers.op_cases import ALL_DTYPES, FeedForward, backends_for, random, seed_tensor
from helpers.poison import LAYOUTS, poisoned_memory  # noqa: F401
from helpers.saved import saved_bytes
from helpers.tolerance import assert_parity, random_cotangents

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SERVED = backends_for("feed_forward")
EVERY = backends_for("feed_forward", ALL_DTYPES)
BACKENDS = sorted({backend for backend, _ in SERVED})


def case(*shape, inner, outer, dtype, bias=True, layout=poison.contiguous, grad=True, **settings):
    width = shape[-1]
    inputs = {
        "x": layout(random(*shape, dtype=dtype, seed=1, grad=grad)),
        "w_in": layout(random(inner, width, dtype=dtype, seed=2, scale=max(width, 1) ** -0.5, grad=grad)),
        "b_in": layout(random(inner, dtype=dtype, seed=3, grad=grad)) if bias else None,
        "w_out": layout(random(outer, inner, dtype=dtype, seed=4, scale=max(inner, 1) ** -0.5, grad=grad)),
        "b_out": layout(random(outer, dtype=dtype, seed=5, grad=grad)) if bias else None,
    }
    return FeedForward(inputs, settings)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 48), (2, 9, 33), (1, 1, 129), (48,), (2, 2, 2, 8)])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_parity(backend, dtype, shape, bias, grad):
    assert_parity(case(*shape, inner=65, outer=shape[-1], dtype=dtype, bias=bias, grad=grad), backend)


def _softsign_like(x):
    return x / (1 + x.abs())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "activation",
    [*ACTIVATIONS, F.silu, torch.nn.GELU(approximate="tanh"), _softsign_like],
    ids=lambda a: str(a).split(" at ")[0],
)
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_activations(backend, dtype, activation, grad):
    whole = case(5, 24, inner=33, outer=17, dtype=dtype, activation=activation, grad=grad)
    assert_parity(whole, backend)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 17, 1), (17, 1, 3), (48, 384, 48), (1000, 7, 1025)])
@pytest.mark.parametrize("rows", [1, 7, 63])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_sizes(backend, dtype, sizes, rows):
    width, inner, outer = sizes
    assert_parity(case(rows, width, inner=inner, outer=outer, dtype=dtype), backend)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_no_rows(backend, dtype, shape, dropout_p):
    settings = {"dropout_p": dropout_p, "seed": seed_tensor()}
    results = assert_parity(case(*shape, inner=5, outer=8, dtype=dtype, **settings), backend)
    assert results is None or results["out"].shape == shape


GRADS = {**LAYOUTS, "expanded": poison.expanded}


@pytest.mark.parametrize("grad_layout", GRADS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_layouts(backend, dtype, layout, grad_layout):
    strided = case(3, 5, 24, inner=17, outer=24, dtype=dtype, layout=LAYOUTS[layout])
    assert_parity(strided, backend, cotangents=lambda out: {"out": GRADS[grad_layout](random_cotangents(out)["out"])})


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_dropout_replays_the_mask_of_the_seed(backend, dtype, dropout_p, grad):
    settings = {"dropout_p": dropout_p, "seed": seed_tensor()}
    assert_parity(case(2, 9, 24, inner=33, outer=17, dtype=dtype, grad=grad, **settings), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_falls_between_the_gemms(backend):
    x, eye = torch.ones(7, 32), torch.eye(32)
    out = ops.feed_forward(x, eye, None, eye, None, "relu", dropout_p=0.4, backend=backend, _seed=seed_tensor())
    assert torch.equal(out != 0, ops.dropout_mask(seed_tensor(), (7, 32), 0.4, "feed_forward"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_follows_manual_seed(backend):
    x, eye = torch.ones(7, 32), torch.eye(32)
    torch.manual_seed(1)
    first, second = (ops.feed_forward(x, eye, None, eye, None, dropout_p=0.5, backend=backend) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, ops.feed_forward(x, eye, None, eye, None, dropout_p=0.5, backend=backend))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("width", [300, 515])
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_dropout_replays_over_several_blocks(backend, dtype, width):
    settings = {"dropout_p": 0.3, "seed": seed_tensor()}
    assert_parity(case(37, 8, inner=width, outer=8, dtype=dtype, **settings), backend)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(("backend", "dtype"), backends_for("feed_forward", grad=True))
def test_recomputing_the_activation_saves_its_memory_and_changes_nothing(backend, dtype, dropout_p):
    settings = {"dropout_p": dropout_p, "seed": seed_tensor()}
    whole = case(5, 24, inner=33, outer=17, dtype=dtype, **settings)
    again = FeedForward(whole.inputs, {**settings, "recompute_activation": True})
    kept, recomputed = (
        saved_bytes(whole.inputs, lambda case=case: case.ours(case.inputs, backend)["out"]) for case in (whole, again)
    )
    fused = backend != "torch"
    seed = 8 if fused and dropout_p else 0
    one = 5 * 33 * dtype.itemsize
    # One intermediate instead of stock's two; recomputing leaves none.
    assert recomputed == seed and (kept == one + seed if fused else kept >= 2 * one)
    kept, recomputed = assert_parity(whole, backend), assert_parity(again, backend)
    assert torch.equal(kept["out"], recomputed["out"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_recomputed_dropout_is_that_of_the_forward_pass(backend):
    """Also where no seed is given."""
    whole = case(9, 24, inner=33, outer=17, dtype=torch.float32)
    results = []
    for recompute in (False, True):
        torch.manual_seed(3)
        out = ops.feed_forward(**whole.inputs, dropout_p=0.4, recompute_activation=recompute, backend=backend)
        torch.rand(7)
        results.append(torch.autograd.grad(out, list(whole.inputs.values()), torch.ones_like(out)))
    for kept, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(kept, recomputed)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_a_bias_that_cancels_the_product(backend, dtype, dropout_p):
    whole = case(9, 256, inner=20, outer=8, dtype=dtype, dropout_p=dropout_p, seed=seed_tensor())
    x = random(9, 256, dtype=dtype, seed=1, shift=2.0, scale=0.01)
    w_in = random(20, 256, dtype=dtype, seed=2, shift=1.0, scale=0.01)
    b_in = -(x.detach().double() @ w_in.detach().double().T).mean(0).to(dtype).requires_grad_()
    assert_parity(FeedForward({**whole.inputs, "x": x, "w_in": w_in, "b_in": b_in}, whole.settings), backend)


@pytest.mark.parametrize("name", ["x", "w_in", "b_in", "w_out", "b_out"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_single_gradients(backend, name):
    whole = case(3, 8, inner=5, outer=4, dtype=torch.float32)
    inputs = {n: t.detach().requires_grad_(n == name) for n, t in whole.inputs.items()}
    assert_parity(FeedForward(inputs), backend)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_dtype_is_that_of_stock(dtype, grad):
    whole = case(3, 8, inner=16, outer=8, dtype=torch.float32, grad=grad)
    with torch.autocast("cpu", dtype):
        out = ops.feed_forward(**whole.inputs)
        stock = whole.stocks()[0](whole.inputs)["out"]
    assert out.dtype == stock.dtype == dtype
    if grad:
        out.backward(torch.ones_like(out))
        assert all(t.grad.dtype == torch.float32 for t in whole.inputs.values())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["x", "w_in", "b_in", "w_out"])
@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"torch"}))
def test_no_second_derivative_of_a_fused_backend_is_left_out(backend, name, recompute):
    """Also where other paths lead to the leaf, and autograd would take what they give for the whole."""
    leaf = torch.ones((), requires_grad=True)
    inputs = {key: t.detach() for key, t in case(3, 8, inner=5, outer=4, dtype=torch.float32).inputs.items()}
    inputs[name] = inputs[name] * leaf
    out = ops.feed_forward(**inputs, recompute_activation=recompute, backend=backend)
    grad = torch.autograd.grad(out.sum(), leaf, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="feed_forward is differentiable once"):
        torch.autograd.grad(grad * leaf, leaf)


def test_the_torch_backend_is_twice_differentiable():
    inputs = case(3, 4, inner=5, outer=4, dtype=torch.float64).inputs
    assert torch.autograd.gradgradcheck(lambda *t: ops.feed_forward(*t, backend="torch"), tuple(inputs.values()))


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_the_module_passes_the_option_on(backend):
    module = FusedFeedForward(24, 48)
    x = torch.ones(5, 24, requires_grad=True)
    inputs = {"x": x, **dict(module.named_parameters())}
    with use_backend(backend or "auto"):
        kept = saved_bytes(inputs, lambda: module(x))
        module.recompute_activation = True
        assert saved_bytes(inputs, lambda: module(x)) == 0 < kept
    assert FusedFeedForward(4, 8, recompute_activation=True).recompute_activation


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "backend", [b for b, _ in backends_for("feed_forward", (torch.float32,), grad=True) if b != "torch"]
)
def test_backward_is_in_the_dtypes_of_forward_whatever_autocast_is_in_force(backend, recompute):
    inputs = case(5, 24, inner=33, outer=17, dtype=torch.float32).inputs
    found = []
    for enabled in (False, True):
        out = ops.feed_forward(**inputs, recompute_activation=recompute, backend=backend)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(out.square().sum(), list(inputs.values())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _arguments(**changes):
    weights = {"w_in": torch.ones(5, 8), "b_in": torch.ones(5), "w_out": torch.ones(7, 5), "b_out": torch.ones(7)}
    return {"x": torch.ones(2, 8), **weights, **changes}


def _in_float64():
    return {name: t.double() for name, t in _arguments().items()}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"w_in": torch.ones(5, 7)}, ValueError, r"w_in must have shape \(N, 8\), got \(5, 7\)"),
        ({"b_in": torch.ones(6)}, ValueError, r"b_in must have shape \(5,\), got \(6,\)"),
        ({"w_out": torch.ones(7, 6)}, ValueError, r"w_out must have shape \(N_out, 5\), got \(7, 6\)"),
        ({"w_out": torch.ones(5)}, ValueError, r"w_out must have shape \(N_out, 5\)"),
        ({"b_out": torch.ones(5)}, ValueError, r"b_out must have shape \(7,\), got \(5,\)"),
        (
            {"w_in": torch.ones(5, 8).half()},
            ValueError,
            "w_in must have the dtype torch.float32 of x, got torch.float16",
        ),
        ({"b_out": torch.ones(7).double()}, ValueError, "b_out must have the dtype torch.float32 of x"),
        ({"x": torch.ones(2, 8).long()}, TypeError, "x must be a floating point tensor"),
        ({"w_out": torch.ones(7, 5).long()}, TypeError, "w_out must be a floating point tensor"),
        ({"w_out": torch.ones(7, 5, device="meta")}, ValueError, "w_out is on meta, expected cpu"),
        ({"activation": "gleu"}, ValueError, "activation must be a callable or one of gelu, .*; got 'gleu'"),
        ({"dropout_p": -0.5}, ValueError, "dropout_p must be between 0 and 1"),
        ({**_in_float64(), "backend": "cuda"}, BackendError, "cuda: dtype float64"),
    ],
)
def test_wrong_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        ops.feed_forward(**_arguments(**changes))
