"""torch.compile, torch.export and torch.func of models: one graph for all lengths, the results of eager mode."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from helpers.models import assert_close, assert_same_gradients, gradients, inputs_of, labels_of, mask_of, pair

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BASES = ["BertModel", "RobertaModel", "DistilBertModel"]
HEADS = ["BertForMaskedLM", "RobertaForSequenceClassification", "DistilBertForQuestionAnswering"]


def shallow(name, **fields):
    """Ours with one layer: compiling takes its time by the layer."""
    return pair(name, num_hidden_layers=1, **fields)[1]


def batch(name, rows, length, kind="right", seed=0):
    """Inputs of any size, with rows of different lengths padded on the `kind` side."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 61, (rows, length), generator=generator)
    lengths = torch.arange(rows) % (length - 1) + 1
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask if kind == "right" else mask.flip(1)}


@pytest.mark.parametrize("name", BASES)
def test_compiled_base_models_give_what_eager_gives(name):
    """Padded rows included: zero, or stock's where eager mode keeps padding for a pooled first token."""
    model, other = shallow(name), shallow(name)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(1)
    for kind in ("right", "left", "holes", "empty row", "full"):
        inputs = inputs_of(name, kind)
        got, wanted = compiled(**inputs), model(**inputs)
        assert list(got) == list(wanted)
        for key in wanted:
            assert_close(got[key], wanted[key], f"{kind} {key}")
        if kind == "right":
            assert not got.last_hidden_state[mask_of(kind) == 0].any()
        cotangents = [torch.randn(t.shape, dtype=torch.float64, generator=generator) for t in wanted.values()]
        for one, output in ((other, got), (model, wanted)):
            one.zero_grad()
            torch.autograd.backward(list(output.values()), cotangents)
        assert_same_gradients(other, model)
        assert any(gradient.any() for gradient in gradients(other).values())


@pytest.mark.parametrize("name", HEADS)
def test_compiled_heads_with_labels(name):
    model, other = shallow(name), shallow(name)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for kind in ("right", "left"):
        inputs = {**inputs_of(name, kind), **labels_of(name, kind)}
        got, wanted = compiled(**inputs), model(**inputs)
        for key in wanted:
            assert_close(got[key], wanted[key], key)
        got.loss.backward(), wanted.loss.backward()
        assert_same_gradients(other, model)


def test_a_label_on_a_masked_token_counts_when_compiled():
    stock, model = pair("BertForMaskedLM", num_hidden_layers=1)
    inputs = {**inputs_of("BertForMaskedLM", "right"), **labels_of("BertForMaskedLM", "right")}
    inputs["labels"][2, 6] = 3
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(**inputs).loss, stock(**inputs).loss, "loss")


def test_lengths_and_batches_do_not_recompile():
    name = "RobertaModel"
    model = shallow(name)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    sizes = [(3, 7), (4, 9), (2, 5), (5, 11), (6, 18), (7, 20), (9, 4)]
    counts = []
    for rows, length in sizes:
        inputs = batch(name, rows, length)
        assert_close(compiled(**inputs).last_hidden_state, model(**inputs).last_hidden_state, f"{rows} x {length}")
        counts.append(counter.frame_count)
    # The first size is taken as it is, the second makes both sizes dynamic.
    assert counts == [1, 2, 2, 2, 2, 2, 2]


def test_one_graph_serves_all_sizes_when_dynamic_is_asked_for():
    model = shallow("BertForSequenceClassification", dtype=torch.float32)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for rows, length in ((3, 7), (4, 9), (2, 5), (5, 20)):
        inputs = batch("BertForSequenceClassification", rows, length, "left")
        labels = torch.arange(rows) % 2
        loss = compiled(**inputs, labels=labels).loss
        torch.testing.assert_close(loss, model(**inputs, labels=labels).loss)
        loss.backward()
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


@pytest.mark.parametrize("form", ["4-D float", "3-D", "embeds"])
def test_other_inputs_compile(form):
    model = shallow("BertModel")
    inputs = inputs_of("BertModel", "holes")
    mask = inputs.pop("attention_mask")
    if form == "4-D float":
        inputs["attention_mask"] = torch.randn(3, 1, 7, 7, dtype=torch.float64)
    elif form == "3-D":
        inputs["attention_mask"] = mask[:, None, :].expand(3, 7, 7)
    elif form == "embeds":
        inputs["attention_mask"] = mask
        inputs["inputs_embeds"] = torch.randn(3, 7, 24, dtype=torch.float64)
        del inputs["input_ids"]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = compiled(**inputs, output_hidden_states=True, output_attentions=True)
    wanted = model(**inputs, output_hidden_states=True, output_attentions=True)
    for mine, theirs in zip(
        (*got.hidden_states, *got.attentions), (*wanted.hidden_states, *wanted.attentions), strict=True
    ):
        assert_close(mine, theirs, form)


def test_tuples_when_compiled():
    model = shallow("DistilBertModel")
    inputs = inputs_of("DistilBertModel", "right")
    as_tuple = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert_close(as_tuple[0], model(**inputs, return_dict=False)[0], "last_hidden_state")


def test_unpad_switched_off_is_stock_when_compiled():
    stock, model = pair("BertModel", num_hidden_layers=1)
    model.unpad = False
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = inputs_of("BertModel", "holes")
    assert_close(compiled(**inputs).last_hidden_state, stock(**inputs).last_hidden_state, "padded rows")


def test_dropout_is_redrawn_and_follows_the_seed_when_compiled():
    rates = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    model = shallow("BertModel", dtype=torch.float32, **rates)
    compiled = torch.compile(model.train(), fullgraph=True, backend="aot_eager")
    inputs = inputs_of("BertModel", "right")
    torch.manual_seed(1)
    first, second = compiled(**inputs).last_hidden_state, compiled(**inputs).last_hidden_state
    torch.manual_seed(1)
    assert torch.equal(compiled(**inputs).last_hidden_state, first)
    assert not torch.equal(first, second)
    second.sum().backward()


def test_inductor():
    name = "BertForSequenceClassification"
    model, other = shallow(name, dtype=torch.float32), shallow(name, dtype=torch.float32)
    compiled = torch.compile(other, fullgraph=True)
    inputs = inputs_of(name, "right")
    got, wanted = compiled(**inputs).logits, model(**inputs).logits
    torch.testing.assert_close(got, wanted)
    got.square().sum().backward(), wanted.square().sum().backward()
    mine, theirs = gradients(other), gradients(model)
    assert mine.keys() == theirs.keys()
    for key in theirs:
        torch.testing.assert_close(mine[key], theirs[key], rtol=1e-4, atol=1e-5, msg=key)


def test_checkpointing_compiles():
    model, other = shallow("DistilBertModel"), shallow("DistilBertModel")
    other.train().gradient_checkpointing_enable()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    inputs = inputs_of("DistilBertModel", "right")
    for run in (model, compiled):
        run(**inputs).last_hidden_state.square().sum().backward()
    assert_same_gradients(other, model)


def dynamic(inputs, length_max=20):
    rows, length = torch.export.Dim("rows", max=64), torch.export.Dim("length", max=length_max)
    return {key: {0: rows, 1: length} for key in inputs}


@pytest.mark.parametrize("name", ["BertModel", "RobertaForSequenceClassification", "DistilBertForQuestionAnswering"])
def test_exported_programs_serve_other_sizes(name):
    model = shallow(name, dtype=torch.float32)
    inputs = batch(name, 3, 7)
    program = torch.export.export(model, (), inputs, dynamic_shapes=dynamic(inputs))
    run = program.module()
    for rows, length, kind in ((3, 7, "right"), (1, 5, "right"), (8, 20, "right"), (4, 9, "left"), (2, 2, "left")):
        inputs = batch(name, rows, length, kind, seed=rows)
        got, wanted = run(**inputs), model(**inputs)
        assert type(got) is type(wanted)
        torch.testing.assert_close(got[0], wanted[0])


def test_exported_programs_can_be_saved_and_run_without_a_mask(tmp_path):
    model = shallow("BertForMaskedLM", dtype=torch.float32)
    inputs = {"input_ids": batch("", 3, 7)["input_ids"]}
    program = torch.export.export(model, (), inputs, dynamic_shapes=dynamic(inputs))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    ids = batch("", 5, 12)["input_ids"]
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(ids).logits)


def test_models_on_the_meta_device_infer_shapes():
    _, model = pair("BertForSequenceClassification")
    model = model.to("meta")
    inputs = {key: value.to("meta") for key, value in inputs_of("BertForSequenceClassification", "right").items()}
    output = model(**inputs, labels=torch.zeros(3, dtype=torch.int64, device="meta"))
    assert output.logits.shape == (3, 2)
    assert output.loss.shape == ()


def test_gradients_of_each_sample_under_vmap():
    """The padded path runs under torch.func; eager takes the packed one."""
    model = shallow("BertForTokenClassification")
    inputs = batch("BertForTokenClassification", 3, 7)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, sample):
        one_row = {name: t.unsqueeze(0) for name, t in sample.items()}
        logits = torch.func.functional_call(model, parameters, kwargs=one_row).logits
        return (logits.square().sum(-1) * one_row["attention_mask"]).sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, inputs)
    for row in range(3):
        model.zero_grad()
        loss(dict(model.named_parameters()), {name: t[row] for name, t in inputs.items()}).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name][row], p.grad, atol=1e-4, rtol=1e-4, msg=name)
