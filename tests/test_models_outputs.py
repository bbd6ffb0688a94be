"""What models return: access by name and position, tuples, pytrees, hidden states and attentions."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

from bertfast.models import outputs as output_types
from bertfast.models.outputs import BaseModelOutputWithPooling, LogitsOutput
from helpers.checkpoints import ALL_HEADS
from helpers.models import assert_same_gradients, inputs_of, labels_of, mask_of, pair

LAYERS, HEADS, WIDTH, LENGTH = 2, 3, 24, 7


def some_output():
    return LogitsOutput(loss=torch.tensor(1.5), logits=torch.arange(6.0).view(2, 3), hidden_states=(torch.ones(2),))


def test_access_by_attribute_key_index_and_slice():
    output = some_output()
    assert output.logits is output["logits"] is output[1] is output[-2]
    assert output[:2] == (output.loss, output.logits)
    assert output.attentions is None
    assert "attentions" not in output
    with pytest.raises(KeyError):
        output["attentions"]
    with pytest.raises(IndexError):
        output[3]
    with pytest.raises(AttributeError):
        output.unknown  # noqa: B018
    assert len(output) == 3
    assert list(output) == list(output.keys()) == ["loss", "logits", "hidden_states"]
    assert output.to_tuple() == tuple(output.values())
    assert {**output}.keys() == output.keys()
    assert isinstance(output, dict)
    assert isinstance(output.hidden_states, tuple)


def test_attribute_and_key_stay_the_same_thing_when_one_is_set():
    output = some_output()
    output.logits = torch.zeros(1)
    assert output["logits"] is output.logits is output[1]
    output["loss"] = torch.ones(1)
    assert output.loss is output["loss"] is output[0]
    output["attentions"] = (torch.ones(1),)
    assert output.attentions is output["attentions"] is output[-1]
    assert len(output) == 4


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda output: pickle.loads(pickle.dumps(output))])
def test_copies(copied):
    output = some_output()
    other = copied(output)
    assert type(other) is LogitsOutput
    assert list(other) == list(output)
    assert torch.equal(other.logits, output.logits)
    assert torch.equal(other["loss"], output.loss)
    assert other.attentions is None
    other.logits = None
    assert output.logits is not None


def test_torch_save_and_load():
    buffer = io.BytesIO()
    torch.save(some_output(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded.logits, some_output().logits)
    assert list(loaded) == ["loss", "logits", "hidden_states"]


def test_pytree_round_trip():
    output = some_output()
    leaves, spec = pytree.tree_flatten(output)
    assert len(leaves) == 3
    doubled = pytree.tree_unflatten([leaf * 2 for leaf in leaves], spec)
    assert type(doubled) is LogitsOutput
    assert torch.equal(doubled.logits, output.logits * 2)
    assert torch.equal(doubled.hidden_states[0], output.hidden_states[0] * 2)
    assert doubled.attentions is None
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(output)[0]]
    assert paths == ["['loss']", "['logits']", "['hidden_states'][0]"]


@pytest.mark.parametrize("name", ALL_HEADS)
def test_fields_and_their_order_are_those_of_transformers(name):
    stock, model = pair(name, attention="eager")
    inputs = {**inputs_of(name, "right"), **labels_of(name, "right")}
    for arguments in ({}, {"output_hidden_states": True}, {"output_attentions": True, "output_hidden_states": True}):
        wanted, got = stock(**inputs, **arguments), model(**inputs, **arguments)
        # Stock base models answer a request for attentions with an empty tuple of cross-attentions as well.
        assert list(got) == [key for key in wanted if wanted[key] != ()]
        as_tuple = model(**inputs, **arguments, return_dict=False)
        stock_tuple = tuple(part for part in stock(**inputs, **arguments, return_dict=False) if part != ())
        assert type(as_tuple) is tuple
        assert len(as_tuple) == len(stock_tuple) == len(got)
        shapes = pytree.tree_map(lambda t: t.shape, list(as_tuple), is_leaf=torch.is_tensor)
        assert shapes == pytree.tree_map(lambda t: t.shape, list(stock_tuple), is_leaf=torch.is_tensor)
    unlabelled = inputs_of(name)
    assert list(model(**unlabelled)) == list(stock(**unlabelled))


@pytest.mark.parametrize("name", ALL_HEADS)
@pytest.mark.parametrize("padding", ["right", "holes"])
def test_attentions_and_hidden_states_equal_stock(name, padding):
    stock, model = pair(name, attention="eager")
    inputs = inputs_of(name, padding)
    wanted = stock(**inputs, output_attentions=True, output_hidden_states=True)
    got = model(**inputs, output_attentions=True, output_hidden_states=True)
    rows = 6 if "MultipleChoice" in name else 3
    assert isinstance(got.attentions, tuple)
    assert [tuple(a.shape) for a in got.attentions] == [(rows, HEADS, LENGTH, LENGTH)] * LAYERS
    assert [tuple(h.shape) for h in got.hidden_states] == [(rows, LENGTH, WIDTH)] * (LAYERS + 1)
    for field in ("attentions", "hidden_states"):
        for mine, theirs in zip(got[field], wanted[field], strict=True):
            torch.testing.assert_close(mine, theirs)
    for weights in got.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        masked = inputs["attention_mask"].reshape(rows, 1, 1, LENGTH).expand_as(weights) == 0
        assert masked.any()
        assert not weights[masked].any()
    if "last_hidden_state" in got:
        torch.testing.assert_close(got.last_hidden_state, wanted.last_hidden_state)
        assert torch.equal(got.hidden_states[-1], got.last_hidden_state)
    plain = model(**inputs, output_attentions=False, output_hidden_states=False)
    assert plain.attentions is None
    assert plain.hidden_states is None


def test_attentions_of_a_row_without_keys_are_zero():
    _, model = pair("BertModel")
    output = model(**inputs_of("BertModel", "empty row"), output_attentions=True)
    for weights in output.attentions:
        assert not weights[1].any()
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(HEADS, LENGTH, dtype=torch.float64))
    assert output.last_hidden_state.isfinite().all()


def test_attentions_carry_gradients():
    stock, model = pair("BertModel", attention="eager")
    inputs = inputs_of("BertModel", "holes")
    cotangent = torch.randn(3, HEADS, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for one in (stock, model):
        (one(**inputs, output_attentions=True).attentions[-1] * cotangent).sum().backward()
    assert_same_gradients(model, stock)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForQuestionAnswering", "DistilBertModel"])
def test_configuration_decides_what_is_returned(name):
    _, model = pair(name, output_attentions=True, output_hidden_states=True, attention="eager")
    inputs = inputs_of(name, "left")
    output = model(**inputs)
    assert len(output.attentions) == LAYERS
    assert len(output.hidden_states) == LAYERS + 1
    assert model(**inputs, output_attentions=False, output_hidden_states=False).hidden_states is None
    model.config.return_dict = False
    assert type(model(**inputs)) is tuple
    assert model(**inputs, return_dict=True).attentions is not None


def test_the_last_hidden_states_do_not_alias_an_input():
    _, model = pair("BertModel", num_hidden_layers=0)
    embeds = torch.randn(3, 7, WIDTH, dtype=torch.float64)
    before = embeds.clone()
    output = model(inputs_embeds=embeds, attention_mask=mask_of("full"))
    output.last_hidden_state.zero_()
    assert torch.equal(embeds, before)


@pytest.mark.parametrize("rebuilt", [dict, lambda out: ((key, out[key]) for key in out)], ids=["mapping", "pairs"])
def test_made_anew_from_a_mapping_or_from_pairs(rebuilt):
    """As accelerate and Trainer, and the gathering of DataParallel, do."""
    for output in (some_output(), LogitsOutput(logits=torch.ones(2)), LogitsOutput()):
        again = type(output)(rebuilt(output))
        assert list(again) == list(output) and again.to_tuple() == output.to_tuple()
        for field in dataclasses.fields(output):
            assert getattr(again, field.name) is getattr(output, field.name)


def test_every_output_type_is_a_dataclass_with_optional_fields():
    kinds = output_types.ModelOutput.__subclasses__()
    assert BaseModelOutputWithPooling in kinds
    for kind in kinds:
        assert all(field.default is None for field in dataclasses.fields(kind))
        assert len(kind()) == 0
    assert list(BaseModelOutputWithPooling(pooler_output=torch.ones(1))) == ["pooler_output"]
