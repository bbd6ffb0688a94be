"""torch.compile, torch.export, tracing, autocast and inference mode of swapped models of transformers."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import bertfast
from bertfast.swap.hf_embeddings import FusedEmbeddings
from bertfast.swap.hf_layers import FusedLayer
from helpers.models import assert_close, assert_same_gradients, inputs_of, labels_of, mask_of
from helpers.swap import stock_and_swapped
from helpers.tolerance import assert_error_within, eps_of, stock_error

BASES = ["BertModel", "RobertaModel", "DistilBertModel"]
HEADS = ["BertForMaskedLM", "RobertaForSequenceClassification", "DistilBertForQuestionAnswering"]


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def shallow(name, **fields):
    """With one layer: compiling takes its time by the layer."""
    return stock_and_swapped(name, num_hidden_layers=1, **fields)


def batch(rows, length):
    """Ids and mask of any size, with rows of different lengths."""
    ids = torch.randint(2, 61, (rows, length), generator=torch.Generator().manual_seed(length))
    lengths = torch.arange(rows) % (length - 1) + 1
    lengths[0] = length
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths[:, None]).long()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", BASES)
def test_compiled_models_give_what_eager_ones_give(name, attention):
    """Padded rows included: zero, or stock's where eager mode keeps padding for a pooled first token."""
    stock, swapped = shallow(name, attention=attention)
    compiled = torch.compile(swapped, fullgraph=True, backend="aot_eager")
    for kind in ("right", "left", "holes", "full"):
        inputs = inputs_of(name, kind)
        got, wanted = compiled(**inputs), swapped(**inputs)
        assert list(got) == list(wanted)
        for key in wanted:
            assert_close(got[key], wanted[key], f"{kind} {key}")
        if kind == "right":
            assert not got.last_hidden_state[mask_of(kind) == 0].any()
    cotangents = [torch.randn_like(tensor) for tensor in wanted.values()]
    for model, output in ((swapped, got), (stock, stock(**inputs))):
        model.zero_grad()
        torch.autograd.backward(list(output.values()), cotangents)
    assert_same_gradients(swapped, stock)


@pytest.mark.parametrize("name", HEADS)
def test_compiled_heads_with_labels(name):
    stock, swapped = shallow(name)
    compiled = torch.compile(swapped, fullgraph=True, backend="aot_eager")
    for kind in ("right", "left"):
        inputs = {**inputs_of(name, kind), **labels_of(name, kind)}
        if name == "BertForMaskedLM":
            inputs["labels"][2, 6] = 3
        losses = []
        for model, call in ((swapped, compiled), (stock, stock)):
            model.zero_grad()
            losses.append(call(**inputs).loss)
            losses[-1].backward()
        assert_close(*losses, "loss")
        assert_same_gradients(swapped, stock)


def graphs(model, sizes) -> list[int]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    counts = []
    with torch.no_grad():
        for rows, length in sizes:
            compiled(**batch(rows, length))
            counts.append(counter.frame_count)
    return counts


@pytest.mark.parametrize(
    "name",
    [
        "BertModel",
        pytest.param("XLMRobertaForTokenClassification", marks=pytest.mark.slow),
        pytest.param("DistilBertForSequenceClassification", marks=pytest.mark.slow),
    ],
)
def test_no_more_graphs_than_stock(name):
    sizes = [(2, 4), (2, 5), (3, 7), (4, 64), (5, 128), (3, 511), (1, 512)]
    stock, swapped = shallow(name, max_position_embeddings=514)
    ours, theirs = graphs(swapped, sizes), graphs(stock, sizes)
    assert all(mine <= other for mine, other in zip(ours, theirs, strict=True)), (ours, theirs)


def test_a_backend_holds_when_compiled():
    _, swapped = shallow("BertModel")
    bertfast.accelerate(swapped, backend="torch")
    inputs = inputs_of("BertModel", "right")
    compiled = torch.compile(swapped, fullgraph=True, backend="aot_eager")
    assert_close(compiled(**inputs)[0], swapped(**inputs)[0], "last_hidden_state")


@pytest.mark.slow
def test_inductor():
    _, swapped = shallow("BertForMaskedLM")
    compiled = torch.compile(swapped, fullgraph=True, dynamic=True)
    for rows, length in ((3, 7), (2, 12)):
        inputs = batch(rows, length)
        with torch.no_grad():
            assert_close(compiled(**inputs)[0], swapped(**inputs)[0], "logits")


def test_captured_outputs_compile():
    stock, swapped = shallow("BertModel", attention="eager")
    inputs = inputs_of("BertModel", "right")
    asked = {"output_hidden_states": True, "output_attentions": True}
    wanted, rows = stock(**inputs, **asked), swapped(**inputs).last_hidden_state
    compiled = torch.compile(swapped, fullgraph=True, backend="aot_eager")
    swapped(**inputs, **asked)
    got = compiled(**inputs, **asked)
    for key in ("hidden_states", "attentions"):
        assert len(got[key]) == len(wanted[key])
        for one, other in zip(got[key], wanted[key], strict=True):
            assert_close(one, other, key)
    assert_close(compiled(**inputs).last_hidden_state, rows, "last_hidden_state")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["BertModel", "RobertaForSequenceClassification", "DistilBertForMaskedLM"])
def test_export_with_dynamic_batch_and_length(name, strict, monkeypatch):
    _, swapped = shallow(name)
    for part in (FusedLayer, FusedEmbeddings):
        monkeypatch.setattr(part, "stock_forward", None)
    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=20)}
    given = batch(3, 7)
    with torch.no_grad():
        program = torch.export.export(
            swapped, (), given, dynamic_shapes=dict.fromkeys(given, sizes), strict=strict
        ).module()
        for rows, length in ((3, 7), (5, 12), (2, 20)):
            inputs = batch(rows, length)
            got, wanted = program(**inputs), swapped(**inputs)
            for one, other in zip(got.values(), wanted.values(), strict=True):
                assert_close(one, other, f"{rows} x {length}")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traces():
    _, swapped = shallow("BertModel")
    swapped.config.return_dict = False
    given, other = batch(3, 7), batch(3, 7)
    other["attention_mask"] = other["attention_mask"].flip(0)
    with torch.no_grad():
        traced = torch.jit.trace(swapped, tuple(given.values()), check_trace=False)
        for inputs in (given, other):
            assert_close(traced(*inputs.values())[0], swapped(**inputs)[0], "last_hidden_state")


@pytest.mark.parametrize("name", [*BASES, *HEADS])
def test_fake_tensors(name):
    stock, swapped = shallow(name)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = {key: mode.from_tensor(tensor) for key, tensor in inputs_of(name, "right").items()}
        assert [t.shape for t in swapped(**inputs).values()] == [t.shape for t in stock(**inputs).values()]


@pytest.mark.parametrize("name", BASES)
def test_traces_of_make_fx(name):
    _, swapped = shallow(name)
    given, other = batch(3, 7), batch(3, 7)
    other["attention_mask"] = other["attention_mask"].flip(0)
    with torch.no_grad():
        traced = make_fx(lambda ids, mask: swapped(ids, mask)[0], tracing_mode="fake", _allow_non_fake_inputs=True)(
            *given.values()
        )
        for inputs in (given, other):
            assert_close(traced(*inputs.values()), swapped(**inputs)[0], "last_hidden_state")


@pytest.mark.parametrize("name", ["BertForPreTraining", "RobertaForMaskedLM", "DistilBertModel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(name, dtype):
    stock, swapped = stock_and_swapped(name, dtype=torch.float32)
    exact, _ = stock_and_swapped(name)
    inputs, mask = inputs_of(name, "right"), mask_of("right").bool()
    with torch.autocast("cpu", dtype):
        got, wanted = swapped(**inputs), stock(**inputs)
    truth = exact(**inputs)
    assert list(got) == list(wanted)
    for key in wanted:
        assert got[key].dtype == wanted[key].dtype, key
        mine, theirs, true = (t[key][mask] if t[key].shape[:2] == mask.shape else t[key] for t in (got, wanted, truth))
        noise = eps_of(dtype) * true.abs().max().item()
        assert_error_within(mine, true, stock_error([theirs], true, key), noise, key)
        (got[key].float().square().mean() + 0 * mine.float().sum()).backward(retain_graph=True)
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in swapped.parameters())


@pytest.mark.parametrize("name", ["BertForMaskedLM", "DistilBertForSequenceClassification"])
def test_inference_mode(name):
    _, swapped = stock_and_swapped(name, dtype=torch.float32)
    inputs = inputs_of(name, "right")
    with torch.inference_mode():
        got = swapped(**inputs)[0]
    wanted = swapped(**inputs)[0]
    assert got.is_inference() and not wanted.is_inference()
    torch.testing.assert_close(got, wanted)
    wanted.square().sum().backward()
