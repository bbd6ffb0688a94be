"""fp32 GEMMs of oneDNN in training: parity, who gets them, and what of autograd they keep."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from bertfast import onednn, ops, use_backend
from bertfast.nn.linear import linear
from helpers import poison
from helpers.op_cases import FeedForward, LinearGelu, QkvProjection, random
from helpers.poison import LAYOUTS, poisoned_memory  # noqa: F401
from helpers.tolerance import assert_parity, assert_within, eps_of, random_cotangents

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not onednn._works(), reason="this PyTorch has no oneDNN"),
]


@pytest.fixture(autouse=True)
def products(monkeypatch):
    """Serves products of any size; returns the shapes of x and weight of each that ran."""
    monkeypatch.setattr(onednn, "MIN_PRODUCTS", 1)
    seen, original = [], onednn.product

    def product(x, weight, bias):
        seen.append((tuple(x.shape), tuple(weight.shape)))
        return original(x, weight, bias)

    monkeypatch.setattr(onednn, "product", product)
    return seen


def numbers(*shape, seed, **settings):
    return random(*shape, dtype=torch.float32, seed=seed, **settings)


def ffn_case(*shape, inner=40, bias=True, layout=poison.contiguous, **settings):
    width = shape[-1]
    inputs = {
        "x": layout(numbers(*shape, seed=1)),
        "w_in": layout(numbers(inner, width, seed=2, scale=width**-0.5)),
        "b_in": layout(numbers(inner, seed=3)) if bias else None,
        "w_out": layout(numbers(width, inner, seed=4, scale=inner**-0.5)),
        "b_out": layout(numbers(width, seed=5)) if bias else None,
    }
    return FeedForward(inputs, settings)


SHAPES = [(48,), (1, 48), (7, 33), (2, 9, 64), (130, 768), (3, 1)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parity(products, shape, bias):
    assert_parity(ffn_case(*shape, bias=bias), "cpu")
    inputs = {"x": numbers(*shape, seed=1)}
    for seed, name in enumerate("qkv"):
        inputs[f"w{name}"] = numbers(24, shape[-1], seed=seed, scale=shape[-1] ** -0.5)
        inputs[f"b{name}"] = numbers(24, seed=seed) if bias else None
    before = len(products)
    assert_parity(QkvProjection(inputs), "cpu")
    assert before >= 6 and len(products) >= before + 9


@pytest.mark.parametrize("grad_layout", {**LAYOUTS, "expanded": poison.expanded})
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, grad_layout):
    grads = {**LAYOUTS, "expanded": poison.expanded}
    case = ffn_case(3, 5, 24, layout=LAYOUTS[layout])
    assert_parity(case, "cpu", cotangents=lambda out: {"out": grads[grad_layout](random_cotangents(out)["out"])})


@pytest.mark.parametrize("settings", [{"activation": "relu"}, {"recompute_activation": True}])
def test_settings(settings):
    assert_parity(ffn_case(9, 24, **settings), "cpu")


@pytest.mark.parametrize("width", [1023, 1025, 2048, 3072, 4352])
def test_sums_in_parts(width):
    """Of one sign, where a chain of additions loses most: forward over K, and dx and dweight over N and rows."""
    inputs = {
        "x": numbers(9, width, seed=1, shift=2.0, scale=0.01),
        "weight": numbers(8, width, seed=2, shift=1.0, scale=0.01),
        "bias": numbers(8, seed=3, shift=-2.0 * width),
    }
    assert_parity(LinearGelu(inputs), "cpu")
    inputs = {
        "x": numbers(width, 8, seed=1, shift=2.0, scale=0.01),
        "weight": numbers(9, 8, seed=2, shift=1.0, scale=0.01),
        "bias": None,
    }
    assert_parity(LinearGelu(inputs), "cpu", cotangents=lambda out: {"out": torch.rand_like(out["out"])})
    a, b = numbers(7, width, seed=4, shift=1.0, grad=False), numbers(width, 5, seed=5, shift=1.0, grad=False)
    exact = a.double() @ b.double()
    stock = (torch.mm(a, b).double() - exact).abs().max()
    assert (onednn.mm(a, b).double() - exact).abs().max() <= 2 * stock + exact.abs().max() * 2**-24


def module_of(width, width_out):
    torch.manual_seed(0)
    return nn.Linear(width, width_out)


def gradients_of(function, *inputs):
    out = function()
    return [out.detach(), *torch.autograd.grad(out, inputs, random_cotangents({"out": out})["out"])]


def test_a_module_has_the_gradients_of_stock(products):
    dense, x = module_of(24, 17), numbers(3, 5, 24, seed=1)
    ours = gradients_of(lambda: linear(x, dense), x, dense.weight, dense.bias)
    assert products == [((3, 5, 24), (17, 24)), ((15, 17), (24, 17)), ((17, 15), (24, 15))]
    for mine, stock in zip(ours, gradients_of(lambda: dense(x), x, dense.weight, dense.bias), strict=True):
        torch.testing.assert_close(mine, stock)


def test_only_wanted_gradients_are_computed(products):
    dense, x = module_of(24, 17).requires_grad_(False), numbers(5, 24, seed=1)
    linear(x, dense).sum().backward()
    assert len(products) == 2 and x.grad is not None
    products.clear()
    dense.bias.requires_grad_()
    linear(x.detach(), dense).sum().backward()
    assert len(products) == 1 and torch.equal(dense.bias.grad, torch.full((17,), 5.0))


def test_a_parameter_used_twice(products):
    dense, x = module_of(24, 24), numbers(5, 24, seed=1)
    ours = gradients_of(lambda: linear(linear(x, dense), dense), x, dense.weight, dense.bias)
    assert len(products) == 6
    stock = gradients_of(lambda: dense(dense(x)), x, dense.weight, dense.bias)
    for mine, theirs in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_weight_changed_before_backward_is_an_error():
    dense, x = module_of(24, 17), numbers(5, 24, seed=1)
    out = linear(x, dense)
    with torch.no_grad():
        dense.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_step_of_an_optimiser_is_seen(products):
    dense, x = module_of(24, 17), numbers(5, 24, seed=1)
    optimiser = torch.optim.SGD(dense.parameters(), 0.1)
    for _ in range(2):
        linear(x, dense).square().sum().backward()
        optimiser.step()
        torch.testing.assert_close(linear(x, dense), dense(x))


def test_twice_differentiable(products):
    dense, x = module_of(6, 5), numbers(3, 6, seed=1)

    def second(function, *inputs):
        first = torch.autograd.grad(function().square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    ours = second(lambda: linear(x, dense), x, dense.weight, dense.bias)
    # Backward runs twice, and the first time a graph of it is recorded.
    assert len(products) == 3
    stock = second(lambda: dense(x), x, dense.weight, dense.bias)
    wide, x = copy.deepcopy(dense).double(), x.detach().double().requires_grad_()
    exact = second(lambda: wide(x), x, wide.weight, wide.bias)
    for mine, theirs, true in zip(ours, stock, exact, strict=True):
        assert_within(mine, [theirs], true, eps_of(torch.float32) * true.abs().max(), "second derivative")


def test_checkpoints():
    dense, x = module_of(24, 17), numbers(5, 24, seed=1)
    expected = gradients_of(lambda: linear(x, dense), x, dense.weight)
    for reentrant in (False, True):
        out = checkpoint(lambda y: linear(y, dense), x, use_reentrant=reentrant)
        out.backward(random_cotangents({"out": out})["out"])
        assert torch.equal(x.grad, expected[1]) and torch.equal(dense.weight.grad, expected[2])
        x.grad = dense.weight.grad = None


def test_backward_under_another_autocast(products):
    dense, x = module_of(24, 17), numbers(5, 24, seed=1)
    expected = torch.autograd.grad(linear(x, dense).square().sum(), (x, dense.weight))
    out = linear(x, dense).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(out, (x, dense.weight))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(products) == 6


class Subclass(torch.Tensor):
    pass


def hooked(dense):
    dense.register_forward_hook(lambda module, arguments, out: None)
    return dense


OTHERS = {
    "bf16": lambda x, dense: linear(x.bfloat16(), dense.bfloat16()),
    "fp64": lambda x, dense: linear(x.double(), dense.double()),
    "a subclass": lambda x, dense: linear(x.as_subclass(Subclass), dense),
    "a hook": lambda x, dense: linear(x, hooked(dense)),
    "meta": lambda x, dense: linear(x.to("meta"), dense.to("meta")),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_tensors_and_modules_are_stock(products, other):
    OTHERS[other](numbers(5, 24, seed=1), module_of(24, 17))
    assert not products


def test_contexts_that_are_stock(products, monkeypatch):
    dense, x = module_of(24, 17), numbers(5, 24, seed=1)

    def run():
        return linear(x, dense)

    with torch.autocast("cpu", torch.bfloat16):
        assert run().dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        run()
    with use_backend("torch"):
        run()
    with FlopCounterMode(display=False) as counter:
        run().sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 5 * 24 * 17
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        tangent = forward_ad.unpack_dual(linear(dual, dense)).tangent
    torch.testing.assert_close(tangent, dense.weight.sum(1).expand(5, 17))
    torch.testing.assert_close(torch.func.vmap(lambda y: linear(y, dense))(x.detach()), dense(x))
    assert "mkldnn" not in make_fx(lambda y: linear(y, dense))(x.detach()).code
    monkeypatch.setattr(onednn, "MIN_PRODUCTS", 5 * 24 * 17 + 1)
    run()
    assert not products


def test_functional_calls_and_gradients_of_torch_func(products):
    dense, x = module_of(24, 17), numbers(5, 24, seed=1, grad=False)
    weights = {name: p.detach().clone() for name, p in copy.deepcopy(dense).named_parameters()}

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = dense

        def forward(self, x):
            return linear(x, self.dense).square().sum()

    def loss(weights):
        return torch.func.functional_call(Wrapper(), {f"dense.{name}": p for name, p in weights.items()}, (x,))

    found = torch.func.grad(loss)(weights)
    assert not products
    expected = torch.autograd.grad(F.linear(x, dense.weight, dense.bias).square().sum(), dense.weight)[0]
    torch.testing.assert_close(found["weight"], expected)


def test_compiled(products):
    dense, x = module_of(24, 17), numbers(5, 24, seed=1)
    expected = gradients_of(lambda: dense(x), x, dense.weight)
    compiled = torch.compile(lambda: linear(x, dense), fullgraph=True, backend="aot_eager")
    for mine, stock in zip(gradients_of(compiled, x, dense.weight), expected, strict=True):
        torch.testing.assert_close(mine, stock)
    assert not products


def test_inference_by_weights_that_have_no_copy(products):
    """Prepacked weights are Parameters; what is not is multiplied as it lies."""
    x, weight, bias = (numbers(*shape, seed=1, grad=False) for shape in ((5, 24), (17, 24), (17,)))
    out = ops.linear_gelu(x, weight, bias, backend="cpu")
    assert len(products) == 1
    torch.testing.assert_close(out, F.gelu(F.linear(x, weight, bias)))


@pytest.mark.parametrize("width", [23, 25, 48])
def test_another_width_is_stocks_error(width, products):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(torch.randn(5, width), module_of(24, 17))
    assert products == []


def test_a_bias_that_broadcasts_is_stocks(products):
    dense, x = module_of(24, 17), torch.randn(5, 24)
    dense.bias = nn.Parameter(torch.ones(1))
    torch.testing.assert_close(linear(x, dense), x @ dense.weight.t() + 1.0)
    assert products == []
