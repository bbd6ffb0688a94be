"""Whatever a user attaches to a module of a swapped model, before or after the swap, works as it does in stock."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import bertfast
from helpers.checkpoints import family_of, tiny_stock
from helpers.models import NO_DROPOUT, assert_close, assert_same, assert_same_gradients, inputs_of, labels_of, mask_of
from helpers.swap import run, stock_and_swapped, traces_of_swap

NAMES = ["BertModel", "DistilBertModel"]
# Reading the parameters of these would pass by what is attached to them; calls of others are as good as stock's.
INSIDE = {
    "BertModel": [
        "encoder",
        "encoder.layer.0",
        "encoder.layer.0.attention",
        "encoder.layer.0.attention.self",
        "encoder.layer.0.attention.self.query",
        "encoder.layer.0.attention.output",
        "encoder.layer.0.attention.output.dense",
        "encoder.layer.0.attention.output.dropout",
        "encoder.layer.0.attention.output.LayerNorm",
        "encoder.layer.0.intermediate",
        "encoder.layer.0.intermediate.dense",
        "encoder.layer.0.intermediate.intermediate_act_fn",
        "encoder.layer.0.output",
        "encoder.layer.0.output.dense",
        "encoder.layer.0.output.dropout",
        "encoder.layer.0.output.LayerNorm",
    ],
    "DistilBertModel": [
        "transformer",
        "transformer.layer.1",
        "transformer.layer.1.attention",
        "transformer.layer.1.attention.k_lin",
        "transformer.layer.1.attention.out_lin",
        "transformer.layer.1.sa_layer_norm",
        "transformer.layer.1.ffn",
        "transformer.layer.1.ffn.lin1",
        "transformer.layer.1.ffn.lin2",
        "transformer.layer.1.ffn.dropout",
        "transformer.layer.1.ffn.activation",
        "transformer.layer.1.output_layer_norm",
    ],
}
OUTSIDE = {
    "BertModel": ["embeddings.word_embeddings", "embeddings.LayerNorm", "embeddings.dropout", "embeddings", "pooler"],
    "DistilBertModel": ["embeddings.position_embeddings", "embeddings.LayerNorm", "embeddings"],
}
EVERYWHERE = [(name, path) for name in NAMES for path in INSIDE[name]]
KINDS = ["forward", "forward pre", "full backward", "full backward pre"]


def attach(module: nn.Module, kind: str, calls: list[torch.Size | None]) -> torch.utils.hooks.RemovableHandle:
    """A hook that writes down the shape of what the module is given or gives, or of its gradient."""

    def shape(value: object) -> torch.Size | None:
        first = value[0] if isinstance(value, tuple) and value else value
        return first.shape if isinstance(first, torch.Tensor) else None

    hooks = {
        "forward": lambda module, args, output: calls.append(shape(output)),
        "forward pre": lambda module, args: calls.append(shape(args)),
        "full backward": lambda module, grads, given: calls.append(shape(given)),
        "full backward pre": lambda module, given: calls.append(shape(given)),
    }
    return getattr(module, f"register_{kind.replace(' ', '_')}_hook")(hooks[kind])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name, path", EVERYWHERE)
def test_hooks_inside_the_encoder_fire_and_rows_are_stocks(name, path, when, packed_runs):
    stock = tiny_stock(name, **NO_DROPOUT[family_of(name)]).double()
    swapped = copy.deepcopy(stock)
    if when == "after":
        bertfast.accelerate(swapped)
    for kind in KINDS[:2] if path.endswith(("encoder", "transformer")) else KINDS:
        calls: dict[str, list] = {"stock": [], "swapped": []}
        handles = [
            attach(m.get_submodule(path), kind, calls[key]) for key, m in zip(calls, (stock, swapped), strict=True)
        ]
        bertfast.accelerate(swapped)
        assert_same(swapped.train(), stock.train(), inputs_of(name, "right"))
        assert len(calls["stock"]) == 1 and calls["stock"] == calls["swapped"], kind
        for handle in handles:
            handle.remove()
    assert packed_runs.since() == 0
    bertfast.accelerate(swapped, strict=True)
    assert_same(swapped, stock, inputs_of(name, "right"), rows=mask_of("right"))
    assert packed_runs.since() == 1


@pytest.mark.parametrize("name, path", [(name, path) for name in NAMES for path in OUTSIDE[name]])
def test_hooks_outside_of_the_encoder_fire(name, path, packed_runs):
    stock, swapped = stock_and_swapped(name)
    calls: dict[str, list] = {"stock": [], "swapped": []}
    for key, model in zip(calls, (stock, swapped), strict=True):
        attach(model.get_submodule(path), "forward", calls[key])
    assert_same(swapped, stock, inputs_of(name, "right"), rows=mask_of("right"))
    assert len(calls["stock"]) == 1 and calls["stock"] == calls["swapped"]
    assert packed_runs.since() == 1


@pytest.mark.parametrize("name", NAMES)
def test_hooks_that_change_results(name):
    stock, swapped = stock_and_swapped(name)
    for path in INSIDE[name][4::4]:
        for model in (stock, swapped):
            model.get_submodule(path).register_forward_hook(lambda module, args, output: output * 1.5)
    assert_same(swapped, stock, inputs_of(name, "right"))


def test_a_hook_on_the_model_sees_and_changes_its_arguments(packed_runs):
    stock, swapped = stock_and_swapped("BertModel")
    bertfast.restore(swapped)

    def mask_more(module, args, kwargs):
        assert kwargs["attention_mask"].shape == (3, 7)
        return args, {**kwargs, "attention_mask": mask_of("right")}

    for model in (stock, swapped):
        model.register_forward_pre_hook(mask_more, with_kwargs=True)
    bertfast.accelerate(swapped)
    assert_same(swapped, stock, inputs_of("BertModel", "full"), rows=mask_of("right"))
    assert packed_runs.since() == 1
    bertfast.restore(swapped)
    assert len(swapped._forward_pre_hooks) == 1 and not traces_of_swap(swapped)
    assert_same(swapped, stock, inputs_of("BertModel", "full"))


def test_a_hook_on_the_model_that_comes_later_does_so_too(packed_runs):
    stock, swapped = stock_and_swapped("BertForTokenClassification")

    def mask_less(module, args, kwargs):
        assert kwargs["attention_mask"].shape == (3, 7)
        return args, {**kwargs, "attention_mask": mask_of("right")}

    def label_more(module, args, kwargs):
        return args, {**kwargs, "labels": torch.ones_like(kwargs["labels"])}

    inputs = {**inputs_of("BertModel", "left"), **labels_of("BertForTokenClassification", "left")}
    handles = [model.register_forward_pre_hook(label_more, with_kwargs=True) for model in (stock, swapped)]
    assert_same(swapped, stock, inputs)
    for handle in handles:
        handle.remove()
    for model in (stock, swapped):
        model.bert.register_forward_pre_hook(mask_less, with_kwargs=True)
    assert_same(swapped, stock, inputs)
    assert packed_runs.since() == 0


@pytest.mark.parametrize("place", ["keyword", "positional"])
@pytest.mark.parametrize("name", NAMES)
def test_a_hook_behind_the_model_sees_its_mask(name, place, packed_runs):
    def mean(module, args, kwargs, output):
        mask = args[1] if len(args) > 1 else kwargs["attention_mask"]
        return (output.last_hidden_state * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    stock, swapped = stock_and_swapped(name)
    inputs = inputs_of(name, "right", types=False)
    for model in (stock, swapped):
        model.register_forward_hook(mean, with_kwargs=True)
    got, wanted = (m(**inputs) if place == "keyword" else m(*inputs.values()) for m in (swapped, stock))
    assert_close(got, wanted, "means")
    assert packed_runs.since() == 1


def test_hooks_on_all_modules(packed_runs):
    stock, swapped = stock_and_swapped("BertModel")
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, output: seen.append(type(m).__name__))
    try:
        run(stock)
        wanted, seen[:] = list(seen), []
        assert_same(swapped, stock, inputs_of("BertModel", "right"))
        assert seen[: len(wanted)] == wanted
    finally:
        handle.remove()
    assert packed_runs.since() == 0


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * 1.25


@pytest.mark.parametrize("path", ["attention.self.value", "attention.output.LayerNorm", "output.dense"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_parametrised_weights(path, when):
    stock, swapped = stock_and_swapped("BertModel")
    bertfast.restore(swapped)
    if when == "after":
        bertfast.accelerate(swapped)
    for model in (stock, swapped):
        parametrize.register_parametrization(model.encoder.layer[0].get_submodule(path), "weight", Scaled())
    bertfast.accelerate(swapped)
    assert_same(swapped, stock, inputs_of("BertModel", "right"), rows=mask_of("right"))


def offload(module: nn.Module, calls: list[str]) -> None:
    """As accelerate's hooks replace a forward on the instance."""
    module._hf_hook = object()
    module._old_forward = module.forward

    def forward(module, *args, **kwargs):
        calls.append(type(module).__name__)
        return module._old_forward(*args, **kwargs)

    module.forward = functools.update_wrapper(functools.partial(forward, module), module._old_forward)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kinds", [(nn.Linear,), (nn.LayerNorm,), (nn.Embedding, nn.Dropout), (nn.Module,)])
def test_offloaded_modules_are_called(kinds, when):
    stock, swapped = stock_and_swapped("BertModel")
    bertfast.restore(swapped)
    if when == "after":
        bertfast.accelerate(swapped)
    calls: dict[str, list] = {"stock": [], "swapped": []}
    for key, model in zip(calls, (stock, swapped), strict=True):
        for path, module in model.named_modules():
            if path and isinstance(module, kinds) and not isinstance(module, nn.ModuleList):
                offload(module, calls[key])
    bertfast.accelerate(swapped)
    assert_same(swapped, stock, inputs_of("BertModel", "right"), rows=mask_of("right"))
    assert calls["stock"] == calls["swapped"] != []


def test_a_layer_of_another_kind_runs_stock_around_it(packed_runs):
    class Half(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, hidden_states, *args, **kwargs):
            return self.layer(hidden_states, *args, **kwargs) * 0.5

    stock, swapped = stock_and_swapped("BertModel")
    for model in (stock, swapped):
        model.encoder.layer[0] = Half(model.encoder.layer[0])
    assert_same(swapped, stock, inputs_of("BertModel", "right"))
    assert packed_runs.since() == 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_layer_that_cannot_be_fused_any_more_gives_the_same_rows(attention, packed_runs):
    stock, swapped = stock_and_swapped("BertModel", attention=attention)
    for model in (stock, swapped):
        old = model.encoder.layer[1].output.LayerNorm
        model.encoder.layer[1].output.LayerNorm = nn.Sequential(old, nn.Tanh())
    hidden = assert_same(swapped, stock, inputs_of("BertModel", "right"), rows=mask_of("right"))["last_hidden_state"]
    assert not hidden[mask_of("right") == 0].any()
    assert packed_runs.since() == 0


def test_a_part_in_eval_mode_does_not_drop():
    stock, swapped = stock_and_swapped("BertModel", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    for model in (stock, swapped):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.eval()
        for layer in model.encoder.layer:
            layer.attention.self.eval()
    assert_same(swapped, stock, inputs_of("BertModel", "right"), rows=mask_of("right"))


def test_replaced_parameters_are_seen():
    stock, swapped = stock_and_swapped("BertModel")
    run(swapped)
    for model in (stock, swapped):
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.encoder.parameters():
                parameter.mul_(1.1)
        model.encoder.layer[0].intermediate.dense.weight = nn.Parameter(torch.randn(40, 24, dtype=torch.float64))
        model.embeddings.word_embeddings.weight.data.add_(0.5)
    assert_same(swapped, stock, inputs_of("BertModel", "right"), rows=mask_of("right"))


@pytest.mark.parametrize("name", NAMES)
def test_functional_calls_and_transforms(name):
    stock, swapped = stock_and_swapped(name)
    inputs, mask = inputs_of(name, "right"), mask_of("right").bool()
    other = {key: tensor * 1.5 for key, tensor in swapped.named_parameters()}

    def loss(parameters, model):
        hidden = torch.func.functional_call(model, parameters, kwargs=inputs).last_hidden_state
        return (hidden * mask[..., None]).square().sum()

    assert_close(loss(other, swapped), loss(other, stock), "loss")
    got, wanted = (torch.func.grad(loss)(other, model) for model in (swapped, stock))
    for key in wanted:
        assert_close(got[key], wanted[key], key)


def test_frozen_parts_get_no_gradient():
    stock, swapped = stock_and_swapped("BertModel")
    for model in (stock, swapped):
        model.embeddings.requires_grad_(False)
        model.encoder.layer[0].requires_grad_(False)
        model.zero_grad()
        model(**inputs_of("BertModel", "right")).pooler_output.square().sum().backward()
    assert_same_gradients(swapped, stock)
