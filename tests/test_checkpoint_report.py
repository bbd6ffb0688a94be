"""Which tensor goes where: reports and values against transformers on the very same files."""

from __future__ import annotations

import pytest
import torch
import transformers

from bertfast.checkpoint import CheckpointError
from helpers.checkpoints import ALL_HEADS, HEADS, family_of, ours, read_tensors, saved_stock, tiny_stock, write_tensors

PAIRS = [(stored, wanted) for heads in HEADS.values() for stored in heads for wanted in heads]
MASKED_LM = ["BertForPreTraining", "BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM"]
DECODER = {
    "bert": ("cls.predictions.decoder", "cls.predictions.bias", "bert.embeddings.word_embeddings.weight"),
    "roberta": ("lm_head.decoder", "lm_head.bias", "roberta.embeddings.word_embeddings.weight"),
    "distilbert": ("vocab_projector", "vocab_projector.bias", "distilbert.embeddings.word_embeddings.weight"),
}


def load_both(folder, name, **kwargs):
    """Both libraries' model and report for a folder, after comparing the reports."""
    stock, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True, **kwargs)
    model, report = ours(name).from_pretrained(folder, return_report=True, allow_missing=True, **kwargs)
    assert set(report.missing) == set(info["missing_keys"])
    assert set(report.unexpected) == set(info["unexpected_keys"])
    assert set(report.mismatched) == {entry[0] for entry in info["mismatched_keys"]}
    return stock, model, report


def assert_same_tensors(stock, model, skipped=()):
    theirs, mine = stock.state_dict(), model.state_dict()
    assert set(mine) == set(theirs)
    for name in theirs:
        if name not in skipped:
            assert torch.equal(mine[name], theirs[name]), name


@pytest.mark.parametrize("wrappers", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("name", ALL_HEADS)
def test_own_file(name, wrappers, tmp_path):
    saved_stock(tmp_path, name)
    stock, model, _ = load_both(tmp_path, name)
    write_tensors(tmp_path, {wrappers + key: value for key, value in read_tensors(tmp_path).items()})
    model, report = ours(name).from_pretrained(tmp_path, return_report=True)
    assert not report, str(report)
    assert_same_tensors(stock, model)


@pytest.mark.parametrize(("stored", "wanted"), PAIRS)
def test_file_of_another_head(stored, wanted, tmp_path):
    saved_stock(tmp_path, stored)
    stock, model, report = load_both(tmp_path, wanted, ignore_mismatched_sizes=True)
    assert_same_tensors(stock, model, skipped={*report.missing, *report.mismatched})


@pytest.mark.parametrize("name", ALL_HEADS)
def test_prefix_of_the_base_model_absent_and_present(name, tmp_path):
    saved_stock(tmp_path, name)
    prefix = family_of(name) + "."
    tensors = read_tensors(tmp_path)
    if name.endswith("Model"):
        changed = {prefix + key: value for key, value in tensors.items()}
    else:
        changed = {key.removeprefix(prefix): value for key, value in tensors.items()}
    assert changed.keys() != tensors.keys()
    write_tensors(tmp_path, changed)
    stock, model, report = load_both(tmp_path, name)
    assert not report, str(report)
    assert_same_tensors(stock, model)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("prefixed", [True, False])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertModel", "RobertaForSequenceClassification"])
def test_gamma_and_beta(name, prefixed, suffix, tmp_path):
    saved_stock(tmp_path, name)
    old = {}
    for key, value in read_tensors(tmp_path).items():
        key = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        old[key if prefixed else key.removeprefix(family_of(name) + ".")] = value
    assert any(key.endswith("LayerNorm.gamma") for key in old)
    if suffix == "bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(old, tmp_path / "pytorch_model.bin")
    else:
        write_tensors(tmp_path, old)
    stock, model, report = load_both(tmp_path, name)
    assert not report, str(report)
    assert_same_tensors(stock, model)


def test_gamma_and_beta_outside_layer_norm_are_left_alone(tmp_path):
    saved_stock(tmp_path, "BertModel")
    strange = {"pooler.gamma": torch.ones(3), "encoder.beta": torch.ones(2), "gamma": torch.ones(1)}
    write_tensors(tmp_path, {**read_tensors(tmp_path), **strange})
    _, _, report = load_both(tmp_path, "BertModel")
    assert set(report.unexpected) == set(strange)


@pytest.mark.parametrize("name", ["BertModel", "RobertaForMaskedLM", "DistilBertForQuestionAnswering"])
def test_stray_buffers(name, tmp_path):
    saved_stock(tmp_path, name)
    prefix = "" if name.endswith("Model") else family_of(name) + "."
    stray = {
        f"{prefix}embeddings.position_ids": torch.arange(22)[None],
        f"{prefix}embeddings.token_type_ids": torch.zeros(1, 22, dtype=torch.int64),
    }
    write_tensors(tmp_path, {**read_tensors(tmp_path), **stray})
    stock, model, report = load_both(tmp_path, name)
    assert_same_tensors(stock, model)
    assert not report.missing
    assert "a buffer, not needed" in str(report)


def test_base_file_without_pooler_and_pooler_file_into_a_model_without(tmp_path):
    transformers.BertModel(tiny_stock("BertModel").config, add_pooling_layer=False).save_pretrained(tmp_path)
    _, model, report = load_both(tmp_path, "BertModel")
    assert set(report.missing) == {"pooler.dense.weight", "pooler.dense.bias"}
    saved_stock(tmp_path, "BertModel")
    stock, model, report = load_both(tmp_path, "BertModel", add_pooling_layer=False)
    assert set(report.unexpected) == {"pooler.dense.weight", "pooler.dense.bias"}
    assert_same_tensors(stock, model)


@pytest.mark.parametrize("name", MASKED_LM)
@pytest.mark.parametrize("stored", ["source", "copy", "both", "neither"])
def test_tied_decoder(name, stored, tmp_path):
    saved_stock(tmp_path, name)
    decoder, bias, embeddings = DECODER[family_of(name)]
    tensors = read_tensors(tmp_path)
    weight = tensors.pop(embeddings)
    shared = [(f"{decoder}.weight", embeddings, weight)]
    if bias != f"{decoder}.bias":
        shared.append((f"{decoder}.bias", bias, tensors.pop(bias)))
    for copy, source, value in shared:
        if stored in ("source", "both"):
            tensors[source] = value
        if stored in ("copy", "both"):
            tensors[copy] = value
    write_tensors(tmp_path, tensors)
    stock, model, report = load_both(tmp_path, name)
    assert model.get_parameter(f"{decoder}.weight") is model.get_input_embeddings().weight
    assert model.get_parameter(f"{decoder}.bias") is model.get_parameter(bias)
    if stored == "neither":
        assert embeddings in report.missing
        return
    assert not report
    assert_same_tensors(stock, model)
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    model.get_input_embeddings().weight.grad = torch.ones(61, 24)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(model.get_parameter(f"{decoder}.weight"), weight - 0.1)


@pytest.mark.parametrize("name", MASKED_LM)
def test_decoder_that_differs_from_tied_embeddings_stays_apart(name, tmp_path):
    saved_stock(tmp_path, name)
    decoder, _, embeddings = DECODER[family_of(name)]
    tensors = read_tensors(tmp_path)
    tensors[f"{decoder}.weight"] = tensors[embeddings] + 1
    write_tensors(tmp_path, tensors)
    with pytest.warns(UserWarning, match="differs from"):
        stock, model, report = load_both(tmp_path, name)
    assert_same_tensors(stock, model)
    assert any("two parameters" in note for note in report.notes)
    model.tie_weights()
    model.resize_token_embeddings(70)
    assert torch.equal(model.get_output_embeddings().weight[:61], tensors[f"{decoder}.weight"])
    assert torch.equal(model.get_input_embeddings().weight[:61], tensors[embeddings])


@pytest.mark.parametrize("name", MASKED_LM)
def test_untied_by_configuration(name, tmp_path):
    saved_stock(tmp_path, name, tie_word_embeddings=False)
    stock, model, report = load_both(tmp_path, name)
    assert not report
    assert_same_tensors(stock, model)
    decoder, _, embeddings = DECODER[family_of(name)]
    assert not torch.equal(model.get_parameter(f"{decoder}.weight"), model.get_parameter(embeddings))
    tensors = read_tensors(tmp_path)
    del tensors[f"{decoder}.weight"]
    write_tensors(tmp_path, tensors)
    _, _, report = load_both(tmp_path, name)
    assert report.missing == [f"{decoder}.weight"]


def test_mismatched_shapes(tmp_path):
    saved_stock(tmp_path, "BertForSequenceClassification", num_labels=5)
    with pytest.raises(CheckpointError, match=r"classifier.bias is \[5\] .*classifier.weight is \[5, 24\]"):
        ours("BertForSequenceClassification").from_pretrained(tmp_path, num_labels=3)
    kwargs = {"num_labels": 3, "ignore_mismatched_sizes": True}
    stock, model, report = load_both(tmp_path, "BertForSequenceClassification", **kwargs)
    assert report.mismatched["classifier.weight"] == ((5, 24), (3, 24))
    assert_same_tensors(stock, model, skipped=report.mismatched)
    assert model.classifier.weight.shape == (3, 24)
    assert 0 < model.classifier.weight.std() < 0.04
    assert not model.classifier.bias.any()
    with pytest.raises(CheckpointError, match="classifier.weight"):
        ours("BertForSequenceClassification").from_pretrained(tmp_path, num_labels=4, allow_missing=True)


def test_mismatched_vocabulary_stays_tied(tmp_path):
    saved_stock(tmp_path, "BertForMaskedLM")
    model, report = ours("BertForMaskedLM").from_pretrained(
        tmp_path, vocab_size=50, ignore_mismatched_sizes=True, return_report=True
    )
    assert set(report.mismatched) == {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"}
    assert model.cls.predictions.decoder.weight is model.get_input_embeddings().weight
    assert not model.get_input_embeddings().weight[0].any()


@pytest.mark.parametrize(("stored", "wanted"), [("DistilBertModel", "BertModel"), ("BertModel", "RobertaModel")])
@pytest.mark.filterwarnings("ignore:a configuration of type")
def test_foreign_family_is_refused(stored, wanted, tmp_path):
    saved_stock(tmp_path, stored, max_position_embeddings=22)
    config = ours(wanted).config_class.from_pretrained(saved_stock(tmp_path / "right", wanted))
    tensors = {f"{stored}.{key}": value for key, value in read_tensors(tmp_path).items()}
    write_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError, match="does not look like a checkpoint for"):
        ours(wanted).from_pretrained(tmp_path, config=config)
    _, report = ours(wanted).from_pretrained(tmp_path, config=config, allow_missing=True, return_report=True)
    assert set(report.unexpected) == set(tensors)


@pytest.mark.filterwarnings("ignore:a configuration of type")
def test_distilbert_into_bert_is_refused(tmp_path):
    saved_stock(tmp_path, "DistilBertForMaskedLM")
    with pytest.raises(CheckpointError, match="does not look like a checkpoint for BertForMaskedLM"):
        ours("BertForMaskedLM").from_pretrained(tmp_path)


def test_half_of_the_elements_counts_not_half_of_the_names(tmp_path):
    saved_stock(tmp_path, "BertModel", num_hidden_layers=1, vocab_size=4000)
    tensors = read_tensors(tmp_path)
    embeddings = {key: value for key, value in tensors.items() if key.startswith("embeddings.")}
    write_tensors(tmp_path, embeddings)
    _, _, report = load_both(tmp_path, "BertModel")
    assert len(report.missing) > len(embeddings)
    ours("BertModel").from_pretrained(tmp_path)
    del tensors["embeddings.word_embeddings.weight"]
    write_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError, match="newly initialised"):
        ours("BertModel").from_pretrained(tmp_path)


def test_new_parameters_have_the_initial_distribution(tmp_path):
    saved_stock(tmp_path, "BertModel", initializer_range=0.5)
    model = ours("BertForMaskedLM").from_pretrained(tmp_path)
    transform = model.cls.predictions.transform
    assert 0.4 < transform.dense.weight.std() < 0.6
    assert not transform.dense.bias.any()
    assert not model.cls.predictions.bias.any()
    assert (transform.LayerNorm.weight == 1).all()
    assert not transform.LayerNorm.bias.any()


def test_the_same_tensor_under_two_names(tmp_path):
    saved_stock(tmp_path, "BertModel")
    tensors = read_tensors(tmp_path)
    write_tensors(tmp_path, {**tensors, "module.pooler.dense.bias": tensors["pooler.dense.bias"] + 1})
    model, report = ours("BertModel").from_pretrained(tmp_path, return_report=True)
    assert not report
    assert torch.equal(model.pooler.dense.bias, tensors["pooler.dense.bias"])
    assert any("module.pooler.dense.bias" in note for note in report.notes)


def test_report_prints_a_table_and_answers_to_the_names_of_transformers(tmp_path, caplog):
    saved_stock(tmp_path, "BertForPreTraining")
    model, report = ours("BertForSequenceClassification").from_pretrained(tmp_path, output_loading_info=True)
    lines = str(report).splitlines()
    assert "BertForSequenceClassification" in lines[0]
    assert "2 missing" in lines[0]
    assert any(line.startswith("classifier.weight") and "newly initialised" in line for line in lines)
    assert any(line.startswith("cls.seq_relationship.bias") and "not used" in line for line in lines)
    assert report["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert report["error_msgs"] == []
    assert "classifier.weight" in caplog.text
    caplog.clear()
    ours("BertForPreTraining").from_pretrained(tmp_path)
    assert not caplog.text
