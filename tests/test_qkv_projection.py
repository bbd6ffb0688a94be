"""qkv_projection on every backend, the launch's tiles and parts, and the module that uses it."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bertfast import BackendError, ops, use_backend
from bertfast.backends import order_on
from bertfast.kernels import tiles
from bertfast.nn import attention as nn_attention
from helpers import poison
from helpers.op_cases import ALL_DTYPES, QkvProjection, backends_for, random
from helpers.poison import LAYOUTS, poisoned_memory  # noqa: F401
from helpers.tolerance import assert_parity, random_cotangents

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SERVED = backends_for("qkv_projection")
EVERY = backends_for("qkv_projection", ALL_DTYPES)
BACKENDS = sorted({backend for backend, _ in SERVED})


def case(*shape, width_out, dtype, biases=True, layout=poison.contiguous, grad=True):
    width = shape[-1]
    inputs = {"x": layout(random(*shape, dtype=dtype, seed=1, grad=grad))}
    for seed, name in enumerate("qkv", start=2):
        weight = random(width_out, width, dtype=dtype, seed=seed, scale=max(width, 1) ** -0.5, grad=grad)
        inputs[f"w{name}"] = layout(weight)
        inputs[f"b{name}"] = layout(random(width_out, dtype=dtype, seed=seed + 3, grad=grad)) if biases else None
    return QkvProjection(inputs)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("shape", [(7, 48), (2, 9, 33), (1, 1, 768), (2, 3, 2, 17), (48,)])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_parity(backend, dtype, shape, biases, grad):
    assert_parity(case(*shape, width_out=40, dtype=dtype, biases=biases, grad=grad), backend)


@pytest.mark.parametrize("width_out", [1, 3, 17, 48, 65, 129, 200])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_widths(backend, dtype, width_out):
    for width in (1, 3, 129):
        assert_parity(case(5, width, width_out=width_out, dtype=dtype), backend)


@pytest.mark.parametrize("rows", [1, 7, 63, 127, 129])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_rows(backend, dtype, rows):
    assert_parity(case(rows, 64, width_out=33, dtype=dtype), backend)


@pytest.mark.parametrize(("shape", "width_out"), [((0, 8), 5), ((2, 0, 8), 5), ((3, 8), 0), ((3, 0), 5)])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_empty(backend, dtype, shape, width_out):
    results = assert_parity(case(*shape, width_out=width_out, dtype=dtype), backend)
    assert results["k"].shape == (*shape[:-1], width_out)


GRADS = {layout.__name__: layout for layout in (poison.padded_rows, poison.transposed, poison.expanded)}


@pytest.mark.parametrize("grad_layout", GRADS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_layouts(backend, dtype, layout, grad_layout):
    def cotangents(outputs):
        return {name: GRADS[grad_layout](t) for name, t in random_cotangents(outputs).items()}

    assert_parity(case(3, 5, 24, width_out=17, dtype=dtype, layout=LAYOUTS[layout]), backend, cotangents=cotangents)


@pytest.mark.parametrize("names", ["q", "v", "qk"])
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_gradients_of_some_outputs(backend, dtype, names):
    whole = case(7, 48, width_out=40, dtype=dtype)
    results = assert_parity(
        whole, backend, cotangents=lambda out: {name: random_cotangents(out)[name] for name in names}
    )
    assert all(results[f"dw{name}"].any() == (name in names) for name in "qkv")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("learned", ["x", "wq", "wv", "bk", "bv"])
def test_only_what_is_learned_gets_a_gradient(learned, backend):
    whole = case(7, 48, width_out=40, dtype=torch.float32)
    frozen = {name: t.detach() for name, t in whole.inputs.items()}
    assert_parity(QkvProjection({**frozen, learned: whole.inputs[learned]}), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_weight_for_all_three(backend):
    whole = case(7, 48, width_out=40, dtype=torch.float32).inputs
    x, weight, bias = (whole[name] for name in ("x", "wq", "bq"))
    q, k, v = ops.qkv_projection(x, (weight,) * 3, (bias,) * 3, backend=backend)
    assert torch.equal(q, k) and torch.equal(k, v)
    upstream = random_cotangents({"q": q})["q"]
    found = torch.autograd.grad((q, k, v), (x, weight, bias), (upstream,) * 3)
    expected = torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), 3 * upstream)
    for ours, stock in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, stock, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives(backend):
    inputs = {
        name: t.detach().double().requires_grad_()
        for name, t in case(3, 4, width_out=5, dtype=torch.float32).inputs.items()
    }
    leaves = [t.detach().float().requires_grad_() for t in inputs.values()]

    def second(leaves, backend):
        x, wq, bq, wk, bk, wv, bv = leaves
        outputs = ops.qkv_projection(x, (wq, wk, wv), (bq, bk, bv), backend=backend)
        first = torch.autograd.grad(sum(t.square().sum() for t in outputs), leaves, create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in first), leaves)

    for ours, exact in zip(second(leaves, backend), second(list(inputs.values()), "torch"), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("backend", sorted({"triton", "cuda"} & set(BACKENDS)))
def test_outputs_are_views_of_one_buffer(backend):
    inputs = case(2, 7, 48, width_out=40, dtype=torch.float32).inputs
    arguments = inputs["x"], [inputs[f"w{name}"] for name in "qkv"], [inputs[f"b{name}"] for name in "qkv"]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            q, k, v = ops.qkv_projection(*arguments, backend=backend)
        assert [t.stride() for t in (q, k, v)] == [(7 * 120, 120, 1)] * 3
        assert k.data_ptr() - q.data_ptr() == v.data_ptr() - k.data_ptr() == 40 * 4
        assert q.view(2, 7, 5, 8).data_ptr() == q.data_ptr(), "heads are split without a copy"


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton kernels do not run here")
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("width", [40, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_the_sum(dtype, width, parts, monkeypatch):
    """Also where the last part is shorter, and where K ends inside a block."""
    tile = tiles.GemmTile(16, 32, 16, 8, 4, 3)
    monkeypatch.setattr(tiles, "qkv_projection_fwd", lambda *arguments: (tile, parts))
    for biases in (True, False):
        assert_parity(case(21, width, width_out=40, dtype=dtype, biases=biases), "triton")


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton kernels do not run here")
@pytest.mark.parametrize("width_out", [40, 47, 48])
@pytest.mark.parametrize(("group_m", "rows"), [(1, 16), (1, 70), (2, 33), (2, 70), (3, 70)])
def test_every_order_of_tiles_covers_everything(group_m, rows, width_out, monkeypatch):
    tile = tiles.GemmTile(16, 16, 16, group_m, 4, 3)
    monkeypatch.setattr(tiles, "qkv_projection_fwd", lambda *arguments: (tile, 1))
    assert_parity(case(rows, 16, width_out=width_out, dtype=torch.float32), "triton")


@pytest.mark.parametrize(("backend", "dtype"), [pair for pair in SERVED if pair[1] != torch.float32])
def test_under_autocast(backend, dtype):
    inputs = case(3, 7, 24, width_out=16, dtype=torch.float32).inputs
    with torch.autocast("cpu", dtype):
        outputs = ops.qkv_projection(
            inputs["x"], [inputs[f"w{n}"] for n in "qkv"], [inputs[f"b{n}"] for n in "qkv"], backend=backend
        )
    assert all(t.dtype == dtype for t in outputs)
    sum(t.float().square().sum() for t in outputs).backward()
    assert all(t.grad.dtype == torch.float32 for t in inputs.values())


def test_few_tiles_share_their_sums():
    tile, parts = tiles.qkv_projection_fwd(16, 768, 768, 2, True, 90, 132)
    programs = 3 * tiles.cdiv(768, tile.block_n)
    assert programs < 66 and parts > 1 and programs * parts <= 132
    assert tiles.qkv_projection_fwd(4096, 768, 768, 2, True, 90, 132)[1] == 1


@pytest.mark.parametrize(
    ("rows", "capability", "packed"),
    [(32 * 512, 90, True), (32 * 512, 100, True), (32 * 512, 103, True), (128, 90, False), (32 * 128, 90, False)]
    + [(32 * 512, capability, False) for capability in (75, 80, 86, 89, 120, 121)],
)
def test_where_weights_are_packed(rows, capability, packed):
    assert tiles.qkv_weights_are_packed(rows, 3 * 768, 768, capability) == packed


def _arguments(**changes):
    weights = (torch.ones(5, 8),) * 3
    return {"x": torch.ones(2, 8), "weights": weights, "biases": (torch.ones(5),) * 3, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.ones(2, 7)}, ValueError, r"weights\[0\] must have shape \(N, 7\), got \(5, 8\)"),
        ({"x": torch.ones(())}, ValueError, "x must have at least 1"),
        ({"x": None}, TypeError, "x must be a tensor, got NoneType"),
        ({"x": torch.ones(2, 8, dtype=torch.int64)}, TypeError, "x must be a floating point tensor"),
        ({"weights": (torch.ones(5, 8),) * 2}, ValueError, "weights and biases must be three each, got 2 and 3"),
        ({"biases": (torch.ones(5),) * 4}, ValueError, "weights and biases must be three each, got 3 and 4"),
        (
            {"weights": (torch.ones(5, 8), torch.ones(4, 8), torch.ones(5, 8))},
            ValueError,
            r"weights\[1\] must have shape \(5, 8\), got \(4, 8\)",
        ),
        (
            {"biases": (torch.ones(5), torch.ones(5), torch.ones(1, 5))},
            ValueError,
            r"biases\[2\] must have shape \(5,\), got \(1, 5\)",
        ),
        ({"biases": (torch.ones(5), None, torch.ones(5))}, TypeError, r"biases\[1\] must be a tensor, got NoneType"),
        ({"weights": (torch.ones(5, 8), None, None)}, TypeError, r"weights\[1\] must be a tensor, got NoneType"),
        ({"weights": (torch.ones(5, 8).half(),) * 3}, ValueError, r"weights\[0\] must have the dtype torch.float32"),
        ({"biases": (torch.ones(5, device="meta"),) * 3}, ValueError, r"biases\[0\] is on meta, expected cpu"),
        (
            {"x": torch.ones(2, 8).double(), "weights": (torch.ones(5, 8).double(),) * 3, "biases": None}
            | {"backend": "cuda"},
            BackendError,
            "cuda: dtype float64",
        ),
    ],
)
def test_wrong_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        ops.qkv_projection(**_arguments(**changes))


def test_fp32_on_a_gpu_goes_to_torch_unless_triton_is_named():
    from bertfast.backends import Call, choose

    for dtype, chosen in ((torch.float32, "torch"), (torch.bfloat16, "triton")):
        found = [choose(Call("qkv_projection", "cuda", compute, (dtype,))).backend for compute in ((8, 0), (9, 0))]
        assert found == [chosen] * 2
    assert choose(Call("qkv_projection", "cuda", (7, 5), (torch.float16,))).backend == "torch"


def linears(bias=(True, True, True), widths=(16, 16, 16)):
    torch.manual_seed(0)
    return [nn.Linear(16, width, bias=has_bias) for width, has_bias in zip(widths, bias, strict=True)]


class Called(nn.Linear):
    """A subclass that does something else."""

    def forward(self, x):
        return super().forward(x) + 1.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "change",
    ["nothing", "no biases", "one bias", "widths", "subclass", "hook", "forward", "parametrised"],
)
def test_modules_give_what_their_calls_give(change, backend):
    modules = linears()
    if change in ("no biases", "one bias"):
        modules = linears(bias=(False, change == "one bias", False))
    elif change == "widths":
        modules = linears(widths=(16, 16, 8))
    elif change == "subclass":
        modules[1] = Called(16, 16)
    elif change == "hook":
        modules[0].register_forward_hook(lambda module, args, out: out * 2)
    elif change == "forward":
        modules[2].forward = lambda x: x
    elif change == "parametrised":
        nn.utils.parametrizations.weight_norm(modules[2])
    x = random(2, 5, 16, dtype=torch.float32, seed=1)
    with use_backend(backend):
        outputs = nn_attention.qkv_projection(x, *modules)
    for ours, module in zip(outputs, modules, strict=True):
        torch.testing.assert_close(ours, module(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("device", "backends", "fused"),
    [
        ("cuda", (), True),
        ("cuda", ("torch",), False),
        ("cpu", (), False),
        ("cpu", ("cpu",), False),
        ("cpu", ("triton", "torch"), True),
        ("cpu", ("cuda", "torch"), True),
    ],
)
def test_where_no_kernel_serves_modules_are_called(device, backends, fused, monkeypatch):
    """Three calls cost less than an op that makes three calls."""
    called = []
    monkeypatch.setattr(ops, "qkv_projection", lambda x, weights, biases: called.append(x) or (x, x, x))
    modules = [module.to("meta") for module in linears()]
    x = types.SimpleNamespace(device=torch.device(device)) if fused else torch.empty(3, 16, device="meta")
    monkeypatch.setattr(nn_attention, "order_on", lambda kind: order_on(device))
    with use_backend(*backends or ("auto",)):
        assert len(nn_attention.qkv_projection(x, *modules)) == 3
    assert called == ([x] if fused else [])
