"""Swapped encoders of torch.nn against stock ones with the fast path off, in every form, mask and mode."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bertfast import use_backend
from bertfast.swap import plain_ops, torch_nn_masks
from helpers.models import assert_close
from helpers.swap_torch_nn import (
    ACTIVATIONS,
    BATCH,
    FORMS,
    LENGTH,
    PAIRS,
    WIDTH,
    assert_stock,
    encoder_of,
    kept,
    layer_of,
    padding,
    pair_mask,
    slow_path,
    source,
    swapped,
)
from helpers.tolerance import assert_within, eps_of


@pytest.fixture(params=["packed", "padded"])
def small(request, monkeypatch):
    """Whether batches count as small, whose padding is computed rather than removed."""
    is_small = request.param == "padded"
    monkeypatch.setattr(torch_nn_masks, "is_small", lambda hidden_states: is_small)
    return is_small


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [None, "right", "holes"])
def test_layers_and_encoders_of_every_form(form, kind, backend, small, fused_shapes):
    batch_first = FORMS[form].get("batch_first", True)
    mask = None if kind is None else padding(kind)
    for stock in (layer_of(**FORMS[form]), encoder_of(**FORMS[form])):
        model = swapped(stock, backend=backend)
        assert_stock(model, stock, source(batch_first), mask, batch_first=batch_first)
    assert len(fused_shapes) == 6


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("form", ["post", "pre, sequence first", "odd heads", "no bias"])
@pytest.mark.parametrize("kind", ["right", "left", "holes"])
@pytest.mark.parametrize("pairs", [None, "causal", "causal bool"])
def test_padding_is_removed_once(form, kind, pairs, backend, fused_shapes):
    stock = encoder_of(**FORMS[form])
    batch_first = FORMS[form].get("batch_first", True)
    mask = padding(kind, "float" if pairs == "causal" else "bool")
    src_mask = None if pairs is None else pair_mask(pairs)
    model = swapped(stock, backend=backend)
    output = assert_stock(model, stock, source(batch_first), mask, batch_first=batch_first, mask=src_mask)
    tokens = int((~padding(kind)).sum())
    assert fused_shapes == [(1, tokens, WIDTH)] * 4
    rows = padding(kind) if batch_first else padding(kind).t()
    assert torch.equal(output[rows], stock.norm(torch.zeros_like(output[rows])))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_activations(name, norm_first):
    stock = layer_of(ACTIVATIONS[name], norm_first=norm_first)
    model = swapped(stock)
    assert_stock(model, stock, source())
    if name != "lambda":
        assert_stock(swapped(encoder_of(ACTIVATIONS[name])), encoder_of(ACTIVATIONS[name]), source(), padding("right"))


def test_an_activation_that_changes_after_construction():
    stock = encoder_of("relu")
    model = swapped(stock)
    for one in (model, stock):
        one.layers[1].activation = F.gelu
    assert_stock(model, stock, source(), padding("right"))
    for one in (model, stock):
        one.layers[0].activation = nn.Tanh()
    assert_stock(model, stock, source())


BOTH = [
    (pairs, padded)
    for pairs in (None, *PAIRS)
    for padded in (None, "bool", "float", "bias")
    if pairs is None or padded is None or ("bool" in pairs) == (padded == "bool")  # two kinds are deprecated
]


@pytest.mark.parametrize(("pairs", "padded"), BOTH)
@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_count_by_value(pairs, padded, batch_first):
    src_mask = None if pairs is None else pair_mask(pairs)
    mask = None if padded is None else padding("right", padded)
    stock = layer_of(batch_first=batch_first)
    assert_stock(swapped(stock), stock, source(batch_first), mask, batch_first=batch_first, src_mask=src_mask)
    stock = encoder_of(batch_first=batch_first)
    assert_stock(swapped(stock), stock, source(batch_first), mask, batch_first=batch_first, mask=src_mask)


@pytest.mark.parametrize("is_causal", [None, False, True])
@pytest.mark.parametrize("kind", ["causal", "causal bool"])
@pytest.mark.parametrize("padded", [None, "right"])
def test_the_causal_hint(is_causal, kind, padded, small):
    mask = None if padded is None else padding(padded, "bool" if "bool" in kind else "float")
    stock = encoder_of()
    assert_stock(swapped(stock), stock, source(), mask, mask=pair_mask(kind), is_causal=is_causal)
    stock = layer_of()
    assert_stock(swapped(stock), stock, source(), mask, src_mask=pair_mask(kind), is_causal=bool(is_causal))


def test_a_causal_hint_without_a_mask_is_refused_as_by_stock():
    for stock in (layer_of(), encoder_of()):
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            swapped(stock).train()(source(), is_causal=True)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("padded", [None, "bool", "float"])
@pytest.mark.parametrize("pairs", [None, "causal", "3-D bias"])
def test_unbatched_input(batch_first, padded, pairs):
    x = source()[1]
    src_mask = None if pairs is None else pair_mask(pairs)[:4] if "3-D" in pairs else pair_mask(pairs)
    mask = None if padded is None else padding("right", "float" if pairs else padded)[1]
    stock = layer_of(batch_first=batch_first)
    assert_stock(swapped(stock), stock, x, mask, src_mask=src_mask)
    stock = encoder_of(batch_first=batch_first)
    assert_stock(swapped(stock), stock, x, mask, mask=src_mask)


@pytest.mark.parametrize("pairs", ["causal", "bias"])
def test_masks_get_gradients(pairs):
    stock = encoder_of()
    model = swapped(stock)
    masks = [pair_mask(pairs).requires_grad_() for _ in range(2)]
    biases = [padding("none", "bias").requires_grad_() for _ in range(2)]
    for one, mask, bias in zip((model, stock), masks, biases, strict=True):
        one(source(), mask=mask, src_key_padding_mask=bias).square().sum().backward()
    assert_close(masks[0].grad, masks[1].grad, "mask")
    assert_close(biases[0].grad, biases[1].grad, "key padding mask")
    assert biases[0].grad.any()


def test_sequences_that_are_padding_altogether(small):
    stock = encoder_of(norm=False)
    model = swapped(stock)
    mask = padding("right")
    wanted = kept(stock(source(), src_key_padding_mask=mask), mask)
    mask = mask.clone()
    mask[1] = True
    for train in (True, False):
        got = model.train(train)(source(), src_key_padding_mask=mask)
        got.square().sum().backward()
        with torch.no_grad():
            assert_close(model(source(), src_key_padding_mask=mask), got, "without gradients")
        assert_close(got, wanted.masked_fill(mask.unsqueeze(-1), 0.0), "others")
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert not model(source(), src_key_padding_mask=torch.ones_like(mask)).any()


def test_a_query_without_keys_gives_no_nan():
    src_mask = pair_mask("bool").clone()
    src_mask[2] = True
    for stock, name in ((layer_of(), "src_mask"), (encoder_of(), "mask")):
        model = swapped(stock).eval()
        with torch.no_grad():
            output = model(source(), **{name: src_mask})
        assert output.isfinite().all()
        assert_close(model.train()(source(), **{name: src_mask}), output, name)


@pytest.mark.parametrize(("batch", "length"), [(0, LENGTH), (BATCH, 0), (1, 1)])
@pytest.mark.parametrize("train", [True, False])
def test_empty_and_single(batch, length, train):
    x = source(batch=batch, length=length).requires_grad_(train)
    masks = [{}, {"src_key_padding_mask": torch.zeros(batch, length, dtype=torch.bool)}]
    masks += [{"mask": torch.zeros(length, length, dtype=torch.bool)}]
    stock = encoder_of().train(train)
    for one in masks:
        with torch.set_grad_enabled(train):
            output = swapped(stock)(x, **one)
        assert output.shape == x.shape
        if length == 1:
            assert_close(output, stock(x), "one token")


def test_unpad_switched_off_gives_the_padded_rows_of_stock(fused_shapes):
    stock = encoder_of()
    model = swapped(stock, unpad=False)
    mask = padding("holes")
    with slow_path():
        wanted = stock(source(), src_key_padding_mask=mask)
    for one in (model.train(), model.eval()):
        assert_close(one(source(), src_key_padding_mask=mask), wanted, "all rows")
    assert set(fused_shapes) == {(BATCH, LENGTH, WIDTH)}


def test_small_batches_in_fp32_keep_their_padding_on_the_cpu(fused_shapes):
    model = swapped(encoder_of().float())

    def shapes(model, x, mask):
        del fused_shapes[:]
        model(x, src_key_padding_mask=mask)
        assert fused_shapes[0] == fused_shapes[1]
        return fused_shapes[0]

    small, mask = source(dtype=torch.float32), padding("right")
    tokens = (1, int((~mask).sum()), WIDTH)
    assert shapes(model, small, mask) == shapes(model, small, padding("none")) == (BATCH, LENGTH, WIDTH)
    assert shapes(swapped(model, backend="torch"), small, mask) == tokens
    for backends in (("torch",), ("cpu", "torch")):
        with use_backend(*backends):
            assert shapes(model, small, mask) == tokens
    assert shapes(swapped(encoder_of()), small.double(), mask) == tokens
    assert shapes(swapped(encoder_of().bfloat16()), small.bfloat16(), mask) == tokens
    large = source(batch=10, length=80, dtype=torch.float32)
    assert shapes(model, large, (torch.arange(80) >= 3).expand(10, 80)) == (1, 30, WIDTH)


def test_layers_that_differ():
    layers = [
        layer_of("relu", dim_feedforward=17, layer_norm_eps=1e-3),
        layer_of(F.silu, norm_first=True, seed=1),
        layer_of(nn.GELU(approximate="tanh"), bias=False, seed=2),
    ]
    stock = encoder_of(layers=3)
    for index, layer in enumerate(layers):
        stock.layers[index] = layer
    layers[0].norm2.eps = 1e-6
    stock.norm.eps = 1e-1
    x = source() * 1e-2
    for mask in (None, padding("right")):
        assert_stock(swapped(stock), stock, x, mask)
    stock.layers[1] = layer_of(nhead=2)
    assert_stock(swapped(stock), stock, source(), padding("right"))


@pytest.mark.parametrize("norm", [None, nn.Tanh(), nn.LayerNorm(WIDTH, bias=False), nn.RMSNorm(WIDTH)])
def test_final_norms(norm, small):
    stock = encoder_of()
    stock.norm = norm if norm is None else norm.double()
    assert_stock(swapped(stock), stock, source(), padding("right"))


def zeroed(module, name):
    for layer in [module] if isinstance(module, nn.TransformerEncoderLayer) else module.layers:
        if name == "attention":
            layer.self_attn.dropout = 1.0
        else:
            getattr(layer, name).p = 1.0
    return module


@pytest.mark.parametrize("name", ["attention", "dropout", "dropout1", "dropout2"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_each_dropout_drops_what_stock_drops(name, backend, norm_first):
    """With probability 1 nothing is left to chance."""
    for stock in (layer_of(norm_first=norm_first), encoder_of(norm_first=norm_first)):
        without = stock(source())
        model = swapped(zeroed(stock, name), backend=backend).train()
        mask = padding("right")
        got, wanted = (one.train()(source(), src_key_padding_mask=mask) for one in (model, stock))
        assert_close(kept(got, mask), kept(wanted, mask), name)
        assert (kept(got, mask) - kept(without, mask)).abs().max() > 1e-3
        with torch.no_grad():
            assert_close(model(source()), stock(source()), "without gradients")
        with slow_path():
            assert_close(kept(model.eval()(source()), None), stock.eval()(source()), "evaluation")


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_dropout_follows_the_seed(backend):
    stock = encoder_of(dropout=0.5)
    model = swapped(stock, backend=backend).train()
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(model(source(), src_key_padding_mask=padding("right")))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert torch.equal(model.eval()(source()), swapped(stock, backend=backend).eval()(source()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["post", "pre", "no bias"])
@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
def test_precision(dtype, form, backend, small):
    if backend == "triton":
        pytest.importorskip("triton")
    exact = encoder_of(**FORMS[form]).to(dtype).double()
    stock = copy.deepcopy(exact).to(dtype)
    model = swapped(stock, backend=backend)
    mask = padding("right")
    x = source(dtype=torch.float32).to(dtype)
    cotangent = kept(torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(dtype), mask)

    def run(one, x):
        one.zero_grad()
        output = kept(one(x, src_key_padding_mask=mask), mask)
        output.backward(cotangent.to(output.dtype))
        return {"output": output.detach(), **{name: p.grad for name, p in one.named_parameters()}}

    got, theirs, wanted = run(model, x), run(stock, x), run(exact, x.double())
    for name, value in wanted.items():
        noise = eps_of(dtype) * max(v.abs().max() for n, v in wanted.items() if (n == "output") == (name == "output"))
        assert_within(got[name], [theirs[name]], value, noise, name)


def test_plain_functions_serve_the_cpu_unless_a_backend_is_named(monkeypatch):
    """Half precision is left to the ops: stock LayerNorm keeps its statistics in half precision there."""
    calls = []
    function = plain_ops.add_layer_norm
    monkeypatch.setattr(plain_ops, "add_layer_norm", lambda *a, **k: calls.append(1) or function(*a, **k))
    for dtype, backend, count in ((torch.float32, "auto", 2), (torch.bfloat16, "auto", 0), (torch.float32, "torch", 0)):
        del calls[:]
        swapped(layer_of().to(dtype), backend=backend)(source(dtype=dtype))
        assert len(calls) == count
    with use_backend("cpu", "torch"):
        swapped(layer_of())(source())
    with torch.no_grad():
        swapped(layer_of().eval())(source())
        swapped(layer_of().float().eval(), backend="cpu")(source(dtype=torch.float32))
    assert not calls


@pytest.mark.parametrize("module", ["layer", "encoder"])
def test_nested_input_stays_stock(module, fused_shapes):
    stock = (layer_of if module == "layer" else encoder_of)().eval()
    model = swapped(stock)
    nested = torch.nested.nested_tensor([source()[0, :5], source()[1]])
    with torch.no_grad():
        got, wanted = model(nested), stock(nested)
    assert got.is_nested
    for mine, theirs in zip(got.unbind(), wanted.unbind(), strict=True):
        assert torch.equal(mine, theirs)
    assert not fused_shapes


def test_masks_of_two_kinds_warn_as_stock(fused_shapes):
    stock = layer_of()
    with pytest.warns(UserWarning, match="mismatched"):
        got = swapped(stock)(source(), pair_mask("bias"), padding("right"))
    assert not fused_shapes
    with pytest.warns(UserWarning, match="mismatched"):
        assert torch.equal(got, stock(source(), pair_mask("bias"), padding("right")))


@pytest.mark.parametrize(
    "arguments",
    [
        {"src_key_padding_mask": torch.zeros(BATCH, LENGTH + 1, dtype=torch.bool)},
        {"src_key_padding_mask": torch.zeros(BATCH, LENGTH, dtype=torch.int64)},
        {"mask": torch.zeros(LENGTH, LENGTH + 1, dtype=torch.bool)},
        {"mask": torch.zeros(BATCH, LENGTH, LENGTH)},
        {"mask": torch.zeros(LENGTH)},
        {"src": torch.zeros(BATCH, LENGTH, WIDTH + 1)},
        {"src": torch.zeros(BATCH, LENGTH, WIDTH, 1)},
    ],
)
def test_wrong_inputs_raise_what_stock_raises(arguments):
    stock = encoder_of()
    arguments = {"src": source(), **arguments}
    errors = []
    for model in (stock, swapped(stock)):
        with pytest.raises((RuntimeError, AssertionError)) as info:
            model(**arguments)
        errors.append((info.type, str(info.value)))
    assert errors[0] == errors[1]
