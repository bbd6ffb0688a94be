"""Every head of every family against transformers: outputs, losses and all gradients."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers

from bertfast import PRESETS, configuration
from helpers.checkpoints import ALL_HEADS, HEADS, family_of, ours, tiny_stock_config
from helpers.models import assert_close, assert_same, inputs_of, labels_of, mask_of, pair
from helpers.tolerance import assert_models_within

FAMILIES = ["BertModel", "RobertaModel", "DistilBertModel"]
CLASSIFIERS = [head for head in ALL_HEADS if head.endswith("ForSequenceClassification")]
ANSWERERS = [head for head in ALL_HEADS if head.endswith("ForQuestionAnswering")]
MASKED_LM = [head for head in ALL_HEADS if head.endswith(("ForMaskedLM", "ForPreTraining"))]


# For the tolerance: over few tokens and a narrow model the largest of stock's errors is a matter of luck.
WIDER = {"hidden_size": 60, "num_attention_heads": 4, "intermediate_size": 100}
SHAPE = (15, 14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ALL_HEADS)
def test_every_head_within_tolerance(name, dtype):
    stock, model = pair(name, dtype=dtype, **WIDER)
    assert_models_within(model, stock, {**inputs_of(name, shape=SHAPE), **labels_of(name, shape=SHAPE)}, dtype=dtype)
    mask = mask_of("right").repeat(5, 2)
    inputs = {**inputs_of(name, mask, seed=1), **labels_of(name, mask, seed=1)}
    assert_models_within(model.train(), stock.train(), inputs, dtype=dtype, real=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ALL_HEADS)
def test_every_head_within_tolerance_without_gradients(name, dtype):
    """Backends that only serve inference are chosen here."""
    stock, model = pair(name, dtype=dtype, **WIDER)
    mask = mask_of("right").repeat(5, 2)
    with torch.no_grad():
        assert_models_within(model, stock, inputs_of(name, shape=SHAPE), dtype=dtype, backward=False)
        assert_models_within(model, stock, inputs_of(name, mask, 1), dtype=dtype, real=mask, backward=False)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("padding", [None, "right", "holes"])
@pytest.mark.parametrize("name", ALL_HEADS)
def test_every_head_in_float64(name, padding, training):
    stock, model = pair(name)
    stock.train(training), model.train(training)
    rows = None if padding is None else mask_of(padding)
    labels = labels_of(name, padding)
    assert_same(model, stock, inputs_of(name, padding), rows=rows)
    if labels:
        output = assert_same(model, stock, {**inputs_of(name, padding), **labels}, rows=rows)
        assert output.loss.isfinite()
        assert output.loss != 0


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 17},
        {"hidden_size": 60, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 1},
        {"hidden_size": 24, "num_attention_heads": 24, "intermediate_size": 129},
        {"hidden_size": 7, "num_attention_heads": 1},
        {"hidden_size": 300, "num_attention_heads": 1, "num_hidden_layers": 1},
        {"num_hidden_layers": 0},
    ],
    ids=lambda sizes: "-".join(map(str, sizes.values())),
)
@pytest.mark.parametrize("name", FAMILIES)
def test_odd_sizes(name, sizes):
    stock, model = pair(name, **sizes)
    assert_same(model, stock, inputs_of(name, "holes"), rows=mask_of("holes"))
    with torch.no_grad():
        assert_models_within(model, stock, inputs_of(name, shape=SHAPE), dtype=torch.float32, backward=False)


ACTIVATIONS = [
    "gelu",
    "gelu_python",
    "gelu_new",
    "gelu_pytorch_tanh",
    "gelu_python_tanh",
    "gelu_accurate",
    "gelu_fast",
    "quick_gelu",
    "relu",
    "relu6",
    "leaky_relu",
    "silu",
    "swish",
    "mish",
    "tanh",
    "sigmoid",
    "linear",
]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["BertForMaskedLM", "DistilBertForMaskedLM"])
def test_activations(name, activation):
    field = "activation" if family_of(name) == "distilbert" else "hidden_act"
    stock, model = pair(name, **{field: activation})
    assert_same(model, stock, inputs_of(name, "right"), rows=mask_of("right"))


def test_activations_are_told_apart():
    # The formulas differ by 5e-4 and more, which the parity above would not accept.
    inputs = inputs_of("BertModel")
    results = [pair("BertModel", hidden_act=act)[1](**inputs).last_hidden_state for act in ACTIVATIONS]
    for wrong, right in ((2, 0), (7, 0), (8, 0), (11, 0), (12, 11)):
        if {ACTIVATIONS[wrong], ACTIVATIONS[right]} == {"silu", "swish"}:
            assert torch.equal(results[wrong], results[right])
        else:
            assert (results[wrong] - results[right]).abs().max() > 1e-6


def test_an_activation_given_as_a_function():
    stock, model = pair("BertModel", hidden_act="relu")
    config = configuration.BertConfig(**{**model.config.to_dict(), "hidden_act": torch.nn.functional.relu})
    called = ours("BertModel")(config).double().eval()
    called.load_state_dict(stock.state_dict())
    assert_same(called, stock, inputs_of("BertModel", "right"), rows=mask_of("right"))


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-3])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_layer_norm_eps_reaches_every_layer_norm(name, eps):
    stock, model = pair(name, layer_norm_eps=eps)
    for one in (stock, model):
        with torch.no_grad():
            for key, parameter in one.named_parameters():
                # Sums of a variance of about 1e-6: between 1e-12 and 1e-5 the output then changes threefold.
                if "embeddings.weight" in key or key.endswith(("LayerNorm.weight", "layer_norm.weight", "bias")):
                    parameter.mul_(1e-3)
    assert_same(model, stock, inputs_of(name, "right"), rows=mask_of("right"))


def test_distilbert_has_the_eps_of_transformers():
    stock, model = pair("DistilBertForMaskedLM")
    for one in (stock, model):
        with torch.no_grad():
            one.distilbert.embeddings.word_embeddings.weight.mul_(1e-6)
            one.distilbert.embeddings.position_embeddings.weight.mul_(1e-6)
    assert_same(model, stock, inputs_of("DistilBertForMaskedLM"))


REGRESSIONS = [
    ("regression, by one label", {"num_labels": 1}, torch.tensor([0.5, -1.0, 2.0])),
    ("regression, labels in a column", {"num_labels": 1}, torch.tensor([[0.5], [-1.0], [2.0]])),
    ("regression of integers' kind", {"num_labels": 1, "problem_type": "regression"}, torch.tensor([0.5, -1.0, 2.0])),
    ("regression of three", {"num_labels": 3, "problem_type": "regression"}, torch.randn(3, 3)),
    ("single label", {"num_labels": 5}, torch.tensor([4, 0, 2])),
    ("single label, stated", {"num_labels": 4, "problem_type": "single_label_classification"}, torch.tensor([3, 0, 2])),
    ("single label, ignored", {"num_labels": 4}, torch.tensor([3, -100, 2])),
    ("multi label", {"num_labels": 3}, torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 0, 0]])),
    (
        "multi label, stated",
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        torch.tensor([[1.0, 0, 0.5], [0, 1, 1], [0, 0, 0]]),
    ),
]


@pytest.mark.parametrize(("kind", "fields", "labels"), REGRESSIONS, ids=[case[0] for case in REGRESSIONS])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_losses_of_classification(name, kind, fields, labels):
    stock, model = pair(name, **fields)
    labels = labels.double() if labels.dtype.is_floating_point else labels
    output = assert_same(model, stock, {**inputs_of(name, "right"), "labels": labels})
    assert output.loss.dim() == 0
    # Whoever asked for what kind of task: stock notes it in its configuration, and so may ours.
    assert output.logits.shape == (3, fields["num_labels"])


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_kind_of_task_follows_the_labels_of_each_call(name):
    _, model = pair(name, num_labels=3)
    whole = model(**inputs_of(name), labels=torch.tensor([0, 1, 2])).loss
    several = model(**inputs_of(name), labels=torch.eye(3, dtype=torch.float64)).loss
    again = model(**inputs_of(name), labels=torch.tensor([0, 1, 2])).loss
    assert torch.equal(whole, again)
    assert whole != several


@pytest.mark.parametrize(
    ("starts", "ends"),
    [
        ([0, 2, 1], [3, 2, 6]),
        ([[0], [2], [1]], [[3], [2], [6]]),
        ([0, 7, 99], [6, 99, 7]),
        ([-1, 2, 1], [-100, 3, 1]),
    ],
    ids=["inside", "of shape (B, 1)", "clamped beyond", "clamped below"],
)
@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("name", ANSWERERS)
def test_spans(name, padding, starts, ends):
    stock, model = pair(name)
    inputs = inputs_of(name, padding)
    positions = {"start_positions": torch.tensor(starts), "end_positions": torch.tensor(ends)}
    output = assert_same(model, stock, {**inputs, **{key: value.clone() for key, value in positions.items()}})
    assert output.loss.isfinite()
    given = {key: value.clone() for key, value in positions.items()}
    model(**inputs, **given)
    assert all(torch.equal(given[key], positions[key]) for key in given), "positions were written to"
    only_one = model(**inputs, start_positions=positions["start_positions"])
    assert only_one.loss is None


@pytest.mark.parametrize("name", ANSWERERS[:2])
def test_question_answering_reads_the_number_of_labels(name):
    stock, model = pair(name, num_labels=2)
    assert model.qa_outputs.weight.shape == stock.qa_outputs.weight.shape == (2, 24)


@pytest.mark.parametrize("name", MASKED_LM)
def test_masked_lm_with_every_label_ignored(name):
    stock, model = pair(name)
    inputs = {**inputs_of(name, "right"), "labels": torch.full((3, 7), -100)}
    if name == "BertForPreTraining":
        inputs["next_sentence_label"] = torch.tensor([0, 1, 1])
    got, wanted = model(**inputs), stock(**inputs)
    assert got.loss.isnan() == wanted.loss.isnan()
    assert got.loss.isnan()


def test_pre_training_loss_needs_both_labels():
    _, model = pair("BertForPreTraining")
    inputs, labels = inputs_of("BertForPreTraining"), labels_of("BertForPreTraining")
    assert model(**inputs, labels=labels["labels"]).loss is None
    assert model(**inputs, next_sentence_label=labels["next_sentence_label"]).loss is None


@pytest.mark.parametrize("name", [name for name in ALL_HEADS if "MultipleChoice" not in name])
def test_inputs_embeds_and_their_gradient(name):
    stock, model = pair(name)
    mask = mask_of("holes")
    inputs = inputs_of(name, mask)
    del inputs["input_ids"]
    embeds = torch.randn(3, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    mine, theirs = (embeds.clone().requires_grad_() for _ in range(2))
    assert_same(
        model,
        stock,
        {**inputs, "inputs_embeds": mine},
        rows=mask,
        stock_inputs={**inputs, "inputs_embeds": theirs},
    )
    assert_close(mine.grad, theirs.grad, "inputs_embeds")
    assert mine.grad[mask.bool()].abs().min() > 0
    assert torch.equal(mine.detach(), embeds)


def test_multiple_choice_takes_inputs_embeds():
    for name in (head for head in ALL_HEADS if "MultipleChoice" in head):
        stock, model = pair(name)
        inputs = inputs_of(name, "right")
        del inputs["input_ids"]
        inputs["inputs_embeds"] = torch.randn(3, 2, 7, 24, dtype=torch.float64)
        assert_same(model, stock, inputs)


@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_position_ids(name, padding):
    stock, model = pair(name)
    inputs = inputs_of(name, padding)
    rows = None if padding is None else mask_of(padding)
    default = model(**inputs).last_hidden_state
    for positions in (torch.arange(7).flip(0).view(1, 7), torch.randint(0, 22, (3, 7))):
        output = assert_same(model, stock, {**inputs, "position_ids": positions}, rows=rows)
        assert (output.last_hidden_state - default)[0].abs().min() > 0


@pytest.mark.parametrize("name", [name for name in ALL_HEADS if family_of(name) != "distilbert"])
def test_token_types_present_and_absent(name):
    stock, model = pair(name)
    inputs = inputs_of(name, "holes")
    typed = assert_same(model, stock, inputs, rows=mask_of("holes"))
    types = inputs.pop("token_type_ids")
    untyped = assert_same(model, stock, inputs, rows=mask_of("holes"))
    zeros = model(**inputs, token_type_ids=torch.zeros_like(types))
    for key in typed:
        assert (typed[key] - untyped[key]).abs().max() > 1e-6
        assert_close(zeros[key], untyped[key], key)


@pytest.mark.parametrize("name", ["XLMRobertaModel", "CamembertModel", "XLMRobertaForMaskedLM", "CamembertForMaskedLM"])
@pytest.mark.parametrize("padding", [None, "right", "holes"])
def test_xlm_roberta_and_camembert_are_roberta(name, padding):
    stock, model = pair(name)
    assert type(model).__name__.startswith("Roberta")
    assert model.config.model_type == stock.config.model_type
    assert_same(model, stock, inputs_of(name, padding), rows=None if padding is None else mask_of(padding))


@pytest.mark.parametrize("name", ["RobertaModel", "RobertaForMaskedLM"])
@pytest.mark.parametrize("padding_token", [0, 1, 5])
def test_positions_of_roberta_count_what_is_not_padding(name, padding_token):
    stock, model = pair(name, pad_token_id=padding_token)
    ids = torch.randint(2, 61, (3, 7))
    ids[0, 2], ids[1, 4:], ids[2, :3] = padding_token, padding_token, padding_token
    # Without a mask, and with one that does not follow the padding tokens: positions follow the ids.
    assert_same(model, stock, {"input_ids": ids})
    assert_same(model, stock, {"input_ids": ids, "attention_mask": mask_of("left")}, rows=mask_of("left"))
    embeds = torch.randn(3, 7, 24, dtype=torch.float64)
    assert_same(model, stock, {"inputs_embeds": embeds})


def test_positions_of_roberta_survive_a_smaller_vocabulary():
    stock, model = pair("RobertaModel", pad_token_id=5)
    stock.resize_token_embeddings(4), model.resize_token_embeddings(4)
    ids = torch.randint(0, 4, (3, 7))
    assert_same(model, stock, {"input_ids": ids})
    model.set_input_embeddings(torch.nn.Embedding(9, 24, dtype=torch.float64))
    stock.set_input_embeddings(model.get_input_embeddings())
    assert_close(model(ids).last_hidden_state, stock(ids).last_hidden_state, "last_hidden_state")


def test_a_smaller_vocabulary_survives_a_round_trip(tmp_path):
    _, model = pair("RobertaModel", pad_token_id=5)
    model.resize_token_embeddings(4)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    ids = torch.tensor([[0, 3, 1]])
    assert torch.equal(loaded(ids).last_hidden_state, model(ids).last_hidden_state)


def test_roberta_without_a_padding_token_needs_positions():
    config = configuration.RobertaConfig(**{**tiny_stock_config("RobertaModel").to_dict(), "pad_token_id": None})
    model = ours("RobertaModel")(config)
    with pytest.raises(ValueError, match="pad_token_id"):
        model(torch.zeros(1, 3, dtype=torch.int64))
    assert model(torch.zeros(1, 3, dtype=torch.int64), position_ids=torch.arange(3)[None])[0].shape == (1, 3, 24)


@pytest.mark.parametrize("name", ALL_HEADS)
def test_our_configuration_and_that_of_transformers_build_the_same_model(name):
    theirs = tiny_stock_config(name, num_labels=2)
    own = configuration.config_for(theirs.to_dict())
    torch.manual_seed(0)
    first = ours(name)(theirs).state_dict()
    torch.manual_seed(0)
    second = ours(name)(own).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ALL_HEADS)
def test_parameter_names_are_those_of_transformers(name):
    stock, model = pair(name)
    names = [{key for key, _ in one.named_parameters(remove_duplicate=False)} for one in (model, stock)]
    assert names[0] == names[1] == set(model.state_dict())


@pytest.mark.parametrize("name", ALL_HEADS)
def test_dropout_rates_and_their_places(name):
    fields = {"hidden_dropout_prob": 0.125, "attention_probs_dropout_prob": 0.25, "classifier_dropout": 0.375}
    if family_of(name) == "distilbert":
        fields = {"dropout": 0.125, "attention_dropout": 0.25, "qa_dropout": 0.375, "seq_classif_dropout": 0.5}
    config = tiny_stock_config(name, **fields)
    stock, model = getattr(transformers, name)(config), ours(name)(config)

    def head_dropouts(one):
        return [m.p for key, m in one.named_modules() if isinstance(m, torch.nn.Dropout) and "." not in key] + [
            m.p for key, m in one.named_modules() if key == "classifier.dropout"
        ]

    if family_of(name) == "distilbert":
        assert sorted(head_dropouts(model)) == sorted(head_dropouts(stock))
    else:
        assert head_dropouts(model) == head_dropouts(stock)
    encoder = getattr(model.base_model, model.base_model.encoder_name)
    assert model.base_model.embeddings.dropout == 0.125
    for layer in encoder.layer:
        assert layer.attention_dropout == 0.25
        assert [m.dropout for m in layer.modules() if type(m).__name__ == "FusedAddLayerNorm"] == [0.125, 0.125]


PARAMETERS = {
    "bert-base": ("BertModel", 109_482_240),
    "bert-large": ("BertModel", 335_141_888),
    "roberta-base": ("RobertaModel", 124_645_632),
    "roberta-large": ("RobertaModel", 355_359_744),
    "distilbert-base": ("DistilBertModel", 66_362_880),
}


@pytest.mark.parametrize("preset", PARAMETERS)
def test_parameters_of_the_presets(preset):
    name, wanted = PARAMETERS[preset]
    config = PRESETS[preset]()
    with torch.device("meta"):
        model = ours(name)(config)
    assert model.num_parameters() == wanted
    with torch.device("meta"):
        stock = getattr(transformers, name)(getattr(transformers, name).config_class(**config.to_dict()))
    assert stock.num_parameters() == wanted


def test_parameters_of_every_part_of_bert_base():
    with torch.device("meta"):
        model = ours("BertModel")(PRESETS["bert-base"]())

    def count(*parts):
        return sum(parameter.numel() for part in parts for parameter in part.parameters())

    layer = model.encoder.layer[0]
    assert count(model.embeddings) == 23_837_184
    assert count(layer.attention) == 2_363_904
    assert count(layer.intermediate, layer.output) == 4_723_968
    assert count(layer) == 7_087_872
    assert count(model.encoder) == 85_054_464
    assert count(model.pooler) == 590_592
    assert len(model.encoder.layer) == 12


def test_presets_are_complete():
    assert set(PRESETS) == set(PARAMETERS)
    assert all(isinstance(PRESETS[preset], (type, functools.partial)) for preset in PRESETS)
    assert sum(len(heads) for heads in HEADS.values()) == 20


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_of_no_rows_and_of_no_tokens(name):
    stock, model = pair(name)
    for shape in ((0, 5), (2, 0)):
        ids = torch.zeros(shape, dtype=torch.int64)
        for mask in (None, torch.ones(shape, dtype=torch.int64)):
            if name == "BertModel" and shape[1] == 0:
                continue  # there is no first token to pool
            if name == "RobertaModel" and shape[1] == 0:
                continue
            assert model(ids, attention_mask=mask).last_hidden_state.shape == (*shape, 24)
    one = torch.tensor([[4]])
    assert_same(model, stock, {"input_ids": one, "attention_mask": torch.ones(1, 1, dtype=torch.int64)})


def test_no_tokens_without_a_pooler():
    for name in ("BertForTokenClassification", "RobertaForMaskedLM", "DistilBertForQuestionAnswering"):
        _, model = pair(name)
        ids = torch.zeros(2, 0, dtype=torch.int64)
        for mask in (None, torch.ones_like(ids)):
            output = model(ids, attention_mask=mask)
            assert output[0].shape[:2] == (2, 0)
            output[0].sum().backward()
