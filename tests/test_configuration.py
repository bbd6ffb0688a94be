"""Configurations: defaults and round trips against transformers, labels, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
import transformers

from bertfast.configuration import (
    PRESETS,
    BertConfig,
    DistilBertConfig,
    PretrainedConfig,
    RobertaConfig,
    config_for,
)
from bertfast.errors import CheckpointError

FAMILIES = [
    (BertConfig, "BertConfig", {}),
    (RobertaConfig, "RobertaConfig", {}),
    (RobertaConfig, "XLMRobertaConfig", {"model_type": "xlm-roberta"}),
    (RobertaConfig, "CamembertConfig", {"model_type": "camembert"}),
    (DistilBertConfig, "DistilBertConfig", {}),
]


@pytest.mark.parametrize(("ours", "stock", "fields"), FAMILIES)
def test_defaults_are_those_of_transformers(ours, stock, fields):
    mine, theirs = ours(**fields), getattr(transformers, stock)().to_dict()
    for name in {*mine.to_dict(), *theirs} - {"transformers_version", "_name_or_path", "is_encoder_decoder"}:
        if name in theirs:
            assert mine.to_dict()[name] == theirs[name], name
        else:
            assert not getattr(mine, name), f"{name} is set, and transformers does not know it"


@pytest.mark.parametrize(("ours", "stock", "fields"), FAMILIES)
def test_a_saved_file_means_the_same_to_transformers_and_back(ours, stock, fields, tmp_path):
    changes = {"num_labels": 3, "problem_type": "regression", "initializer_range": 0.3, "output_hidden_states": True}
    mine = ours(**fields, **changes, dtype="bfloat16", something_new={"a": [1]})
    mine.save_pretrained(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(theirs).__name__ == stock
    assert theirs.dtype is torch.bfloat16
    assert theirs.something_new == {"a": [1]}
    assert theirs.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    assert config_for(theirs).to_dict().items() >= mine.to_dict().items()
    theirs.save_pretrained(tmp_path)
    again = ours.from_pretrained(tmp_path)
    assert again.to_dict().items() >= mine.to_dict().items()
    assert again.model_type == fields.get("model_type", ours.model_type)


def test_default_values_stay_out_of_the_file_and_family_fields_stay_in():
    fields = json.loads(RobertaConfig(bos_token_id=None).to_json_string())
    assert fields["hidden_size"] == 768
    assert fields["bos_token_id"] is None
    assert not fields.keys() & {"is_decoder", "id2label", "chunk_size_feed_forward"}


def test_distilbert_answers_to_the_names_of_bert():
    config = DistilBertConfig(hidden_size=24, attention_probs_dropout_prob=0.4)
    assert (config.dim, config.hidden_size, config.attention_dropout) == (24, 24, 0.4)
    config.hidden_act = "relu"
    config.intermediate_size = 7
    assert (config.activation, config.hidden_dim) == ("relu", 7)
    assert not config.to_dict().keys() & {"hidden_size", "hidden_act", "intermediate_size"}


def test_labels():
    assert BertConfig().id2label == {0: "LABEL_0", 1: "LABEL_1"}
    config = BertConfig(id2label={"0": "no", "1": "maybe", "2": "yes"})
    assert config.num_labels == 3
    assert config.label2id == {"no": 0, "maybe": 1, "yes": 2}
    assert BertConfig(label2id={"a": 0, "b": 1, "c": 2}).id2label == {0: "a", 1: "b", 2: "c"}
    assert config.replaced(num_labels=3).id2label == config.id2label
    assert config.replaced(num_labels=5).id2label[4] == "LABEL_4"
    assert config.replaced(id2label={0: "x"}).label2id == {"x": 0}
    with pytest.raises(ValueError, match="num_labels=2, but id2label has 3"):
        config.replaced(num_labels=2, id2label=config.id2label)
    with pytest.warns(UserWarning, match="num_labels=4 differs"):
        assert BertConfig(num_labels=4, id2label={0: "a"}).num_labels == 1
    with pytest.raises(ValueError, match="positive integer"):
        config.num_labels = 0


def test_copies_are_equal_and_independent():
    config = BertConfig(num_labels=3, extra=[1])
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.replaced()):
        assert other == config
        other.extra.append(2)
        other.id2label[0] = "changed"
        assert config.extra == [1]
        assert config.id2label[0] == "LABEL_0"
    assert BertConfig() != BertConfig(hidden_size=24)
    assert BertConfig() != RobertaConfig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_decoder": True}, "is_decoder"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"pruned_heads": {0: [1]}}, "pruned_heads"),
        ({"hidden_size": 25}, "no multiple"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"hidden_size": 24.0}, "hidden_size"),
        ({"type_vocab_size": -1}, "type_vocab_size"),
        ({"type_vocab_size": "2"}, "type_vocab_size"),
        ({"pad_token_id": "0"}, "pad_token_id"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps"),
        ({"hidden_dropout_prob": "0.1"}, "hidden_dropout_prob"),
        ({"attention_probs_dropout_prob": 1.5}, "attention_probs_dropout_prob"),
    ],
)
def test_what_the_encoder_cannot_run_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        BertConfig(**fields).check_supported()


def test_what_makes_no_difference_is_accepted():
    BertConfig(position_embedding_type="absolute", chunk_size_feed_forward=3, num_hidden_layers=0).check_supported()
    DistilBertConfig().check_supported()


@pytest.mark.parametrize(
    "fields", [{"dtype": "floatish"}, {"problem_type": "guess"}, {"id2label": ["a"]}, {"label2id": "a"}]
)
def test_values_outside_their_set_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        BertConfig(**fields)


def test_config_for():
    config = BertConfig()
    assert config_for(config) is config
    assert type(config_for({"model_type": "camembert"})) is RobertaConfig
    stock = transformers.DistilBertConfig(dim=24, attn_implementation="eager", output_attentions=True)
    assert config_for(stock).hidden_size == 24
    assert config_for(stock).output_attentions is True
    with pytest.raises(CheckpointError, match="'gpt2'.*bert"):
        config_for({"model_type": "gpt2"})
    with pytest.raises(CheckpointError, match="model_type"):
        config_for({"model_type": ["bert"]})
    with pytest.raises(TypeError, match="int"):
        config_for(3)


def test_from_pretrained_reads_a_folder(tmp_path):
    with pytest.raises(CheckpointError, match="no config.json"):
        BertConfig.from_pretrained(tmp_path)
    RobertaConfig(model_type="xlm-roberta", hidden_size=24).save_pretrained(tmp_path / "sub")
    config = PretrainedConfig.from_pretrained(tmp_path, subfolder="sub", num_labels=4)
    assert (type(config), config.model_type, config.hidden_size, config.num_labels) == (
        RobertaConfig,
        "xlm-roberta",
        24,
        4,
    )
    assert config.name_or_path == str(tmp_path)
    with pytest.warns(UserWarning, match="'xlm-roberta' is read as BertConfig"):
        assert BertConfig.from_pretrained(tmp_path / "sub").model_type == "bert"


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, "\x00\xff"])
def test_a_damaged_file_is_one_clear_error(text, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match="config.json"):
        BertConfig.from_pretrained(tmp_path)


def test_a_callable_activation_is_kept_and_cannot_be_written(tmp_path):
    config = BertConfig(hidden_act=torch.tanh)
    assert config.replaced().hidden_act is torch.tanh
    with pytest.raises(ValueError, match="JSON"):
        config.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_presets():
    sizes = {name: (make().hidden_size, make().num_hidden_layers, make().vocab_size) for name, make in PRESETS.items()}
    assert sizes == {
        "bert-base": (768, 12, 30522),
        "bert-large": (1024, 24, 30522),
        "distilbert-base": (768, 6, 30522),
        "roberta-base": (768, 12, 50265),
        "roberta-large": (1024, 24, 50265),
    }
    for name in ("roberta-base", "roberta-large"):
        config = PRESETS[name]()
        assert (config.max_position_embeddings, config.type_vocab_size, config.layer_norm_eps) == (514, 1, 1e-5)
