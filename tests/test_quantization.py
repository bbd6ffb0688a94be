"""`quantize` and `dequantize`: accuracy, nothing stale, back bit by bit, and what is refused."""

from __future__ import annotations

import copy
import os
import pickle
import signal

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize

import bertfast
from bertfast import BackendError, dequantize, prepacked, quantize
from bertfast.activations import FORMULAS
from bertfast.encode import Encoder
from bertfast.nn import QuantizedLinear
from bertfast.ops import quantized_linear as int8
from helpers.checkpoints import ALL_HEADS
from helpers.command_line import minilm
from helpers.models import inputs_of, pair
from helpers.poison import poisoned_memory  # noqa: F401
from helpers.swap import stock_and_swapped

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(int8.unavailable() is not None, reason=f"no int8: {int8.unavailable()}"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bert(dtype=torch.float32, seed=0, **fields):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 72, "num_hidden_layers": 2}
    config = bertfast.BertConfig(vocab_size=61, max_position_embeddings=22, **{**sizes, **fields})
    return bertfast.BertModel(config).eval().to(dtype)


IDS = torch.arange(5, 26).view(3, 7)


@torch.no_grad()
def run(model, ids=IDS):
    return model(ids).last_hidden_state


def layers_of(model):
    return [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]


def worst_cosine(one, other):
    return torch.cosine_similarity(one.double(), other.double(), dim=-1).min()


@pytest.mark.parametrize("keep_weights", [True, False])
@pytest.mark.parametrize("name", ALL_HEADS)
def test_every_family_and_head(name, keep_weights):
    stock, model = pair(name, dtype=torch.float32)
    assert quantize(model, keep_weights=keep_weights) is model
    found = layers_of(model)
    assert len(found) == 12 and not any("pooler" in path or "classifier" in path for path in found)
    inputs = inputs_of(name, "right")
    with torch.no_grad():
        ours, theirs = model(**inputs)[0], stock(**inputs)[0]
    real = inputs["attention_mask"].bool()
    if ours.shape[:2] == real.shape:
        ours, theirs = ours[real], theirs[real]
    assert worst_cosine(ours.flatten(), theirs.flatten()) > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_real_checkpoint(dtype):
    encoder = Encoder.from_pretrained(minilm(), dtype=dtype)
    quantized = Encoder.from_pretrained(minilm(), dtype=dtype, int8=True)
    texts = ["The quick brown fox jumps over the lazy dog.", "naïve café — 你好，世界 🦊", "", " ".join(["word"] * 60)]
    vectors = (torch.from_numpy(e.encode(texts)) for e in (quantized, encoder))
    assert worst_cosine(*vectors) > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
def test_back_bit_by_bit(dtype):
    model = bert(dtype)
    state, parameters, out = copy.deepcopy(model.state_dict()), dict(model.named_parameters()), run(model)
    names = [(name, type(module)) for name, module in model.named_modules()]
    quantize(model)
    assert not torch.equal(run(model), out)
    for _ in range(2):
        assert list(model.state_dict()) == list(state)
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert all(p is parameters[name] for name, p in model.named_parameters())
        dequantize(model)
    assert [(name, type(module)) for name, module in model.named_modules()] == names
    assert torch.equal(run(model), out)


def test_twice_is_once():
    model = quantize(bert())
    modules, out = list(model.modules()), run(model)
    assert all(one is other for one, other in zip(quantize(model).modules(), modules, strict=True))
    assert torch.equal(run(model), out)


def test_kept_and_dropped_weights_compute_the_same():
    model = quantize(bert())
    dropped = quantize(bert(), keep_weights=False)
    assert torch.equal(run(model), run(dropped))
    sizes = [sum(t.numel() * t.element_size() for t in m.state_dict().values()) for m in (bert(), model, dropped)]
    assert sizes[0] == sizes[1] > 1.5 * sizes[2]
    with pytest.raises(ValueError, match=r"query cannot be restored: .*dropped its weight"):
        dequantize(dropped)
    assert torch.equal(run(model), run(dropped))


def test_saving(tmp_path):
    model = bert()
    out = run(model)
    quantize(model).save_pretrained(tmp_path / "kept")
    assert torch.equal(run(bertfast.BertModel.from_pretrained(tmp_path / "kept").eval()), out)
    with pytest.raises(ValueError, match="cannot be saved"):
        quantize(bert(), keep_weights=False).save_pretrained(tmp_path / "dropped")
    other = quantize(bert(seed=1), keep_weights=False)
    run(other)
    other.load_state_dict(quantize(bert(), keep_weights=False).state_dict())
    assert torch.equal(run(other), run(model))
    with pytest.raises(RuntimeError, match="weight_int8"):
        other.load_state_dict(model.state_dict())


EDITS = {
    "load_state_dict": lambda model: model.load_state_dict(bert(seed=1).state_dict()),
    "in place": lambda model: [p.mul_(1.5) for p in model.encoder.parameters()],
    "through data": lambda model: [p.data.mul_(1.5) for p in model.encoder.parameters()],
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "another parameter": lambda model: [
        setattr(m, "weight", nn.Parameter(m.weight * 2)) for m in model.modules() if isinstance(m, QuantizedLinear)
    ],
}


@pytest.mark.parametrize("edit", EDITS)
@torch.no_grad()
def test_edits_are_seen(edit):
    model = quantize(bert())
    before = run(model)
    EDITS[edit](model)
    after = run(model)
    fresh = copy.deepcopy(dequantize(model))
    assert not torch.equal(after.float(), before) and torch.equal(run(quantize(fresh)), after)


def test_an_edit_that_nothing_can_detect_needs_refresh():
    model = quantize(bert())
    before = run(model)
    model.encoder.layer[0].intermediate.dense.weight.data[3, 7] += 1.0
    assert torch.equal(run(model), before)
    bertfast.refresh(model)
    assert not torch.equal(run(model), before)


def test_casts_leave_dropped_weights_as_exact():
    model = quantize(bert(), keep_weights=False)
    layer = model.encoder.layer[0].output.dense
    scale, total = layer.weight_scale.clone(), layer.weight_sum.clone()
    model.to(torch.bfloat16)
    assert run(model).dtype == layer.bias.dtype == torch.bfloat16
    assert torch.equal(layer.weight_scale, scale) and torch.equal(layer.weight_sum, total)


@pytest.mark.parametrize("keep_weights", [True, False])
@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_and_pickles(twin, keep_weights):
    model = quantize(bert(), keep_weights=keep_weights)
    out = run(model)
    other = twin(model)
    assert torch.equal(run(other), out)
    with torch.no_grad():
        other.encoder.layer[0].output.dense.bias.add_(1.0)
    assert torch.equal(run(model), out) and not torch.equal(run(other), out)


def test_copies_go_with_the_model():
    prepacked._entries.clear()
    model = bert()
    run(model)
    assert len(prepacked._entries) == 8
    quantize(model)
    assert not prepacked._entries
    run(model)
    assert len(prepacked._entries) == 8
    dequantize(model)
    assert not prepacked._entries


@pytest.mark.parametrize("activation", [*FORMULAS, "hard"])
def test_fused_paths_equal_the_modules(activation):
    """A hook that does nothing has every module called."""
    activation = nn.Hardswish() if activation == "hard" else activation
    model = bert(hidden_act="gelu")
    for layer in model.encoder.layer:
        layer.activation = activation
    fused = run(quantize(model))
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.register_forward_hook(lambda *arguments: None)
    separate = run(model)
    # Another way to the same value may move one of the intermediate by one step of its 8 bits.
    assert worst_cosine(fused, separate) > 0.9999 if activation in FORMULAS else torch.equal(fused, separate)


def test_query_key_and_value_as_one_product():
    attention = quantize(bertfast.nn.FusedSelfAttention(48, 4).eval())
    x = torch.randn(2, 5, 48)
    with torch.no_grad():
        joint = bertfast.nn.quantized.qkv_projection(x, attention.query, attention.key, attention.value)
        assert all(map(torch.equal, joint, (attention.query(x), attention.key(x), attention.value(x))))
        attention.key.bias = None
        assert bertfast.nn.quantized.qkv_projection(x, attention.query, attention.key, attention.value) is None
        attention(x)


def test_modules_of_their_own():
    feed_forward = bertfast.nn.FusedFeedForward(48, 72).eval()
    x = torch.randn(2, 5, 48)
    with torch.no_grad():
        exact = feed_forward(x)
        out = quantize(feed_forward)(x)
        assert len(layers_of(feed_forward)) == 2 and worst_cosine(out, exact) > 0.99
        assert (
            quantize(nn.Sequential(feed_forward, bertfast.nn.BertEncoderLayer(48, 4, 72).eval()))(x[:0]).shape[0] == 0
        )


def test_a_layer_in_two_places_stays_one():
    model = bert()
    model.encoder.layer[1] = model.encoder.layer[0]
    quantize(model)
    assert len(layers_of(model)) == 6 and model.encoder.layer[1] is model.encoder.layer[0]
    layer = bertfast.nn.FusedSelfAttention(48, 4)
    layer.key = layer.query
    assert quantize(layer).key is layer.query and dequantize(layer).key is layer.query


def test_gradients_are_refused():
    model = quantize(bert())
    with pytest.raises(RuntimeError, match=r"no gradients: .*inference_mode.*dequantize"):
        model(IDS)
    with torch.inference_mode():
        out = model.train()(IDS)[0]
    assert out.isfinite().all() and all(p.requires_grad for p in model.parameters())
    loss = dequantize(model)(IDS)[0].square().sum()
    loss.backward()


def test_autocast_gives_its_dtype():
    model = quantize(bert())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model.encoder.layer[0].output.dense(torch.randn(3, 72)).dtype == torch.bfloat16
        assert run(model).isfinite().all()


def test_compiled_it_breaks_the_graph():
    model = quantize(bert())
    expected = run(model)
    torch._dynamo.reset()
    torch.testing.assert_close(run(torch.compile(model, backend="eager")), expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="in the place of nn.Linear runs as it is"):
        run(torch.compile(model, backend="eager", fullgraph=True))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_it_cannot_be_recorded():
    model = quantize(bert())
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be exported or traced"):
        torch.export.export(model, (IDS,), strict=False)
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be exported or traced"):
        torch.jit.trace(model.encoder.layer[0], torch.randn(1, 5, 48))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("of", [lambda w: w.t().contiguous().t(), lambda w: torch.stack([w, w], -1)[..., 0]])
@torch.no_grad()
def test_weights_that_become_strided(of, keep):
    torch.manual_seed(0)
    layer, x = QuantizedLinear(nn.Linear(48, 24), keep), torch.randn(5, 48)
    expected = layer(x)
    if keep:
        layer.weight = nn.Parameter(of(layer.weight))
    else:
        layer.weight_int8 = of(layer.weight_int8)
    assert torch.equal(layer(x), expected)
    strided = nn.Linear(48, 24)
    strided.weight = nn.Parameter(of(strided.weight))
    assert worst_cosine(QuantizedLinear(strided, keep)(x), strided(x)) > 0.99
    if keep:
        layer.weight = nn.Parameter(torch.randn(24, 1).expand(24, 48))
        assert worst_cosine(layer(x), nn.functional.linear(x, layer.weight, layer.bias)) > 0.99
    with pytest.raises(ValueError, match="int8 layers take fp32, bf16 and fp16, got x in torch.float64"):
        layer(x.double())


def test_a_forked_child():
    model = quantize(bert())
    run(model)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            torch.set_num_threads(1)
            os._exit(0 if run(model).isfinite().all() else 1)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("name", ["BertModel", "RobertaForSequenceClassification", "DistilBertModel"])
def test_swapped_models_of_transformers(name):
    stock, swapped = stock_and_swapped(name, dtype=torch.float32)
    quantize(swapped)
    assert len(layers_of(swapped)) == 12 and list(swapped.state_dict()) == list(stock.state_dict())
    inputs = inputs_of(name, "right")
    with torch.no_grad():
        ours, theirs = swapped(**inputs)[0], stock(**inputs)[0]
        bertfast.restore(swapped)
        restored = swapped(**inputs)[0]
        floats = dequantize(swapped)(**inputs)[0]
    real = inputs["attention_mask"].bool() if name.endswith("Model") else slice(None)
    assert worst_cosine(ours[real], theirs[real]) > 0.99 and worst_cosine(ours[real], restored[real]) > 0.999
    assert torch.equal(floats, theirs)


def hooked(model):
    model.encoder.layer[1].output.dense.register_forward_hook(lambda *arguments: None)


def parametrised(model):
    parametrize.register_parametrization(model.encoder.layer[1].output.dense, "weight", nn.Identity())


REFUSED = {
    "fp64": (lambda model: model.double(), "query: float64, int8 layers are for"),
    "meta": (lambda model: model.to("meta"), "query: on meta"),
    "hook": (hooked, "layer.1.output.dense: a Linear that is no plain"),
    "parametrised": (parametrised, "layer.1.output.dense: a ParametrizedLinear that is no plain"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind):
    change, message = REFUSED[kind]
    model = bert()
    change(model)
    with pytest.raises(ValueError, match=message):
        quantize(model)
    assert not layers_of(model)


def test_models_without_layers_of_ours():
    stock = transformers.BertModel(transformers.BertConfig(**bert().config.to_dict()))
    with pytest.raises(ValueError, match=r"no encoder layer of bertfast in this BertModel.*accelerate"):
        quantize(stock)
    for function in (quantize, dequantize):
        with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got dict"):
            function({})


def test_a_machine_without_int8(monkeypatch):
    monkeypatch.setattr(int8, "unavailable", lambda: "no VNNI")
    model = bert()
    with pytest.raises(BackendError, match="no int8 on this machine: no VNNI"):
        quantize(model)
    assert not layers_of(model)


def test_wrong_inputs():
    layer = quantize(bert()).encoder.layer[0].output.dense
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"\(\.\.\., 72\), got \(3, 71\)"):
            layer(torch.randn(3, 71))
        with pytest.raises(ValueError, match="run on the CPU, got x on meta"):
            layer(torch.randn(3, 72, device="meta"))
        with pytest.raises(ValueError, match="got x in torch.float64"):
            layer(torch.randn(3, 72).double())
    assert "in_features=72, out_features=48, bias=True" in repr(layer)
