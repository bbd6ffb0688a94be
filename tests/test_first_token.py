"""Heads that read first tokens alone: the last layer computes no other, with the same result."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import bertfast
from bertfast import use_backend
from bertfast.encode import Encoder, Pooling
from bertfast.nn import BertEncoderLayer
from bertfast.nn.attention import self_attention
from bertfast.nn.layer_norm import FusedAddLayerNorm
from helpers.command_line import minilm
from helpers.models import PADDING, assert_close, assert_same, assert_same_gradients, inputs_of, labels_of, pair

BASES = ["BertModel", "RobertaModel", "DistilBertModel"]
HEADS = [
    "BertForSequenceClassification",
    "BertForNextSentencePrediction",
    "BertForMultipleChoice",
    "RobertaForSequenceClassification",
    "RobertaForMultipleChoice",
    "DistilBertForSequenceClassification",
    "DistilBertForMultipleChoice",
]
ROWS = 7  # of each sequence in `inputs_of`


@pytest.fixture
def outputs(monkeypatch):
    """Rows that each LayerNorm of a layer gives, found without a hook, since a hook decides how layers run."""
    rows = []
    forward = FusedAddLayerNorm.forward

    def spied(self, x, residual=None):
        rows.append(x.shape[:-1].numel())
        return forward(self, x, residual)

    monkeypatch.setattr(FusedAddLayerNorm, "forward", spied)
    return rows


@pytest.mark.parametrize("mask", [None, *PADDING, "pairs"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_equal_stock_in_value_and_gradient(name, mask, outputs):
    model, stock = reversed(pair(name, num_labels=3 if "ForSequence" in name else 2))
    inputs = inputs_of(name, None if mask == "pairs" else mask)
    if mask == "pairs" and "MultipleChoice" not in name:
        inputs["attention_mask"] = torch.randn(3, 1, 7, 7, dtype=torch.float64)
    inputs |= labels_of(name, None if mask == "pairs" else mask)
    assert_same(model, stock, inputs)
    sequences = inputs["input_ids"].shape[:-1].numel()
    assert outputs[-2:] == [sequences] * 2
    assert mask in ("right", "all empty") or all(rows > sequences for rows in outputs[:-2])


@pytest.mark.parametrize("mask", [None, *PADDING])
@pytest.mark.parametrize("name", BASES)
def test_a_base_model_gives_the_first_token_alone(name, mask):
    _, model = pair(name)
    inputs = inputs_of(name, mask)
    first = model(**inputs, first_token_only=True)
    model.unpad = False
    both = model(**inputs)
    assert first.last_hidden_state.shape == (3, 1, 24)
    assert_close(first.last_hidden_state, both.last_hidden_state[:, :1], "last_hidden_state")
    if both.pooler_output is not None:
        assert_close(first.pooler_output, both.pooler_output, "pooler_output")


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("mask", [None, "right", "empty row"])
def test_on_every_backend_of_the_cpu(backend, mask):
    _, model = pair("BertModel", dtype=torch.float32)
    inputs = inputs_of("BertModel", mask)
    with use_backend(backend, "torch"), torch.no_grad():
        expected, got = model(**inputs).pooler_output, model(**inputs, first_token_only=True).pooler_output
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


class LinearFlops(TorchDispatchMode):
    """Counts without the hooks on all modules of `FlopCounterMode`, for which every row is computed."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def flops_of(function) -> int:
    with LinearFlops() as counter, use_backend("torch"), torch.no_grad():
        function()
    return counter.total


def test_flops_of_the_last_layer():
    """Of a layer's 12 N^2 products a token (F = 4 N) in linear layers, keys and values are 2 N^2."""
    width, length = 64, 16
    config = bertfast.BertConfig(vocab_size=99, hidden_size=width, num_attention_heads=4, intermediate_size=4 * width)
    model = bertfast.BertModel(config.replaced(num_hidden_layers=2), add_pooling_layer=False).eval()
    ids = torch.randint(99, (3, length))
    whole = flops_of(lambda: model(ids))
    layer = whole // 2
    last = 2 * 3 * (2 * length * width**2 + 10 * width**2)
    assert flops_of(lambda: model(ids, first_token_only=True)) == layer + last
    assert layer == 2 * 3 * length * 12 * width**2


def hooked(model):
    model.bert.encoder.layer[-1].output.LayerNorm.register_forward_hook(lambda *_: None)


def pooled_by_the_user(model):
    class Mean(torch.nn.Module):
        def forward(self, hidden_states):
            return hidden_states.mean(1)

    model.bert.pooler = Mean()


def of_the_user(model):
    class Own(type(model)):
        def sequence_logits(self, outputs):
            return self.classifier(outputs.last_hidden_state.mean(1))

    model.__class__ = Own


@pytest.mark.parametrize("change", [hooked, pooled_by_the_user, of_the_user])
def test_all_rows_for_those_who_look_at_them(change, outputs):
    _, model = pair("BertForSequenceClassification")
    change(model)
    model(**inputs_of("BertForSequenceClassification"))
    assert outputs[-1] == 3 * ROWS


def test_all_rows_for_a_head_of_roberta_that_the_user_made(outputs):
    _, model = pair("RobertaForSequenceClassification")
    model.classifier = torch.nn.Identity()
    out = model(**inputs_of("RobertaForSequenceClassification"))
    assert out.logits.shape == (3, ROWS, 24) and outputs[-1] == 3 * ROWS


@pytest.mark.parametrize("shown", ["output_hidden_states", "output_attentions"])
def test_all_rows_where_they_are_shown(shown):
    stock, model = pair("BertForSequenceClassification", attention="eager")
    inputs = inputs_of("BertForSequenceClassification", "right")
    got = model(**inputs, **{shown: True})
    assert got[shown.removeprefix("output_")][-1].shape[-2] == ROWS
    assert_close(got.logits, stock(**inputs).logits, "logits")
    base = model.bert(**inputs, first_token_only=True, **{shown: True})
    assert base.last_hidden_state.shape == (3, 1, 24)


@pytest.mark.parametrize("mask", [None, "right"])
def test_gradient_checkpointing(mask):
    stock, model = pair("BertForSequenceClassification")
    other = copy.deepcopy(model).train()
    other.gradient_checkpointing_enable()
    inputs = {**inputs_of("BertForSequenceClassification", mask), **labels_of("BertForSequenceClassification", mask)}
    for one in (stock, other):
        one(**inputs).loss.backward()
    assert_same_gradients(other, stock)


@pytest.mark.parametrize("mask", [None, "right"])
def test_compiled(mask):
    _, model = pair("BertForSequenceClassification", dtype=torch.float32)
    inputs = inputs_of("BertForSequenceClassification", mask)
    with torch.no_grad():
        expected = model(**inputs).logits
        got = torch.compile(model, fullgraph=True, backend="eager")(**inputs).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_attention_of_first_tokens_with_a_mask_of_rows():
    layer = BertEncoderLayer(32, 4, 64).eval().double()
    x, mask = torch.randn(2, 5, 32, dtype=torch.float64), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    projections = layer.leaves()[:3]
    expected, weights = self_attention(x, *projections, 8, attn_mask=mask, need_weights=True)
    got, first = self_attention(x, *projections, 8, attn_mask=mask, need_weights=True, first_tokens=x[:, :1])
    assert_close(got, expected[:, :1], "context")
    assert_close(first, weights[:, :, :1], "weights")


def test_an_encoder_that_takes_first_tokens(outputs):
    texts = ["A cat sleeps.", "", "Where is the nearest train station?"]
    encoder = Encoder.from_pretrained(minilm(), pooling="cls")
    vectors = encoder.encode(texts)
    assert outputs[-1] == len(texts)
    encoder.pooling = Pooling(("cls", "cls"), encoder.pooling.normalize)
    both = encoder.encode(texts)[:, : vectors.shape[1]]
    assert outputs[-1] > len(texts)
    if encoder.pooling.normalize:
        both = both * 2**0.5
    torch.testing.assert_close(torch.tensor(vectors), torch.tensor(both), rtol=1e-4, atol=1e-5)
