"""What models refuse, with an error that names the argument, what was expected and what came."""

from __future__ import annotations

import pytest
import torch

from bertfast.configuration import BertConfig, DistilBertConfig, RobertaConfig
from helpers.checkpoints import ALL_HEADS, family_of, ours, tiny_stock_config
from helpers.models import inputs_of, labels_of, pair

BASES = ["BertModel", "RobertaModel", "DistilBertModel"]
CONFIGS = {"BertModel": BertConfig, "RobertaModel": RobertaConfig, "DistilBertModel": DistilBertConfig}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_decoder": True}, "is_decoder=True is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({"position_embedding_type": "relative_key_query"}, "only 'absolute' is"),
        ({"num_attention_heads": 5}, r"hidden_size \(24\) is no multiple of num_attention_heads \(5\)"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0"),
        ({"hidden_act": "gelou"}, "gelou"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("name", BASES)
def test_configurations(name, fields, message):
    sizes = {
        "vocab_size": 61,
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_hidden_layers": 1,
        "intermediate_size": 40,
    }
    with pytest.raises(ValueError, match=message):
        ours(name)(CONFIGS[name](**{**sizes, **fields}))


def test_question_answering_needs_two_labels_where_stock_does():
    with pytest.raises(ValueError, match="num_labels must be 2.*got 3"):
        ours("DistilBertForQuestionAnswering")(tiny_stock_config("DistilBertForQuestionAnswering", num_labels=3))


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"encoder_hidden_states": torch.zeros(3, 7, 24)},
        {"encoder_attention_mask": torch.ones(3, 7)},
        {"past_key_values": ((torch.zeros(1), torch.zeros(1)),)},
        {"use_cache": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_cross_attention_and_caches(name, arguments):
    _, model = pair(name)
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} is not supported"):
        model(**inputs_of(name), **arguments)
    model(**inputs_of(name), use_cache=False)


@pytest.mark.parametrize("name", ALL_HEADS)
def test_unknown_arguments(name):
    _, model = pair(name)
    with pytest.raises(TypeError, match="head_mask"):
        model(**inputs_of(name), head_mask=torch.ones(2, 3))
    if family_of(name) == "distilbert":
        with pytest.raises(TypeError, match="token_type_ids"):
            model(**inputs_of(name), token_type_ids=torch.zeros(3, 7, dtype=torch.int64))


@pytest.mark.parametrize("name", ALL_HEADS)
def test_ids_and_embeddings_together_or_neither(name):
    _, model = pair(name)
    inputs = inputs_of(name)
    shape = (*inputs["input_ids"].shape, 24)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(**inputs, inputs_embeds=torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(attention_mask=torch.ones(3, 7))


@pytest.mark.parametrize("padding", [None, "right"])
@pytest.mark.parametrize(
    ("argument", "value"),
    [("input_ids", 61), ("input_ids", -1), ("token_type_ids", 2), ("position_ids", 22), ("position_ids", -3)],
)
def test_ids_outside_their_tables(argument, value, padding):
    _, model = pair("BertModel")
    inputs = inputs_of("BertModel", padding)
    inputs["position_ids"] = torch.arange(7).expand(3, 7).clone()
    inputs[argument][0, 2] = value
    with pytest.raises(IndexError, match=f"{argument} has the value {value}"):
        model(**inputs)


def test_wrong_ids_do_not_harm_what_comes_after():
    _, model = pair("BertModel")
    wanted = model(**inputs_of("BertModel")).last_hidden_state
    with pytest.raises(IndexError):
        model(torch.tensor([[999]]))
    assert torch.equal(model(**inputs_of("BertModel")).last_hidden_state, wanted)


@pytest.mark.parametrize(("name", "room"), [("BertModel", 22), ("RobertaModel", 20), ("DistilBertModel", 22)])
def test_sequences_longer_than_the_position_table(name, room):
    _, model = pair(name)
    assert model(torch.full((1, room), 5))[0].shape == (1, room, 24)
    with pytest.raises(IndexError, match=f"{room + 1} tokens.*room for {room}"):
        model(torch.full((1, room + 1), 5))
    with pytest.raises(IndexError, match=f"{room + 1} tokens.*room for {room}"):
        model(inputs_embeds=torch.zeros(1, room + 1, 24, dtype=torch.float64))


@pytest.mark.parametrize("argument", ["attention_mask", "token_type_ids", "position_ids"])
@pytest.mark.parametrize("padding", [None, "right"])
def test_mixed_devices(argument, padding):
    _, model = pair("BertModel")
    inputs = inputs_of("BertModel", padding)
    inputs["position_ids"] = torch.arange(7).expand(3, 7)
    inputs[argument] = torch.ones(3, 7, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=f"{argument} is on meta"):
        model(**inputs)


def test_ids_on_another_device_than_the_model():
    _, model = pair("BertModel")
    with pytest.raises(ValueError, match="is on meta, expected cpu"):
        model(torch.zeros(3, 7, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("shape", [(7,), (), (3, 7, 2)])
@pytest.mark.parametrize("name", BASES)
def test_wrong_ranks_of_ids(name, shape):
    _, model = pair(name)
    with pytest.raises(ValueError, match="input_ids must be") as error:
        model(torch.zeros(shape, dtype=torch.int64))
    assert str(shape) in str(error.value)
    with pytest.raises(ValueError, match="inputs_embeds"):
        model(inputs_embeds=torch.zeros(7, 24, dtype=torch.float64))


@pytest.mark.parametrize("padding", [None, "right"])
@pytest.mark.parametrize("argument", ["token_type_ids", "position_ids"])
@pytest.mark.parametrize("shape", [(3, 6), (2, 7), (7, 3), (1, 3, 7)])
def test_wrong_shapes_of_types_and_positions(argument, shape, padding):
    _, model = pair("BertModel")
    inputs = inputs_of("BertModel", padding)
    inputs[argument] = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=argument) as error:
        model(**inputs)
    assert str(shape) in str(error.value)


def test_wrong_width_and_dtypes():
    _, model = pair("BertModel")
    with pytest.raises(ValueError, match="inputs_embeds must have shape"):
        model(inputs_embeds=torch.zeros(3, 7, 23, dtype=torch.float64))
    with pytest.raises(TypeError, match="input_ids must be int32 or int64, got torch.float32"):
        model(torch.zeros(3, 7))
    with pytest.raises(TypeError, match="token_type_ids must be int32 or int64"):
        model(**{**inputs_of("BertModel"), "token_type_ids": torch.zeros(3, 7)})
    assert torch.equal(
        model(inputs_of("BertModel")["input_ids"].int())[0], model(inputs_of("BertModel")["input_ids"])[0]
    )


@pytest.mark.parametrize("padding", [None, "right"])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForTokenClassification", "DistilBertForMaskedLM"])
def test_labels_that_do_not_fit(name, padding):
    _, model = pair(name)
    with pytest.raises((ValueError, RuntimeError), match="labels|size|shape|batch"):
        model(**inputs_of(name, padding), labels=torch.zeros(3, 6, dtype=torch.int64))


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "RobertaForTokenClassification"])
def test_labels_outside_the_classes(name):
    _, model = pair(name)
    labels = labels_of(name)["labels"]
    labels.view(-1)[0] = 7
    with pytest.raises(IndexError, match="7"):
        model(**inputs_of(name), labels=labels)
