"""Reordered weights of linear layers on the CPU: parity, who gets one, and what a model keeps of it.

That whatever changes a weight is seen stands in test_weight_cache.py, for both kinds of copies.
"""

import copy
import gc
import math
import os
import pickle
import signal
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import bertfast
from bertfast import ops, prepacked, use_backend
from bertfast.nn.linear import linear
from bertfast.swap import plain_ops
from helpers.op_cases import FeedForward, LinearGelu, QkvProjection, random
from helpers.poison import LAYOUTS, poisoned_memory  # noqa: F401
from helpers.tolerance import assert_parity

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if prepacked.works(dtype)]
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not DTYPES, reason="this PyTorch has no oneDNN"),
]


@pytest.fixture(autouse=True)
def empty_cache():
    prepacked._entries.clear()
    yield
    prepacked._entries.clear()


class Frozen:
    """A case whose weights and biases are Parameters without gradients, as a model's are in inference."""

    def ours(self, inputs, backend):
        held = {n: t if n == "x" or t is None else nn.Parameter(t.detach(), False) for n, t in inputs.items()}
        results = super().ours(held, backend)
        assert prepacked._entries, "no weight was reordered"
        return results


class FrozenLinearGelu(Frozen, LinearGelu):
    pass


class FrozenFeedForward(Frozen, FeedForward):
    pass


class FrozenQkvProjection(Frozen, QkvProjection):
    pass


def frozen(*shape, dtype, seed, scale=1.0):
    return random(*shape, dtype=dtype, seed=seed, scale=scale, grad=False)


def linear_of(width, width_out, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(width, width_out, dtype=dtype).requires_grad_(False)


SHAPES = [(48,), (1, 48), (7, 33), (2, 9, 64), (1, 130, 768), (3, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gelu(dtype, shape, approximate, layout):
    width = shape[-1]
    inputs = {
        "x": LAYOUTS[layout](random(*shape, dtype=dtype, seed=1, grad=False)),
        "weight": frozen(40, width, dtype=dtype, seed=2, scale=width**-0.5),
        "bias": frozen(40, dtype=dtype, seed=3),
    }
    assert_parity(FrozenLinearGelu(inputs, {"approximate": approximate}), "cpu")


@pytest.mark.parametrize("shift", [-30.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tails_of_gelu(dtype, shift):
    inputs = {
        "x": random(9, 24, dtype=dtype, seed=1, grad=False),
        "weight": frozen(17, 24, dtype=dtype, seed=2),
        "bias": torch.full((17,), shift, dtype=dtype),
    }
    assert_parity(FrozenLinearGelu(inputs, {}), "cpu")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_feed_forward_and_qkv_projection(dtype, shape, bias):
    n, f = shape[-1], 96
    inputs = {
        "x": random(*shape, dtype=dtype, seed=1, grad=False),
        "w_in": frozen(f, n, dtype=dtype, seed=2, scale=n**-0.5),
        "b_in": frozen(f, dtype=dtype, seed=3) if bias else None,
        "w_out": frozen(n, f, dtype=dtype, seed=4, scale=f**-0.5),
        "b_out": frozen(n, dtype=dtype, seed=5) if bias else None,
    }
    assert_parity(FrozenFeedForward(inputs, {}), "cpu")
    inputs = {"x": inputs["x"]}
    for seed, name in enumerate("qkv"):
        inputs[f"w{name}"] = frozen(24, n, dtype=dtype, seed=seed, scale=n**-0.5)
        inputs[f"b{name}"] = frozen(24, dtype=dtype, seed=seed) if bias else None
    assert_parity(FrozenQkvProjection(inputs, {}), "cpu")


def test_infinity_and_nan_stay_where_they_are():
    x = torch.tensor([[1.0, float("inf")], [float("nan"), 1.0], [1.0, 1.0]])
    dense = linear_of(2, 5)
    out = prepacked.linear(x, (dense.weight,), (dense.bias,))
    torch.testing.assert_close(out, F.linear(x, dense.weight, dense.bias), equal_nan=True)


def other_than(x, dense, change):
    """Calls that are PyTorch's."""
    weight, bias = dense.weight, dense.bias
    if change == "gradient":
        x = x.clone().requires_grad_()
    elif change == "no Parameter":
        weight = weight.detach()
    elif change == "half":
        x, weight, bias = x.half(), nn.Parameter(weight.half(), False), bias.half()
    elif change == "mixed":
        x = x.double()
    elif change == "strides":
        weight = nn.Parameter(weight.t().contiguous().t(), requires_grad=False)
    elif change == "a bias with a stride":
        bias = nn.Parameter(torch.randn(10)[::2], requires_grad=False)
    elif change == "an expanded bias":
        bias = torch.zeros(1).expand(5)
    elif change == "a bias for all":
        bias = torch.zeros(1)
    elif change == "no rows":
        x = x[:0]
    elif change == "a subclass":
        weight = type("Special", (nn.Parameter,), {})(weight, False)
    return prepacked.linear(x, (weight,), (bias,))


KINDS = ("gradient", "no Parameter", "half", "mixed", "strides", "no rows", "a subclass")
KINDS += ("a bias with a stride", "an expanded bias", "a bias for all")


@pytest.mark.parametrize("change", KINDS)
def test_what_has_no_copy(change):
    assert other_than(torch.randn(3, 8), linear_of(8, 5), change) is None
    assert prepacked._entries == {}


def test_switched_off_with_onednn_and_under_transforms():
    x, dense = torch.randn(3, 8), linear_of(8, 5)
    with torch.backends.mkldnn.flags(enabled=False):
        assert prepacked.linear(x, (dense.weight,), (dense.bias,)) is None
    out = torch.func.vmap(lambda row: ops.linear_gelu(row, dense.weight, dense.bias))(x)
    torch.testing.assert_close(out, F.gelu(dense(x)))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert ops.linear_gelu(x, dense.weight, dense.bias).dtype == torch.bfloat16
        assert linear(x, dense).dtype == torch.bfloat16
        out = plain_ops.feed_forward(x, dense.weight, dense.bias, dense.weight.t(), None, "gelu")
        assert out.dtype == torch.bfloat16
    assert prepacked._entries == {}


def test_a_default_device_does_not_hide_the_operators():
    prepacked.works.cache_clear()
    x, dense = torch.randn(3, 8), linear_of(8, 5)
    with torch.device("meta"):
        out = prepacked.linear(x, (dense.weight,), (dense.bias,))
    torch.testing.assert_close(out, dense(x))


def test_weights_that_are_nan_are_copied_once():
    x, dense = torch.randn(3, 8), linear_of(8, 5)
    dense.weight.fill_(math.nan)
    prepacked.linear(x, (dense.weight,), (dense.bias,))
    (entry,) = prepacked._entries.values()
    assert entry.is_fresh((dense.weight,))


@pytest.mark.parametrize("change", [lambda w: w[:, 64:128].zero_(), lambda w: w[64:128].zero_()])
def test_an_edit_of_a_heads_rows_or_columns_is_seen(change):
    x, dense = torch.randn(3, 768), linear_of(768, 768)
    prepacked.linear(x, (dense.weight,), (dense.bias,))
    change(dense.weight.data)
    torch.testing.assert_close(prepacked.linear(x, (dense.weight,), (dense.bias,)), dense(x), rtol=1e-5, atol=1e-5)


def test_a_forked_child_gets_a_lock_of_its_own():
    x, dense = torch.randn(3, 8), linear_of(8, 5)
    with prepacked._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(0 if prepacked.linear(x, (dense.weight,), (dense.bias,)) is not None else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("of", ["compile", "export", "jit", "make_fx"])
def test_traces_have_none(of):
    layer = bertfast.nn.BertEncoderLayer(32, 4, 64).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        if of == "compile":
            torch.compile(layer, fullgraph=True, backend="eager")(x)
        elif of == "export":
            torch.export.export(layer, (x,))
        elif of == "jit":
            torch.jit.trace(layer, (x,), check_trace=False)
        else:
            make_fx(layer)(x)
        assert prepacked._entries == {}
        expected = layer(x)
        assert len(prepacked._entries) == 4
    torch.testing.assert_close(layer(x).detach(), expected)


def test_an_edit_of_a_part_that_nothing_counts_needs_refresh():
    x, dense = torch.eye(100), linear_of(100, 100)
    out = prepacked.linear(x, (dense.weight,), (dense.bias,))
    dense.weight.data[3, 7] += 1.0
    assert torch.equal(prepacked.linear(x, (dense.weight,), (dense.bias,)), out)
    bertfast.refresh(dense)
    torch.testing.assert_close(prepacked.linear(x, (dense.weight,), (dense.bias,))[7, 3], out[7, 3] + 1.0)


def test_a_model_keeps_nothing_of_its_copies():
    layer = bertfast.nn.BertEncoderLayer(32, 4, 64).eval()
    x, keys, size = torch.randn(1, 5, 32), list(layer.state_dict()), len(pickle.dumps(layer))
    with torch.no_grad():
        out = layer(x)
        twins = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        assert list(layer.state_dict()) == keys and len(pickle.dumps(layer)) == size
        for twin in twins:
            assert torch.equal(twin(x), out)
            for p in twin.parameters():
                p.mul_(2.0)
            assert not torch.equal(twin(x), out)
        assert torch.equal(layer(x), out)
    assert len(prepacked._entries) == 12
    del layer, twins, twin, p
    gc.collect()
    assert prepacked._entries == {}


def test_training_between_two_inferences():
    layer = bertfast.nn.BertEncoderLayer(32, 4, 64)
    optimizer, x = torch.optim.AdamW(layer.parameters(), lr=0.1), torch.randn(2, 5, 32)
    for _ in range(3):
        with torch.inference_mode():
            ours = layer.eval()(x)
            with use_backend("torch"):
                torch.testing.assert_close(ours, layer(x), rtol=1e-5, atol=1e-5)
        layer.train()(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_threads_share_a_copy():
    dense, x, found = linear_of(64, 64), torch.randn(5, 64), []

    def call():
        with torch.no_grad():
            found.extend(prepacked.linear(x, (dense.weight,), (dense.bias,)) for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 120 and all(torch.equal(out, found[0]) for out in found) and len(prepacked._entries) == 1


def test_sums_as_long_as_those_of_bert():
    """oneDNN adds up all of K in one go: its error is twice that of MKL, which adds up blocks."""
    inputs = {
        "x": random(64, 768, dtype=torch.float32, seed=1, grad=False),
        "w_in": frozen(3072, 768, dtype=torch.float32, seed=2, scale=768**-0.5),
        "b_in": frozen(3072, dtype=torch.float32, seed=3),
        "w_out": frozen(768, 3072, dtype=torch.float32, seed=4, scale=3072**-0.5),
        "b_out": frozen(768, dtype=torch.float32, seed=5),
    }
    assert_parity(FrozenFeedForward(inputs, {}), "cpu")
