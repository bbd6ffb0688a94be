"""Adapters of peft on swapped models, put on before and after the swap."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from torch import nn

import bertfast
from helpers.checkpoints import family_of, tiny_stock
from helpers.models import NO_DROPOUT, assert_close, assert_same, gradients, inputs_of, labels_of
from helpers.swap import traces_of_swap, types_of

HEADS = ["BertForSequenceClassification", "RobertaForTokenClassification", "DistilBertForQuestionAnswering"]
TARGETS = {
    "bert": ["query", "value", "dense"],
    "roberta": ["query", "value", "dense"],
    "distilbert": ["q_lin", "v_lin", "out_lin", "lin1"],
}
WHEN = pytest.mark.parametrize("when", ["before", "after"])
NAME = pytest.mark.parametrize("name", HEADS)


def adapted(model: nn.Module, name: str, **fields: object) -> peft.PeftModel:
    config = peft.LoraConfig(r=3, target_modules=TARGETS[family_of(name)], init_lora_weights=False, **fields)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config).double()


def stock_and_swapped(name: str, when: str) -> tuple[peft.PeftModel, peft.PeftModel]:
    """An adapted stock model, and the same with the swap before or after its adapters."""
    model = tiny_stock(name, **NO_DROPOUT[family_of(name)]).double()
    stock = adapted(copy.deepcopy(model), name).eval()
    if when == "after":
        assert bertfast.accelerate(model)
    swapped = adapted(model, name).eval()
    if when == "before":
        assert bertfast.accelerate(swapped)
    return stock, swapped


def same(swapped: nn.Module, stock: nn.Module, name: str) -> torch.Tensor:
    for mask in (None, "right", "left", "holes"):
        inputs = inputs_of(name, mask, types=False)
        for key, value in stock(**inputs).items():
            rows = inputs.get("attention_mask")
            keep = None if rows is None or value.shape[:2] != rows.shape else rows.bool()
            mine = swapped(**inputs)[key]
            assert_close(*((t if keep is None else t[keep]) for t in (mine, value)), key)
    return value


@WHEN
@NAME
def test_adapters_count(name, when):
    stock, swapped = stock_and_swapped(name, when)
    with_adapters = same(swapped, stock, name)
    with stock.disable_adapter(), swapped.disable_adapter():
        assert not torch.allclose(same(swapped, stock, name), with_adapters)
    same(swapped, stock, name)


@WHEN
@NAME
def test_merged_and_unmerged(name, when):
    stock, swapped = stock_and_swapped(name, when)
    with torch.no_grad():
        for change in ("merge_adapter", "unmerge_adapter", "merge_adapter"):
            for model in (stock, swapped):
                getattr(model, change)()
            same(swapped, stock, name)
        stock, swapped = stock.merge_and_unload(), swapped.merge_and_unload()
        same(swapped, stock, name)
    assert type(swapped).__name__ == name and not any("lora" in key for key in swapped.state_dict())
    bertfast.restore(swapped)
    assert types_of(swapped) == types_of(stock) and not traces_of_swap(swapped)


@WHEN
@NAME
def test_adapters_learn(name, when):
    stock, swapped = (model.train() for model in stock_and_swapped(name, when))
    before = {key: value.clone() for key, value in swapped.state_dict().items()}
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05) for m in (stock, swapped)]
    for step in range(3):
        inputs = {**inputs_of(name, "right", seed=step, types=False), **labels_of(name, "right", seed=step)}
        for model, optimizer in zip((stock, swapped), optimizers, strict=True):
            optimizer.zero_grad()
            model(**inputs).loss.backward()
        mine, theirs = gradients(swapped), gradients(stock)
        assert mine.keys() == theirs.keys() and all("lora" in key for key in mine)
        for key in theirs:
            assert_close(mine[key], theirs[key], key)
        for optimizer in optimizers:
            optimizer.step()
    for key, value in swapped.state_dict().items():
        assert torch.equal(value, before[key]) != ("lora" in key), key


@WHEN
@NAME
def test_rows_that_a_head_uses_are_those_of_stock(name, when):
    """Adapters call the head's forward past its hooks: first tokens, labels and answers on padding."""
    stock, swapped = stock_and_swapped(name, when)
    for mask in ("right", "left"):
        inputs = {**inputs_of(name, mask, types=False), **labels_of(name)}
        if "QuestionAnswering" in name:
            inputs["start_positions"] = inputs["end_positions"] = torch.tensor([6, 5, 4])
        assert_same(swapped, stock, inputs)


def test_padding_is_not_computed(packed_runs):
    name = "BertForSequenceClassification"
    _, swapped = stock_and_swapped(name, "before")
    swapped(**inputs_of(name, "right"))
    assert packed_runs.since() == 1


def test_a_base_model_with_adapters(packed_runs):
    stock, swapped = stock_and_swapped("DistilBertModel", "before")
    inputs = inputs_of("DistilBertModel", "right")
    keep = inputs["attention_mask"].bool()
    assert_close(swapped(**inputs)[0][keep], stock(**inputs)[0][keep], "rows")


@pytest.mark.parametrize("name", HEADS[:1])
@pytest.mark.parametrize("kind", ["prompt", "prefix", "ia3"])
def test_other_adapters(name, kind):
    configs = {
        "prompt": lambda: peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
        "prefix": lambda: peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
        "ia3": lambda: peft.IA3Config(
            target_modules=["key", "value", "dense"], feedforward_modules=["dense"], init_ia3_weights=False
        ),
    }
    model = tiny_stock(name, **NO_DROPOUT["bert"]).double()
    models = []
    for one in (copy.deepcopy(model), model):
        torch.manual_seed(1)
        models.append(peft.get_peft_model(one, configs[kind]()).double().eval())
    stock, swapped = models
    assert bertfast.accelerate(swapped)
    for mask in ("right", "left"):
        inputs = {**inputs_of(name, mask), **labels_of(name)}
        try:
            expected = stock(**inputs)
        except Exception as error:
            pytest.skip(f"stock cannot: {type(error).__name__}: {error}")
        assert_close(swapped(**inputs).logits, expected.logits, "logits")


def test_adapters_are_saved_as_stock(tmp_path):
    name = HEADS[0]
    stock, swapped = stock_and_swapped(name, "before")
    for kind, model in (("ours", swapped), ("stock", stock)):
        model.save_pretrained(tmp_path / kind)
    loaded = peft.PeftModel.from_pretrained(tiny_stock(name, **NO_DROPOUT["bert"]).double(), tmp_path / "ours")
    same(loaded.double().eval(), stock, name)
    assert "bertfast" not in (tmp_path / "ours" / "adapter_config.json").read_text()


@NAME
def test_restored_below_adapters(name):
    stock, swapped = stock_and_swapped(name, "after")
    report = bertfast.restore(swapped)
    assert report and not report.left
    assert types_of(swapped) == types_of(stock) and not traces_of_swap(swapped)
    same(swapped, stock, name)
