"""Edits that users make to modules of a swapped model: settings, buffers, parts and forwards of their own."""

from __future__ import annotations

import copy
import functools
from types import MethodType

import pytest
import torch
import transformers
from torch import nn

import bertfast
from helpers.checkpoints import family_of, tiny_stock
from helpers.models import NO_DROPOUT, assert_close, assert_same, inputs_of, labels_of, mask_of
from helpers.swap import stock_and_swapped, traces_of_swap

BASES = ["BertModel", "RobertaModel", "DistilBertModel"]


def attentions(model: nn.Module) -> list[nn.Module]:
    """The modules around query, key and value."""
    return [module for module in model.modules() if type(module).__name__.endswith("SelfAttention")]


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("kind", ["right", "full"])
def test_a_changed_scale_of_scores(name, kind, packed_runs):
    stock, swapped = stock_and_swapped(name)
    for model in (stock, swapped):
        for number, core in enumerate(attentions(model)):
            core.scaling = 2.5 + number
    assert_same(swapped, stock, inputs_of(name, kind), rows=mask_of(kind))
    assert packed_runs.since() == (kind == "right")


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("kind", ["right", "full"])
def test_fewer_heads_than_the_width_has(name, kind):
    """As heads are pruned: projections of two heads out of three."""
    stock, swapped = stock_and_swapped(name)
    for model in (stock, swapped):
        for module in list(model.modules()):
            for key, linear in list(module._modules.items()):
                if key in ("query", "key", "value", "q_lin", "k_lin", "v_lin"):
                    linear.weight, linear.bias = (
                        nn.Parameter(t.data[:16].clone()) for t in (linear.weight, linear.bias)
                    )
                elif key == "out_lin" or (key == "dense" and type(module).__name__.endswith("SelfOutput")):
                    linear.weight = nn.Parameter(linear.weight.data[:, :16].clone())
    assert_same(swapped, stock, inputs_of(name, kind), rows=mask_of(kind))


def test_narrower_heads():
    stock, swapped = stock_and_swapped("BertModel")
    for model in (stock, swapped):
        for core in attentions(model):
            core.attention_head_size, core.scaling = 4, 0.5
    assert_same(swapped, stock, inputs_of("BertModel", "right"), rows=mask_of("right"))


@pytest.mark.parametrize("name", BASES)
def test_dropout_of_probabilities_follows_the_attention(name):
    """Stock never calls the module; only its probability is read, while the attention around it trains."""
    places = {"attention_probs_dropout_prob": 0.5} if "Distil" not in name else {"attention_dropout": 0.5}
    stock, swapped = stock_and_swapped(name, **places)
    inputs = inputs_of(name, "right")
    for model in (stock, swapped):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train()
    assert_same(swapped, stock, inputs, rows=mask_of("right"))
    for model in (stock, swapped):
        for module in model.modules():
            module.training = not isinstance(module, nn.Dropout)
        assert not torch.equal(model(**inputs)[0], model(**inputs)[0])
    for model in (stock, swapped):
        for core in attentions(model):
            core.dropout.p = 0.0
    assert_same(swapped, stock, inputs, rows=mask_of("right"))


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "BertForMaskedLM"])
def test_token_types_come_from_the_buffer(name):
    stock, swapped = stock_and_swapped(name)
    inputs = inputs_of(name, "right", types=False)
    positions = torch.arange(7).flip(0)[None] + 2
    for model in (stock, swapped):
        model.base_model.embeddings.token_type_ids[:, 2::2] = 1
    for more in ({}, {"position_ids": positions}, {"position_ids": positions.expand(3, 7)}):
        assert_same(swapped, stock, {**inputs, **more}, rows=mask_of("right"))
    assert_same(swapped, stock, inputs_of(name, "right"), rows=mask_of("right"))
    for model in (stock, swapped):
        del model.base_model.embeddings.token_type_ids
    assert_same(swapped, stock, inputs, rows=mask_of("right"))


def test_positions_without_their_buffer():
    stock, swapped = stock_and_swapped("DistilBertModel")
    for model in (stock, swapped):
        del model.embeddings.position_ids
    assert_same(swapped, stock, inputs_of("DistilBertModel", "right"), rows=mask_of("right"))


@pytest.mark.parametrize("table", ["word_embeddings", "position_embeddings", "token_type_embeddings"])
def test_a_row_of_any_table_without_gradient(table):
    stock, swapped = stock_and_swapped("BertModel")
    for row in (None, 1):
        for model in (stock, swapped):
            model.embeddings.get_submodule(table).padding_idx = row
        assert_same(swapped, stock, inputs_of("BertModel", "right"), rows=mask_of("right"))


def test_a_pooler_of_ones_own_reads_any_row(packed_runs):
    class Mean(nn.Module):
        def forward(self, hidden_states):
            return hidden_states.mean(1)

    stock, swapped = stock_and_swapped("BertModel")
    stock.pooler = swapped.pooler = Mean()
    assert_same(swapped, stock, inputs_of("BertModel", "right"))
    assert packed_runs.since() == 0


def test_labels_of_another_size_get_stocks_error():
    stock, swapped = stock_and_swapped("BertForTokenClassification")
    for model in (stock, swapped):
        with pytest.raises(ValueError, match="batch_size"):
            model(**inputs_of("BertModel", "right"), labels=torch.zeros(3, 6, dtype=torch.int64))


def given_to(module: nn.Module) -> dict:
    """What the next call passes to a module by name, behind every pre-hook."""
    found: dict = {}
    module.register_forward_pre_hook(lambda module, args, kwargs: found.update(kwargs), with_kwargs=True)
    return found


@pytest.mark.parametrize("path", ["", "bert"])
def test_a_forward_of_ones_own_gets_its_arguments_and_no_more(path, packed_runs):
    name = "BertForTokenClassification"
    stock, swapped = stock_and_swapped(name)
    for model in (stock, swapped):
        module = model.get_submodule(path)

        def forward(input_ids, attention_mask=None, token_type_ids=None, return_dict=None, module=module, **positions):
            assert attention_mask.shape == (3, 7) and not any(positions.values())
            return type(module).forward(module, input_ids, attention_mask, token_type_ids)

        module.forward = forward
    assert_same(swapped, stock, inputs_of(name, "right"), rows=mask_of("right"))
    for model in (stock, swapped):
        del model.get_submodule(path).forward
    packed_runs.since()
    assert_same(swapped, stock, inputs_of(name, "right"), rows=mask_of("right"))
    assert packed_runs.since() == 1


@pytest.mark.parametrize("path", ["", "bert"])
def test_a_forward_that_wraps_the_models_runs_packed(path, packed_runs):
    """As mixed precision and offloading put one on the instance."""
    name = "BertForTokenClassification"
    stock, swapped = stock_and_swapped(name)
    for model in (stock, swapped):
        module = model.get_submodule(path)
        module.forward = MethodType(torch.autocast("cpu", enabled=False)(module.forward.__func__), module)
        old = module.forward
        module.forward = functools.update_wrapper(
            functools.partial(lambda *args, old=old, **kwargs: old(*args, **kwargs)), old
        )
    assert_same(swapped, stock, {**inputs_of(name, "right"), **labels_of(name, "right")}, rows=mask_of("right"))
    assert packed_runs.since() == 1


class Narrow(transformers.BertModel):
    """Takes none but its own arguments."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        return_dict=None,
    ):
        return super().forward(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)


class Around(nn.Module):
    """A base model inside another module, which takes none but these arguments either."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict):
        return self.base(input_ids, attention_mask, token_type_ids)


def narrowed(model: nn.Module) -> nn.Module:
    base = Narrow(model.config, add_pooling_layer=False).to(model.dtype).eval()
    base.load_state_dict(model.bert.state_dict())
    model.bert = base
    return model


@pytest.mark.parametrize("name", ["BertForTokenClassification", "BertForQuestionAnswering"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_base_model_of_ones_own_under_a_head(name, when):
    stock = tiny_stock(name, **NO_DROPOUT[family_of(name)]).double()
    swapped = copy.deepcopy(stock)
    if when == "after":
        bertfast.accelerate(swapped)
    stock, swapped = narrowed(stock), narrowed(swapped)
    if when == "before":
        assert "bert" in bertfast.accelerate(swapped).left
    assert_same(swapped, stock, inputs_of(name, "right"))
    bertfast.restore(swapped)
    assert not traces_of_swap(swapped)
    stock, swapped = stock_and_swapped(name)
    stock.bert, swapped.bert = Around(stock.bert), Around(swapped.bert)
    assert_close(swapped(**inputs_of(name, "right"))[0], stock(**inputs_of(name, "right"))[0], "logits")


@pytest.mark.parametrize("name", ["BertForTokenClassification", "DistilBertForQuestionAnswering"])
def test_a_restored_base_model_is_told_nothing(name):
    stock, swapped = stock_and_swapped(name)
    bertfast.restore(swapped.base_model)
    found = given_to(swapped.base_model)
    assert_same(swapped, stock, inputs_of(name, "right"))
    assert not [key for key in found if key.startswith("bertfast")]


class Blocks:
    """A mask that is no tensor, as flex attention has."""

    def __init__(self, mask):
        self.mask = mask


def attend_blocks(module, query, key, value, attention_mask, **kwargs):
    mask = None if attention_mask is None else attention_mask.mask[:, None, None].bool()
    context = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=kwargs["scaling"])
    return context.transpose(1, 2), None


@pytest.mark.parametrize("name", BASES)
def test_attention_whose_mask_is_no_tensor_stays_stock(name, packed_runs):
    transformers.AttentionInterface.register("blocks", attend_blocks)
    transformers.AttentionMaskInterface.register(
        "blocks", lambda *args, attention_mask=None, **kwargs: Blocks(attention_mask)
    )
    stock, swapped = stock_and_swapped(name)
    for attention in ("blocks", "sdpa"):
        for model in (stock, swapped):
            model.set_attn_implementation(attention)
        assert_same(swapped, stock, inputs_of(name, "right"), rows=mask_of("right"))
        assert packed_runs.since() == (attention == "sdpa")
