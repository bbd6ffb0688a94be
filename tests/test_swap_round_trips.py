"""Swapped models copied, saved, sent to other processes, edited and restored."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import bertfast
from helpers.models import assert_close, inputs_of
from helpers.project import run_python
from helpers.swap import PATH, assert_bit_equal, run, stock_and_swapped, traces_of_swap, types_of


def copies_of(model: nn.Module) -> dict[str, nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "copy of a copy": copy.deepcopy(copy.deepcopy(model)),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
    }


@pytest.mark.parametrize("name", ["BertForMaskedLM", "XLMRobertaForMaskedLM", "DistilBertForSequenceClassification"])
def test_copies_are_swapped_and_can_be_restored(name, packed_runs):
    stock, model = stock_and_swapped(name)
    wanted = run(model)
    for what, copied in copies_of(model).items():
        packed_runs.since()
        assert types_of(copied) == types_of(model), what
        assert_bit_equal(run(copied), wanted)
        assert packed_runs.since() == 1, what
        assert bertfast.restore(copied), what
        assert not traces_of_swap(copied), what
        assert types_of(copied) == types_of(stock), what
        assert_bit_equal(run(copied), run(stock))
    assert_bit_equal(run(model), wanted)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "DistilBertForSequenceClassification"])
def test_copies_of_models_that_captured_outputs(name):
    _, model = stock_and_swapped(name)
    model(**inputs_of(name, "right"), output_hidden_states=True)
    wanted = run(model)
    copied = copy.deepcopy(model)
    assert_bit_equal(run(copied), wanted)
    hidden = [m(**inputs_of(name, "right"), output_hidden_states=True).hidden_states for m in (model, copied)]
    assert_bit_equal(*map(list, hidden))


def test_restore_after_captured_outputs():
    stock, model = stock_and_swapped("BertModel", attention="eager")
    asked = {"output_hidden_states": True, "output_attentions": True}
    model(**inputs_of("BertModel", "right"), **asked)
    bertfast.restore(model)
    assert not traces_of_swap(model) and types_of(model) == types_of(stock)
    assert_bit_equal(run(model), run(stock))
    again = stock(**inputs_of("BertModel"), **asked)
    bertfast.accelerate(stock, strict=True)
    swapped = stock(**inputs_of("BertModel"), **asked)
    assert len(swapped.hidden_states) == len(again.hidden_states) == 3
    assert len(swapped.attentions) == len(again.attentions) == 2


LOAD = """
import sys, torch, transformers
torch.manual_seed(0)
model = getattr(transformers, {name!r}).from_pretrained({folder!r}, dtype=torch.float64).eval()
assert "bertfast" not in sys.modules
torch.save((model.config.architectures, dict(model(**torch.load({inputs!r})))), {output!r})
"""


@pytest.mark.parametrize("name", ["BertForMaskedLM", "DistilBertForSequenceClassification"])
def test_save_pretrained_loads_without_bertfast(name, tmp_path):
    stock, model = stock_and_swapped(name)
    stock.save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "swapped")
    for file in (tmp_path / "stock").iterdir():
        assert (tmp_path / "swapped" / file.name).read_bytes() == file.read_bytes()
    torch.save(inputs_of(name, "right"), tmp_path / "inputs.pt")
    paths = {key: str(tmp_path / file) for key, file in (("folder", "swapped"), ("inputs", "inputs.pt"))}
    run_python("-c", LOAD.format(name=name, output=str(tmp_path / "out.pt"), **paths), cwd=tmp_path, path=PATH)
    architectures, output = torch.load(tmp_path / "out.pt", weights_only=False)
    assert architectures == [name]
    for got, wanted in zip(output.values(), run(stock), strict=True):
        assert_close(got, wanted, name)


UNPICKLE = """
import pickle, sys, torch
assert "bertfast" not in sys.modules and "transformers" not in sys.modules
model, inputs = pickle.load(open({file!r}, "rb"))
import bertfast
hidden = model(**inputs).last_hidden_state
assert not hidden[inputs["attention_mask"] == 0].any()
assert bertfast.restore(model)
assert not any(type(module).__module__.startswith("bertfast") for module in model.modules())
"""


@pytest.mark.parametrize("name", ["RobertaModel", "DistilBertModel"])
def test_another_process_unpickles(name, tmp_path):
    _, model = stock_and_swapped(name)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps((model, inputs_of(name, "right"))))
    run_python("-c", UNPICKLE.format(file=str(tmp_path / "model.pkl")), cwd=tmp_path, path=PATH)


def _hidden(model, inputs, results):
    with torch.no_grad():
        results.put(model(**inputs).last_hidden_state.numpy())


@pytest.mark.slow
def test_spawned_processes():
    _, model = stock_and_swapped("BertModel")
    inputs = inputs_of("BertModel", "right")
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_hidden, args=(model, inputs, results))
    process.start()
    found = torch.from_numpy(results.get(timeout=120))
    process.join()
    with torch.no_grad():
        assert torch.equal(found, model(**inputs).last_hidden_state)


def test_restore_after_edits():
    stock, model = stock_and_swapped("BertForMaskedLM")
    model.bert.encoder.layer[0].output.dense = nn.Linear(40, 24).double()
    model.bert.encoder.layer[1] = copy.deepcopy(stock.bert.encoder.layer[0])
    model.bert.pooler = nn.Identity()
    model.bert.encoder.note = "mine"
    calls = []
    model.bert.register_forward_pre_hook(lambda module, args: calls.append(1))
    report = bertfast.restore(model)
    assert "bert.encoder.layer.0" in report.swapped and "bert.encoder.layer.1" not in report.swapped
    assert not traces_of_swap(model) and model.bert.encoder.note == "mine"
    model.bert.pooler = None
    run(model)
    assert calls == [1]


def test_restore_leaves_what_is_no_longer_ours():
    _, model = stock_and_swapped("BertModel")
    layer = model.encoder.layer[0]
    layer.__class__ = type("FSDPBertLayer", (type(layer),), {})
    model.encoder.layer[1].forward = model.encoder.layer[1].stock_forward
    report = bertfast.restore(model)
    assert "class was changed" in report.left["encoder.layer.0"][1]
    assert "forward was changed" in report.left["encoder.layer.1"][1]
    layer.__class__ = type(layer).__mro__[1]
    del model.encoder.layer[1].forward
    assert set(bertfast.restore(model).swapped) == {"encoder.layer.0", "encoder.layer.1"}
    assert not traces_of_swap(model)
