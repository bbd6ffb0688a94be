"""Hooks, adapters, parametrisations and replaced children: what is attached to a child takes effect."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrizations, parametrize

from bertfast.nn import BertEncoderLayer
from bertfast.nn.names import BERT_LAYER, DISTILBERT_LAYER, ParameterGroup
from helpers.models import assert_close, assert_same, assert_same_gradients, gradients, inputs_of, mask_of, pair

NAMES = ["BertForMaskedLM", "DistilBertForMaskedLM"]
PACKED = [(1, 15, 24)] * 2
STOCK_ENCODER = {"BertForMaskedLM": "bert.encoder", "DistilBertForMaskedLM": "distilbert.transformer"}
LEAVES = BERT_LAYER._fields


def layer_of(model, name, index=1):
    return model.get_submodule(STOCK_ENCODER[name]).layer[index]


def path_of(name, leaf):
    return getattr(DISTILBERT_LAYER if name.startswith("Distil") else BERT_LAYER, leaf)


@pytest.fixture
def seen(monkeypatch):
    shapes = []
    forward = BertEncoderLayer.forward

    def spied(self, hidden_states, *args, **kwargs):
        shapes.append(tuple(hidden_states.shape))
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(BertEncoderLayer, "forward", spied)
    return shapes


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("name", NAMES)
def test_forward_hooks_on_leaves_run_and_change_the_result(name, leaf, seen):
    stock, model = pair(name)
    inputs = inputs_of(name, "holes")
    before = model(**inputs).logits
    shapes = []

    def hook(module, args, output):
        shapes.append(tuple(output.shape[:2]))
        return output * 1.5 + 0.1

    handles = [
        layer_of(one, name).get_submodule(path_of(name, leaf)).register_forward_hook(hook) for one in (model, stock)
    ]
    after = assert_same(model, stock, inputs).logits
    assert shapes == [(3, 7)] * 2
    assert (after - before)[mask_of("holes").bool()].abs().max() > 1e-6
    for handle in handles:
        handle.remove()
    del seen[:]
    assert torch.equal(model(**inputs).logits, before)
    assert seen == PACKED


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("name", NAMES)
def test_pre_hooks_and_backward_hooks_on_leaves_run(name, leaf):
    _, model = pair(name)
    module = layer_of(model, name).get_submodule(path_of(name, leaf))
    calls = []
    module.register_forward_pre_hook(lambda module, args: calls.append("pre"))
    module.register_full_backward_pre_hook(lambda module, grad: calls.append("backward pre"))
    module.register_full_backward_hook(lambda module, grad_in, grad_out: calls.append("backward"))
    model(**inputs_of(name, "right")).logits.sum().backward()
    assert calls == ["pre", "backward pre", "backward"]


@pytest.mark.parametrize("where", ["layer", "encoder", "embeddings", "word_embeddings", "LayerNorm"])
@pytest.mark.parametrize("name", NAMES)
def test_hooks_inside_see_the_padded_batch(name, where, seen):
    stock, model = pair(name)
    inputs = inputs_of(name, "holes")
    shapes = []

    def find(one):
        base = one.base_model
        inside = {"layer": layer_of(one, name), "encoder": one.get_submodule(STOCK_ENCODER[name])}
        if where in inside:
            return inside[where]
        return base.embeddings if where == "embeddings" else getattr(base.embeddings, where)

    def note(module, args, output):
        output = output[0] if isinstance(output, tuple) else output
        shapes.append(tuple(output.shape))

    find(model).register_forward_hook(note)
    got = model(**inputs).logits
    assert shapes == [(3, 7, 24)]
    assert seen == [(3, 7, 24)] * 2
    assert_close(got, stock(**inputs).logits, "padded rows are stock's")


@pytest.mark.parametrize("where", ["word_embeddings", "position_embeddings", "LayerNorm"])
@pytest.mark.parametrize("name", [*NAMES, "RobertaModel"])
def test_hooks_on_embeddings_change_the_result(name, where):
    stock, model = pair(name)
    for one in (model, stock):
        module = getattr(one.base_model.embeddings, where)
        module.register_forward_hook(lambda module, args, output: output * 2 - 1)
    for inputs in (inputs_of(name, "holes"), inputs_of(name, types=False)):
        assert_same(model, stock, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_hooks_outside_the_encoder_do_not_keep_padding(name, seen):
    _, model = pair(name)
    calls = []
    model.register_forward_hook(lambda *_: calls.append("model"))
    model.base_model.register_forward_pre_hook(lambda *_: calls.append("base"))
    (model.cls if name == "BertForMaskedLM" else model.vocab_projector).register_forward_hook(
        lambda *_: calls.append("head")
    )
    model(**inputs_of(name, "holes"))
    assert calls == ["base", "head", "model"]
    assert seen == PACKED


HEAD_MODULES = {
    "BertForPreTraining": ["bert.pooler", "bert.pooler.dense", "cls", "cls.predictions", "cls.predictions.transform"],
    "BertForMaskedLM": ["cls", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"],
    "BertForNextSentencePrediction": ["cls", "cls.seq_relationship"],
    "BertForSequenceClassification": ["dropout", "classifier"],
    "BertForQuestionAnswering": ["qa_outputs"],
    "RobertaForMaskedLM": ["lm_head", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"],
    "RobertaForSequenceClassification": ["classifier", "classifier.dense", "classifier.dropout", "classifier.out_proj"],
    "DistilBertForMaskedLM": ["vocab_transform", "vocab_layer_norm", "vocab_projector"],
    "DistilBertForSequenceClassification": ["pre_classifier", "dropout", "classifier"],
    "DistilBertForQuestionAnswering": ["dropout", "qa_outputs"],
}


def altered(module, args, output):
    return tuple(o * 2 - 1 for o in output) if isinstance(output, tuple) else output * 2 - 1


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in HEAD_MODULES.items() for path in paths])
def test_hooks_on_heads_change_the_result(name, path, seen):
    stock, model = pair(name)
    before = model(**inputs_of(name, "right"))
    for one in (model, stock):
        one.get_submodule(path).register_forward_hook(altered)
    # Heads run on padded hidden states, and on zeros a hooked head is not stock's: compared are the real rows.
    after = assert_same(model, stock, inputs_of(name, "right"), rows=mask_of("right"))
    assert any((after[key] - before[key]).abs().max() > 1e-6 for key in after)
    assert set(seen) == {(1, 12, 24)}


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_global_hooks_run_on_every_child(kind, seen):
    _, model = pair("BertModel")
    inputs = inputs_of("BertModel", "right")
    called = []
    handle = getattr(global_hooks, f"register_module_{kind}_hook")(lambda module, *_: called.append(module))
    try:
        output = model(**inputs).last_hidden_state
        output.sum().backward()
    finally:
        handle.remove()
    leaves = [m for m in model.modules() if type(m) is nn.Linear and m is not model.pooler.dense]
    assert len(leaves) == 12
    assert all(any(module is leaf for module in called) for leaf in leaves)
    assert seen == [(3, 7, 24)] * 2
    del seen[:]
    model(**inputs)
    assert seen == [(1, 12, 24)] * 2


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_a_hook_that_would_never_run_is_refused(register):
    _, model = pair("BertModel")
    layer = model.encoder.layer[0]
    for group in (layer.attention, layer.attention.self, layer.attention.output, layer.intermediate, layer.output):
        assert type(group) is ParameterGroup
        with pytest.raises(RuntimeError, match="never run.*encoder layer"):
            getattr(group, register)(lambda *_: None)
    with pytest.raises(RuntimeError, match="dense, LayerNorm"):
        getattr(layer.output, register)(lambda *_: None)
    with pytest.raises(RuntimeError, match="call the encoder layer"):
        layer.attention(torch.zeros(1, 2, 24))


class LoraLinear(nn.Linear):
    """A subclass with a low-rank part, as some adapters make it."""

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, dtype=base.weight.dtype)
        self.weight, self.bias = base.weight, base.bias
        self.down, self.up = low_rank(base)

    def forward(self, x):
        return super().forward(x) + x @ self.down.t() @ self.up.t()


class LoraWrapper(nn.Module):
    """A module around the linear layer, as peft makes it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.down, self.up = low_rank(base)

    def forward(self, x):
        return self.base_layer(x) + x @ self.down.t() @ self.up.t()


def low_rank(base, rank=2):
    generator = torch.Generator().manual_seed(11)
    shapes = (rank, base.in_features), (base.out_features, rank)
    return (nn.Parameter(torch.randn(s, generator=generator, dtype=base.weight.dtype) * 0.3) for s in shapes)


LINEARS = [leaf for leaf in LEAVES if not leaf.endswith("norm")]


def replace(layer, path, make):
    parent, _, child = path.rpartition(".")
    parent = layer.get_submodule(parent)
    setattr(parent, child, make(getattr(parent, child)))


@pytest.mark.parametrize("leaf", LINEARS)
@pytest.mark.parametrize("adapter", [LoraLinear, LoraWrapper])
@pytest.mark.parametrize("name", NAMES)
def test_adapters_take_effect_and_are_trained(name, adapter, leaf, seen):
    stock, model = pair(name)
    inputs = inputs_of(name, "holes")
    mask = mask_of("holes")
    before = model(**inputs).logits.detach()
    for one in (model, stock):
        one.requires_grad_(False)
        replace(layer_of(one, name), path_of(name, leaf), adapter)
    del seen[:]
    after = assert_same(model, stock, inputs, rows=mask).logits
    assert seen == PACKED
    assert (after - before)[mask.bool()].abs().max() > 1e-6
    trained = gradients(model)
    assert len(trained) == 2
    assert all(gradient.any() for gradient in trained.values())


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("name", NAMES)
def test_parametrisations_take_effect_and_are_trained(name, leaf):
    stock, model = pair(name)
    before = model(**inputs_of(name, "right")).logits.detach()
    for one in (model, stock):
        parametrize.register_parametrization(
            layer_of(one, name).get_submodule(path_of(name, leaf)), "weight", Doubled()
        )
    after = assert_same(model, stock, inputs_of(name, "right"), rows=mask_of("right")).logits
    # Doubled keys and queries shift a softmax; anything else moves the logits as well.
    assert (after - before).abs().max() > 1e-6
    assert any("parametrizations" in key for key in gradients(model))


@pytest.mark.parametrize("leaf", ["query", "ffn_in"])
def test_weight_norm_both_ways(leaf):
    for norm in (parametrizations.weight_norm, nn.utils.weight_norm):
        stock, model = pair("BertForMaskedLM")
        for one in (model, stock):
            norm(layer_of(one, "BertForMaskedLM").get_submodule(path_of("BertForMaskedLM", leaf)))
        assert_same(model, stock, inputs_of("BertForMaskedLM", "right"), rows=mask_of("right"))


@pytest.mark.parametrize("where", ["word_embeddings", "token_type_embeddings", "position_embeddings", "LayerNorm"])
def test_parametrised_embeddings(where):
    stock, model = pair("BertModel")
    for one in (model, stock):
        parametrize.register_parametrization(getattr(one.embeddings, where), "weight", Doubled())
    assert_same(model, stock, inputs_of("BertModel", "right"), rows=mask_of("right"))
    assert_same(model, stock, inputs_of("BertModel", types=False))


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_forward_put_on_the_instance_is_called(leaf):
    stock, model = pair("BertForMaskedLM")
    for one in (model, stock):
        module = layer_of(one, "BertForMaskedLM").get_submodule(path_of("BertForMaskedLM", leaf))
        module.forward = lambda *args, forward=module.forward: forward(*args) * 1.5
    assert_same(model, stock, inputs_of("BertForMaskedLM", "right"), rows=mask_of("right"))


@pytest.mark.parametrize("leaf", LINEARS)
def test_linear_layers_without_bias(leaf):
    stock, model = pair("BertForMaskedLM")
    for one in (model, stock):
        layer_of(one, "BertForMaskedLM").get_submodule(path_of("BertForMaskedLM", leaf)).bias = None
    assert_same(model, stock, inputs_of("BertForMaskedLM", "right"), rows=mask_of("right"))


def test_a_sparse_or_renormalised_table_runs_as_its_module_says():
    stock, model = pair("BertModel")
    for one in (model, stock):
        one.embeddings.word_embeddings.scale_grad_by_freq = True
    ids = torch.tensor([[5, 5, 5, 9, 9, 2, 3]] * 3)
    assert_same(model, stock, {"input_ids": ids})
    for one in (model, stock):
        one.embeddings.word_embeddings.max_norm = 0.5
    with torch.no_grad():
        assert_close(model(ids).last_hidden_state, stock(ids).last_hidden_state, "max_norm")
    assert torch.equal(model.embeddings.word_embeddings.weight, stock.embeddings.word_embeddings.weight)
    for one in (model, stock):
        one.zero_grad()
        one.embeddings.word_embeddings.max_norm = None
        one.embeddings.word_embeddings.scale_grad_by_freq = False
        one.embeddings.word_embeddings.sparse = True
        one(ids).last_hidden_state.square().sum().backward()
    mine, theirs = (one.embeddings.word_embeddings.weight for one in (model, stock))
    assert mine.grad.is_sparse
    assert_close(mine.grad.to_dense(), theirs.grad.to_dense(), "sparse gradient")


class Wrapped(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs) * 2


def test_layers_can_be_wrapped_removed_and_shared():
    _, model = pair("BertModel")
    inputs = inputs_of("BertModel", "right")
    whole = model(**inputs).last_hidden_state
    model.encoder.layer[1] = Wrapped(model.encoder.layer[1])
    assert_close(model(**inputs).last_hidden_state, whole * 2, "wrapped layer")
    stock, model = pair("BertModel")
    for one in (model, stock):
        one.encoder.layer = one.encoder.layer[:1]
    assert_same(model, stock, inputs, rows=mask_of("right"))
    for one in (model, stock):
        one.encoder.layer.append(one.encoder.layer[0])
    assert_same(model, stock, inputs, rows=mask_of("right"))
    assert_same_gradients(model, stock)
