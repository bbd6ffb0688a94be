"""What all models share: initialisation, embeddings, resizing, tying, gradient checkpointing, automatic classes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers

from bertfast.models import auto
from helpers.checkpoints import ALL_HEADS, HEADS, family_of, ours, saved_stock, tiny_stock, tiny_stock_config

MASKED_LM = ["BertForPreTraining", "BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM"]


def tiny(name, **fields):
    """One of our models with a tiny random configuration."""
    return ours(name)(tiny_stock_config(name, **fields))


@pytest.mark.parametrize("name", ALL_HEADS)
def test_initial_distribution_is_that_of_transformers(name):
    fields = {"hidden_size": 48, "vocab_size": 400, "initializer_range": 0.3}
    stock = getattr(transformers, name)(tiny_stock_config(name, **fields)).state_dict()
    mine = tiny(name, **fields).state_dict()
    assert mine.keys() == stock.keys()
    for key, wanted in stock.items():
        got = mine[key]
        assert got.shape == wanted.shape, key
        zero_rows = (wanted.reshape(len(wanted), -1) == 0).all(1)
        assert torch.equal((got.reshape(len(got), -1) == 0).all(1), zero_rows), key
        if wanted.std(correction=0) == 0:
            assert torch.equal(got, wanted), key
        else:
            # The standard error of a standard deviation over n values is about std / sqrt(2 n).
            assert abs(got.std() - wanted.std()) < 6 * 0.3 / (wanted.numel() ** 0.5), key
            assert abs(got.mean()) < 6 * 0.3 / (wanted.numel() ** 0.5), key


def test_sinusoidal_positions():
    fields = {"sinusoidal_pos_embds": True}
    stock = transformers.DistilBertModel(tiny_stock_config("DistilBertModel", **fields))
    wanted = stock.embeddings.position_embeddings.weight
    got = tiny("DistilBertModel", **fields).embeddings.position_embeddings.weight
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_construction_is_reproducible_and_modules_are_initialised_once():
    torch.manual_seed(3)
    first = tiny("BertForMaskedLM").state_dict()
    after = torch.rand(1)
    torch.manual_seed(3)
    second = tiny("BertForMaskedLM").state_dict()
    assert torch.equal(torch.rand(1), after)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_configuration_of_another_family_is_refused():
    with pytest.raises(ValueError, match="BertModel takes a BertConfig, got a RobertaConfig"):
        ours("BertModel")(tiny_stock_config("RobertaModel"))
    with pytest.raises(ValueError, match="is_decoder"):
        ours("BertModel")(tiny_stock_config("BertModel", is_decoder=True))


@pytest.mark.parametrize("name", ALL_HEADS)
def test_embedding_accessors_and_counts(name):
    model, stock = tiny(name), tiny_stock(name)
    assert model.get_input_embeddings().weight.shape == stock.get_input_embeddings().weight.shape
    assert (model.get_output_embeddings() is None) == (stock.get_output_embeddings() is None)
    assert model.num_parameters() == stock.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == stock.num_parameters(exclude_embeddings=True)
    assert type(model.base_model) is ours(HEADS[family_of(name)][0])
    model.get_input_embeddings().weight.requires_grad_(False)
    stock.get_input_embeddings().weight.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == stock.num_parameters(only_trainable=True)
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    assert model.half().dtype is torch.float16


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_stay_tied(copied):
    model = tiny("BertForMaskedLM")
    other = copied(model)
    assert other.get_output_embeddings().weight is other.get_input_embeddings().weight
    assert other.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert other.config == model.config


@pytest.mark.parametrize("name", MASKED_LM)
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(
    "arguments", [(70,), (50,), (61,), (60, 16), (None, 8), (1,)], ids=lambda arguments: "-".join(map(str, arguments))
)
def test_resize_token_embeddings_as_transformers_does(name, tie, arguments, tmp_path):
    saved_stock(tmp_path, name, tie_word_embeddings=tie)
    stock, model = getattr(transformers, name).from_pretrained(tmp_path), ours(name).from_pretrained(tmp_path)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    theirs = stock.resize_token_embeddings(*arguments)
    mine = model.resize_token_embeddings(*arguments)
    assert mine is model.get_input_embeddings()
    assert mine.weight.shape == theirs.weight.shape
    assert mine.num_embeddings == mine.weight.shape[0] == model.config.vocab_size == stock.config.vocab_size
    assert mine.padding_idx == theirs.padding_idx
    assert model.get_output_embeddings().out_features == mine.num_embeddings
    assert (model.get_output_embeddings().weight is mine.weight) == tie
    kept = min(61, mine.num_embeddings)
    wanted = stock.state_dict()
    for key, tensor in model.state_dict().items():
        if key == "lm_head.bias" and not tie:
            # transformers leaves this one at its old size, and then cannot load what it saves.
            assert tensor.shape[0] == mine.num_embeddings
        elif wanted[key].shape == before[key].shape:
            assert torch.equal(tensor, before[key]), key
        else:
            assert tensor.shape[0] == mine.num_embeddings, key
            assert torch.equal(tensor[:kept], before[key][:kept]), key
    # The new rows are the mean of the old ones with noise of 3e-5 times their spread.
    for got, reference in ((mine.weight, theirs.weight), (model.get_output_embeddings().bias, None)):
        if len(got) > kept:
            mean = before_mean(before, got)
            assert torch.allclose(got[kept:], mean.expand_as(got[kept:]), atol=1e-3)
            if reference is not None:
                assert torch.allclose(got[kept:], reference[kept:], atol=1e-3)
    if mine.padding_idx is not None:
        assert model(torch.zeros(1, 4, dtype=torch.int64))[0].shape == (1, 4, mine.num_embeddings)


def before_mean(before, got):
    """Mean over the rows of the old embeddings, or of the decoder's old bias."""
    suffixes = ("word_embeddings.weight",) if got.dim() == 2 else ("decoder.bias", "vocab_projector.bias")
    return next(tensor for key, tensor in before.items() if key.endswith(suffixes)).mean(0)


def test_resize_keeps_parameters_padding_and_gradients_right():
    model = tiny("BertForMaskedLM")
    weight = model.get_input_embeddings().weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    weight.grad = torch.ones_like(weight)
    model.resize_token_embeddings(80, mean_resizing=False)
    assert model.get_input_embeddings().weight is weight
    assert weight.grad is None
    assert not weight[0].any()
    assert 0.01 < weight[61:].std() < 0.03
    assert not model.cls.predictions.bias.any()
    logits = model(torch.tensor([[79, 3]])).logits
    assert logits.shape == (1, 2, 80)
    logits.sum().backward()
    optimizer.step()


def test_resize_of_a_model_without_decoder_and_bad_arguments():
    model = tiny("RobertaForSequenceClassification")
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert model.resize_token_embeddings(2).num_embeddings == 2
    assert model.get_input_embeddings().padding_idx == 1
    for arguments in ((0,), (-3,), (10, 0), (10, "8")):
        with pytest.raises(ValueError, match="must be"):
            model.resize_token_embeddings(*arguments)


@pytest.mark.parametrize("name", MASKED_LM)
def test_set_embeddings(name):
    model = tiny(name)
    new = torch.nn.Linear(24, 61)
    model.set_output_embeddings(new)
    assert model.get_output_embeddings() is new
    bias = {"bert": "cls.predictions.bias", "roberta": "lm_head.bias", "distilbert": "vocab_projector.bias"}
    assert model.get_parameter(bias[family_of(name)]) is new.bias
    embeddings = torch.nn.Embedding(61, 24)
    model.set_input_embeddings(embeddings)
    model.tie_weights()
    assert model.get_output_embeddings().weight is embeddings.weight
    with pytest.raises(ValueError, match="no output embeddings"):
        tiny("BertModel").set_output_embeddings(new)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "RobertaModel", "DistilBertForTokenClassification"])
@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}])
def test_gradient_checkpointing(name, kwargs):
    model = tiny(name, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    ids = torch.randint(2, 61, (2, 7))

    def gradients():
        model.zero_grad()
        # Not of the squares: their sum is the same for every output of a LayerNorm, and gradients are all rounding.
        out = model(ids)[0]
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
        return {
            key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None
        }

    wanted = gradients()
    model.gradient_checkpointing_enable(kwargs)
    assert model.is_gradient_checkpointing
    calls = []
    layer = next(module for module in model.modules() if type(module).__name__ == "BertEncoderLayer")
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    got = gradients()
    assert len(calls) == 2
    assert got.keys() == wanted.keys()
    for key in wanted:
        torch.testing.assert_close(got[key], wanted[key])
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=None, every_n_layers=1, offload=False)
    for option in ({"every_n_layers": 2}, {"offload": True}):
        with pytest.raises(ValueError, match=next(iter(option))):
            model.gradient_checkpointing_enable(**option)


AUTO = {
    "AutoModel": "Model",
    "AutoModelForPreTraining": None,
    "AutoModelForMaskedLM": "ForMaskedLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
    "AutoModelForMultipleChoice": "ForMultipleChoice",
    "AutoModelForNextSentencePrediction": "ForNextSentencePrediction",
}


@pytest.mark.parametrize("name", AUTO)
@pytest.mark.parametrize("base", ["BertModel", "RobertaModel", "DistilBertModel", "XLMRobertaModel", "CamembertModel"])
def test_automatic_classes_choose_as_transformers_does(name, base, tmp_path):
    saved_stock(tmp_path, base)
    wanted = getattr(transformers, name)
    try:
        stock = type(wanted.from_config(transformers.AutoConfig.from_pretrained(tmp_path))).__name__
    except ValueError:
        with pytest.raises(ValueError, match=f"{name} has no model for"):
            getattr(auto, name).from_pretrained(tmp_path)
        return
    stock = stock.replace("XLMRoberta", "Roberta").replace("Camembert", "Roberta")
    model = getattr(auto, name).from_pretrained(tmp_path, hidden_dropout_prob=0.25)
    assert type(model).__name__ == stock
    assert model.config.hidden_dropout_prob == 0.25
    assert not model.training
    assert type(getattr(auto, name).from_config(model.config)).__name__ == stock


def test_automatic_classes_have_no_instances_and_know_their_families():
    with pytest.raises(TypeError, match="from_pretrained"):
        auto.AutoModel()
    with pytest.raises(ValueError, match="'gpt2'"):
        auto.AutoModel.from_config({"model_type": "gpt2"})


def test_from_config():
    model = ours("BertForTokenClassification").from_config(
        tiny_stock_config("BertModel"), dtype="bfloat16", num_labels=5
    )
    assert model.dtype is torch.bfloat16
    assert model.classifier.out_features == 5
    assert model.training
