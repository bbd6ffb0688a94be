"""`accelerate` and `restore`: reports, options, what they touch and what they leave."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import transformers
from torch import nn

import bertfast
from bertfast.swap import hf_layers, plain_ops
from helpers.checkpoints import tiny_stock
from helpers.models import NO_DROPOUT, assert_close, assert_same, inputs_of, labels_of, mask_of
from helpers.project import run_python
from helpers.swap import (
    PATH,
    STOCK_HEADS,
    assert_bit_equal,
    run,
    stock_and_swapped,
    traces_of_swap,
    types_of,
)


def test_the_report_names_every_module():
    model = tiny_stock("BertForMaskedLM")
    report = bertfast.accelerate(model)
    assert report and not report.left and not report.notes
    assert report.swapped["bert.encoder.layer.1"] == ("BertLayer", "fused layer")
    assert set(report.swapped) == {
        "",
        "bert",
        "bert.embeddings",
        "bert.encoder",
        "bert.encoder.layer.0",
        "bert.encoder.layer.1",
        "cls.predictions.transform",
    }
    text = str(report)
    assert text.startswith("BertForMaskedLM: 7 modules swapped\n")
    assert "bert.encoder.layer.*" in text and "(2 layers)" in text and "bert.encoder.layer.1" not in text
    restored = bertfast.restore(model)
    assert restored and restored.swapped.keys() == report.swapped.keys() and not restored.left
    assert "7 modules restored" in str(restored)
    assert not bertfast.restore(model) and "no modules restored" in str(bertfast.restore(model))


def test_what_is_not_known_is_reported():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    report = bertfast.accelerate(model)
    assert not report and report.left[""] == ("Sequential", "there is no module of a supported class in it")
    assert "no modules swapped, 1 left" in str(report)
    with pytest.raises(bertfast.SwapError, match="no module of a supported class"):
        bertfast.accelerate(model, strict=True)
    assert issubclass(bertfast.SwapError, ValueError)


def test_another_model_of_transformers_is_reported():
    config = transformers.ElectraConfig(
        vocab_size=30, embedding_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    report = bertfast.accelerate(transformers.ElectraModel(config))
    assert not report and report.left[""][0] == "ElectraModel" and "supported models: Bert, Rob" in report.left[""][1]


def test_strict_leaves_the_model_as_it_was():
    model = tiny_stock("BertForMaskedLM")
    model.bert.encoder.layer[1].chunk_size_feed_forward = 2
    before = types_of(model)
    with pytest.raises(bertfast.SwapError, match=r"nothing was changed[^$]*no modules swapped, 2 left") as caught:
        bertfast.accelerate(model, strict=True)
    assert re.search(r"layer\.\*.*chunk_size", str(caught.value)) and "fused" not in str(caught.value)
    assert types_of(model) == before and not traces_of_swap(model)
    report = bertfast.accelerate(model)
    assert report and set(report.left) == {"bert.encoder", "bert.encoder.layer.1"}


@pytest.mark.parametrize("bad", [None, "model", 3])
def test_what_is_no_module_raises(bad):
    for function in (bertfast.accelerate, bertfast.restore):
        with pytest.raises(TypeError, match=f"must be a torch.nn.Module, got {type(bad).__name__}"):
            function(bad)


def test_an_unknown_backend_raises_at_once():
    model = tiny_stock("BertModel")
    with pytest.raises(ValueError, match="backend must be 'auto' or any of .*; got cdua"):
        bertfast.accelerate(model, backend="cdua")
    assert not traces_of_swap(model)


def test_a_backend_serves_every_op_of_the_swapped_modules(monkeypatch):
    model = tiny_stock("BertForMaskedLM", **NO_DROPOUT["bert"])
    bertfast.accelerate(model, backend="torch")
    seen = []
    select = bertfast.backends._select

    def spy(call, named, *rest):
        seen.append((call.op, named))
        return select(call, named, *rest)

    monkeypatch.setattr(bertfast.backends, "_choices", {})
    monkeypatch.setattr(bertfast.backends, "_select", spy)
    run(model)
    assert {op for op, _ in seen} >= {"embed_layer_norm", "add_layer_norm", "linear_gelu", "varlen_attention"}
    assert {named for _, named in seen} == {("torch",)}
    assert bertfast.backends._pinned.order is None


def test_an_explicit_backend_that_cannot_serve_raises():
    model = tiny_stock("BertModel")
    bertfast.accelerate(model, backend="cuda")
    with pytest.raises(bertfast.BackendError):
        run(model)


def test_twice_is_once_and_the_last_options_hold(packed_runs):
    stock, model = stock_and_swapped("BertForMaskedLM")
    types, hooks = types_of(model), len(model.bert._forward_pre_hooks)
    report = bertfast.accelerate(model, unpad=False)
    assert report.swapped["bert"] == ("BertModel", "swapped already") and "7 modules were swapped already" in str(
        report
    )
    assert types_of(model) == types and len(model.bert._forward_pre_hooks) == hooks == 1
    assert_same(model, stock, inputs_of("BertForMaskedLM", "right"))
    assert packed_runs.since() == 0
    bertfast.accelerate(model)
    run(model)
    assert packed_runs.since() == 1


@pytest.mark.parametrize("name", STOCK_HEADS)
def test_nothing_but_forwards_changes(name):
    stock = tiny_stock(name).train()
    model = copy.deepcopy(stock)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    modules, types = dict(model.named_modules()), types_of(model)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    bertfast.accelerate(model)
    assert type(model) is types[""]
    for name_, tensor in model.named_parameters():
        assert tensor is parameters[name_]
    assert all(tensor is buffers[name_] for name_, tensor in model.named_buffers())
    assert all(module is modules[name_] for name_, module in model.named_modules())
    assert [t.__name__ for t in types_of(model).values()] == [t.__name__ for t in types.values()]
    assert all(issubclass(got, types[name_]) for name_, got in types_of(model).items())
    assert all(module.training for module in model.modules())
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert str(model) == str(stock)
    before = run(stock.eval())
    bertfast.restore(model)
    assert types_of(model) == types and not traces_of_swap(model)
    assert_bit_equal(run(model.eval()), before)


def test_other_instances_keep_their_class():
    one, other = tiny_stock("BertModel"), tiny_stock("BertModel")
    kinds = types_of(other)
    bertfast.accelerate(one)
    assert types_of(other) == kinds and not traces_of_swap(other)
    assert all(type(module).__module__.startswith(("transformers", "torch")) for module in other.modules())


def test_a_part_can_be_swapped_and_restored():
    model = tiny_stock("BertForSequenceClassification")
    bertfast.accelerate(model.bert.encoder.layer[0])
    assert traces_of_swap(model) == [
        "bert.encoder.layer.0._bertfast_options",
        "bert.encoder.layer.0",
    ]
    bertfast.accelerate(model)
    report = bertfast.restore(model.bert)
    assert set(report.swapped) == {"", "embeddings", "encoder", "encoder.layer.0", "encoder.layer.1"}
    assert not traces_of_swap(model)


def test_a_base_model_swapped_again_gives_its_head_what_it_uses():
    stock, model = stock_and_swapped("BertForQuestionAnswering")
    bertfast.restore(model.bert)
    bertfast.accelerate(model)
    inputs = {**inputs_of("BertModel", "right"), **labels_of("BertForQuestionAnswering")}
    assert_close(model.forward(**inputs).loss, stock.forward(**inputs).loss, "loss past the hooks")


def test_modules_of_ones_own_around_it():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = self.right = tiny_stock("BertModel", **NO_DROPOUT["bert"]).double()

        def forward(self, **inputs):
            return self.left(**inputs)[0] + self.right(**inputs)[0]

    stock = Mine()
    model = copy.deepcopy(stock)
    assert len(bertfast.accelerate(model, strict=True).swapped) == 5
    assert len(model.left._forward_pre_hooks) == 1
    inputs, mask = inputs_of("BertModel", "right"), mask_of("right").bool()
    torch.testing.assert_close(model(**inputs)[mask], stock(**inputs)[mask], rtol=1e-9, atol=1e-9)


def test_one_layer_used_twice_is_swapped_once():
    stock = tiny_stock("BertModel", **NO_DROPOUT["bert"]).double()
    stock.encoder.layer[1] = stock.encoder.layer[0]
    model = copy.deepcopy(stock)
    report = bertfast.accelerate(model, strict=True)
    assert len(report.swapped) == 4
    assert_same(model, stock, inputs_of("BertModel", "right"), rows=mask_of("right"))
    bertfast.restore(model)
    assert not traces_of_swap(model)


def test_providers_are_not_loaded_for_packages_that_are_not(tmp_path):
    code = "import sys, torch, bertfast; bertfast.accelerate(torch.nn.Linear(2, 2)); "
    code += "assert not {'transformers', 'bertfast.swap.huggingface'} & set(sys.modules)"
    run_python("-c", code, cwd=tmp_path, path=PATH)


@pytest.mark.parametrize(
    ("small", "backends", "plain"),
    [(2**17, ("auto",), True), (4, ("auto",), False), (2**17, ("cpu", "torch"), False)],
)
def test_small_batches_skip_the_dispatcher_unless_a_backend_is_named(monkeypatch, small, backends, plain):
    calls = []
    function = plain_ops.feed_forward
    monkeypatch.setattr(plain_ops, "feed_forward", lambda *inputs: calls.append(1) or function(*inputs))
    monkeypatch.setattr(hf_layers, "SMALL", small)
    stock, model = stock_and_swapped("BertModel")
    with torch.no_grad(), bertfast.use_backend(*backends):
        out, wanted = (m(**inputs_of("BertModel")).last_hidden_state for m in (model, stock))
    assert_close(out, wanted, "hidden states")
    assert bool(calls) == plain
