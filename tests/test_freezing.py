"""`freeze` and `unfreeze`: the same bits, half the memory, back bit by bit, and what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import bertfast
from bertfast import BackendError, freeze, prepacked, quantize, unfreeze
from bertfast.activations import GELU_FORMS
from bertfast.nn import FrozenLinear, FusedFeedForward, FusedSelfAttention
from bertfast.ops import quantized_linear
from helpers.checkpoints import ALL_HEADS
from helpers.models import inputs_of, pair
from helpers.poison import poisoned_memory  # noqa: F401
from helpers.swap import stock_and_swapped

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if prepacked.works(dtype)]
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not DTYPES, reason="this PyTorch has no oneDNN"),
]
IDS = torch.arange(5, 26).view(3, 7)


def bert(dtype=torch.float32, seed=0, **fields):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 72, "num_hidden_layers": 2}
    config = bertfast.BertConfig(vocab_size=61, max_position_embeddings=22, **{**sizes, **fields})
    return bertfast.BertModel(config).eval().to(dtype)


@torch.no_grad()
def run(model, ids=IDS, **options):
    return model(ids, **options).last_hidden_state


def frozen_in(model):
    return [name for name, module in model.named_modules() if isinstance(module, FrozenLinear)]


@pytest.fixture(autouse=True)
def empty_cache():
    prepacked._entries.clear()
    yield
    prepacked._entries.clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [None, "right", "empty row"])
@pytest.mark.parametrize("name", ALL_HEADS)
def test_every_family_and_head_has_the_same_bits(name, mask, dtype):
    _, model = pair(name, dtype=dtype)
    inputs = inputs_of(name, mask)
    with torch.no_grad():
        expected = model(**inputs)[0]
        prepacked._entries.clear()
        assert freeze(model) is model
        assert torch.equal(model(**inputs)[0], expected)
    found = frozen_in(model)
    assert len(found) == 12 and not any("pooler" in path or "classifier" in path for path in found)
    # Heads are not frozen, and that of a masked LM has one product of its own.
    assert len(prepacked._entries) <= 1


@pytest.mark.parametrize("activation", [*sorted(GELU_FORMS), "relu", "silu"])
def test_every_activation(activation):
    model = bert(hidden_act=activation)
    expected = run(model)
    got = run(freeze(model))
    # Of other activations than GELU the op has a formula of its own.
    assert torch.equal(got, expected) or activation not in GELU_FORMS
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_model_of_transformers():
    stock, model = stock_and_swapped("BertModel", dtype=torch.float32)
    with torch.no_grad():
        expected = model(IDS).last_hidden_state
        freeze(model)
        assert len(frozen_in(model)) == 12
        torch.testing.assert_close(model(IDS).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
        unfreeze(model)
        bertfast.restore(model)
        torch.testing.assert_close(model(IDS).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


@pytest.mark.parametrize("of", [lambda: FusedSelfAttention(48, 4), lambda: FusedFeedForward(48, 72)])
def test_modules_by_themselves(of):
    torch.manual_seed(0)
    module, x = of().eval(), torch.randn(2, 5, 48)
    with torch.no_grad():
        expected = module(x)
        assert torch.equal(freeze(module)(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_back_bit_by_bit(dtype):
    model = bert(dtype)
    model.encoder.layer[0].output.dense.weight.requires_grad_(False)
    state, biases, out = copy.deepcopy(model.state_dict()), dict(model.named_parameters()), run(model)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    names = [(name, type(module)) for name, module in model.named_modules()]
    freeze(model)
    assert all(p is biases[name] for name, p in model.named_parameters())
    for step in range(3):
        found = model.state_dict()
        assert list(found) == list(state) and all(torch.equal(found[name], state[name]) for name in state)
        run(model)  # joins query, key and value
        if step == 1:
            unfreeze(model)
    assert [(name, type(module)) for name, module in model.named_modules()] == names
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}
    assert torch.equal(run(model), out)


def test_weights_are_held_once():
    def live():
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
        tensors = [t for t in tensors if t.dim() == 2 and t.shape[1] >= 48 and t.device.type == "cpu"]
        sizes = {id(t) if t.layout == torch._mkldnn else t.data_ptr(): t.numel() for t in tensors}
        return sum(sizes.values())

    before = live()
    model = bert()
    size = live() - before
    linear = sum(m.weight.numel() for m in model.encoder.modules() if isinstance(m, nn.Linear))
    run(model)
    assert live() - before >= size + linear
    freeze(model)
    for _ in range(2):
        run(model)
        assert live() - before == size


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_and_pickles(twin, joined):
    model = bert()
    out = run(model)
    freeze(model)
    if joined:
        run(model)
    other = twin(model)
    assert torch.equal(run(other), out) and len(frozen_in(other)) == 12
    other.load_state_dict(bert(seed=1).state_dict())
    assert torch.equal(run(model), out) and not torch.equal(run(other), out)


@pytest.mark.parametrize("joined", [True, False])
def test_loading(joined, tmp_path):
    model, other = freeze(bert()), bert(seed=1)
    expected = run(other)
    if joined:
        run(model)
    model.load_state_dict(other.state_dict())
    assert torch.equal(run(model), expected)
    model.save_pretrained(tmp_path)
    assert torch.equal(run(bertfast.BertModel.from_pretrained(tmp_path).eval()), expected)
    state = other.state_dict()
    name = "encoder.layer.0.output.dense.weight"
    with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
        model.load_state_dict({**state, name: torch.zeros(3, 3)})
    for more in ("encoder.layer.0.output.dense.x", "encoder.x"):
        with pytest.raises(RuntimeError, match=f'Unexpected key.*"{more}"'):
            model.load_state_dict({**state, more: torch.zeros(1)})
    bias = "encoder.layer.1.attention.self.query.bias"
    with pytest.raises(RuntimeError, match=f'Missing key.*"{bias}"'):
        model.load_state_dict({key: value for key, value in state.items() if key != bias})
    del state[name]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{name}"'):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == [name]


def test_autocast_changes_nothing():
    model = freeze(bert())
    with torch.autocast("cpu", torch.bfloat16):
        out = run(model)
    torch.testing.assert_close(out.float(), run(model), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("keep", ["freeze", "quantize"])
def test_what_comes_back_under_inference_mode_can_be_trained(keep):
    if keep == "quantize" and quantized_linear.unavailable() is not None:
        pytest.skip("no int8")
    model = bert()
    with torch.inference_mode():
        (freeze if keep == "freeze" else quantize)(model)
        run(model, first_token_only=True)
        run(model)
        (unfreeze if keep == "freeze" else bertfast.dequantize)(model)
    model(IDS).last_hidden_state.sum().backward()
    assert all(p.grad is not None for p in model.encoder.parameters())


@pytest.mark.parametrize(
    "bias", [torch.zeros(1), torch.zeros(1).expand(24), torch.zeros(48)[::2], torch.zeros(24).bfloat16()]
)
def test_a_bias_that_onednn_would_misread(bias):
    layer = FrozenLinear(nn.Linear(48, 24).requires_grad_(False))
    layer.bias = nn.Parameter(bias, requires_grad=False)
    with pytest.raises(ValueError, match=r"bias must be contiguous, of shape \(24,\)"):
        layer(torch.randn(2, 48))


@pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="no bf16 on this machine")
def test_casts():
    expected = run(bert().to(torch.bfloat16))
    model = freeze(bert())
    assert torch.equal(run(model.to(torch.bfloat16)), expected)
    with pytest.raises(RuntimeError, match=r"cannot become torch.float16 on cpu: bertfast.unfreeze"):
        model.half()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert run(model.float()).dtype == torch.float32


def test_first_tokens_alone():
    model = bert()
    expected = run(model, first_token_only=True)
    freeze(model)
    for _ in range(2):
        assert torch.equal(run(model, first_token_only=True), expected)
        run(model)


def test_hooks_see_each_projection():
    model, seen = bert(), []
    query = model.encoder.layer[0].attention.self.query
    with torch.no_grad():
        handle = query.register_forward_hook(lambda module, args, out: seen.append(out))
        expected = run(model)
        handle.remove()
        freeze(model)
        run(model)  # joined before the hook is there
        model.encoder.layer[0].attention.self.query.register_forward_hook(lambda m, args, out: seen.append(out))
        torch.testing.assert_close(run(model), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-5)


def test_a_bias_that_is_edited_counts():
    model = freeze(bert())
    before = run(model)
    with torch.no_grad():
        model.encoder.layer[1].attention.self.value.bias.add_(1.0)
    assert not torch.equal(run(model), before)


def test_compiled_models_leave_frozen_layers_to_eager():
    model = bert()
    expected = run(model)
    freeze(model)
    torch.testing.assert_close(run(torch.compile(model, backend="eager")), expected, rtol=1e-5, atol=1e-5)


def test_threads_that_join_at_once():
    expected = run(bert())
    model, found = freeze(bert()), []
    threads = [threading.Thread(target=lambda: found.extend(run(model) for _ in range(10))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60 and all(torch.equal(out, expected) for out in found)


CALLS = {
    "gradient of x": (lambda layer: layer(torch.randn(2, 48, requires_grad=True)), RuntimeError, "no gradients"),
    "gradient of a bias": (lambda layer: layer(torch.randn(2, 48)), RuntimeError, "no gradients"),
    "dtype": (lambda layer: layer(torch.randn(2, 48).double()), ValueError, "frozen in torch.float32 on the CPU"),
    "device": (lambda layer: layer(torch.randn(2, 48, device="meta")), ValueError, "got x in torch.float32 on meta"),
    "width": (lambda layer: layer(torch.randn(2, 47)), ValueError, r"x must have shape \(..., 48\), got \(2, 47\)"),
    "no dimension": (lambda layer: layer(torch.tensor(1.0)), ValueError, r"got \(\)"),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_are_refused(call):
    function, error, message = CALLS[call]
    layer = FrozenLinear(nn.Linear(48, 24))
    with pytest.raises(error, match=message):
        function(layer)


def test_exports_are_refused():
    model = freeze(bert())
    with torch.no_grad(), pytest.raises(RuntimeError, match="frozen layers cannot be exported or traced"):
        torch.export.export(model, (IDS,), strict=False)


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)


def parametrised(layer):
    parametrize.register_parametrization(layer, "weight", nn.Identity())


REFUSED = {
    "hooked": (hooked, "a Linear that is no plain nn.Linear"),
    "parametrised": (parametrised, "that is no plain nn.Linear"),
    "float64": (lambda layer: layer.double(), "float64, frozen layers are for fp32 and bf16"),
    "meta": (lambda layer: layer.to("meta"), "on meta, frozen layers run on the CPU"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_layers_that_cannot_be_frozen(change):
    function, message = REFUSED[change]
    model = bert()
    function(model.encoder.layer[1].output.dense)
    with pytest.raises(ValueError, match=rf"encoder.layer.1.output.dense: .*{message}"):
        freeze(model)
    assert frozen_in(model) == []


@pytest.mark.skipif(quantized_linear.unavailable() is not None, reason="no int8")
def test_what_is_frozen_is_not_quantised_and_the_other_way_round():
    with pytest.raises(ValueError, match="a FrozenLinear that is no plain"):
        quantize(freeze(bert()))
    with pytest.raises(ValueError, match="a QuantizedLinear that is no plain"):
        freeze(quantize(bert()))


def test_what_holds_no_layer():
    with pytest.raises(ValueError, match="no encoder layer of bertfast in this Linear"):
        freeze(nn.Linear(3, 4))
    for function in (freeze, unfreeze):
        with pytest.raises(TypeError, match="must be a torch.nn.Module, got str"):
            function("model")
    model = bert()
    assert unfreeze(model) is model


def test_a_machine_without_the_operators(monkeypatch):
    monkeypatch.setattr(prepacked, "works", lambda dtype: False)
    with pytest.raises(BackendError, match="no reordered weights in torch.float32"):
        freeze(bert())


def test_twice_is_once():
    model = freeze(bert())
    modules = list(model.modules())
    assert all(one is other for one, other in zip(freeze(model).modules(), modules, strict=True))


def test_a_weight_that_is_replaced_is_an_error():
    layer = FrozenLinear(nn.Linear(48, 24))
    with pytest.raises(AttributeError, match="cannot be replaced"):
        layer.weight = nn.Parameter(torch.zeros(24, 48))
    with pytest.raises(AttributeError):
        layer.weight = torch.zeros(24, 48)


def test_empty_input():
    layer = FrozenLinear(nn.Linear(48, 24).requires_grad_(False))
    assert layer(torch.randn(0, 3, 48)).shape == (0, 3, 24)
