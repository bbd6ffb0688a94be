"""Swapped models inside wrappers: DataParallel, DDP, FSDP2, the hooks of accelerate."""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
import torch.multiprocessing
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bertfast
from helpers.distributed import assert_trains_alike, layers_of, process_group, run, sharded, stock_model
from helpers.models import assert_close, assert_same, inputs_of, labels_of
from helpers.swap import stock_and_swapped, traces_of_swap, types_of

NAMES = ["BertForTokenClassification", "DistilBertForTokenClassification"]
WHEN = pytest.mark.parametrize("when", ["before", "after"])


@pytest.fixture
def group(tmp_path):
    with process_group(tmp_path / "store"):
        yield


def wrapped_pair(wrap, when: str, name: str) -> tuple[nn.Module, nn.Module]:
    """A stock model and a swapped one in the same wrapper, the swap before or after the wrapping."""
    stock = stock_model(name)
    swapped = copy.deepcopy(stock)
    if when == "before":
        assert bertfast.accelerate(swapped)
    stock, swapped = wrap(stock), wrap(swapped)
    if when == "after":
        bertfast.accelerate(swapped)
    return stock, swapped


@WHEN
@pytest.mark.parametrize("name", NAMES)
def test_ddp(name, when, group, packed_runs):
    stock, swapped = wrapped_pair(DistributedDataParallel, when, name)
    assert_trains_alike(swapped, stock, name)
    assert packed_runs.since() == 2
    bertfast.restore(swapped)
    assert types_of(swapped) == types_of(stock) and not traces_of_swap(swapped)
    assert_trains_alike(swapped, stock, name)


@WHEN
@pytest.mark.parametrize("name", NAMES)
def test_fsdp2(name, when, group):
    stock, swapped = wrapped_pair(sharded, when, name)
    assert_trains_alike(swapped, stock, name)
    assert list(swapped.state_dict()) == list(stock.state_dict())


def test_restore_leaves_what_was_sharded_since_the_swap(group):
    stock, swapped = wrapped_pair(sharded, "before", NAMES[0])
    report = bertfast.restore(swapped)
    left = [name for name, module in swapped.named_modules() if module in set(layers_of(swapped))]
    assert set(report.left) == set(left)
    assert_trains_alike(swapped, stock, NAMES[0])


def test_what_was_sharded_before_the_swap_is_left_with_a_reason(group):
    model = sharded(stock_model(NAMES[0]))
    report = bertfast.accelerate(model)
    layers = {name for name, module in model.named_modules() if module in set(layers_of(model))}
    assert layers <= set(report.left)


@pytest.mark.slow
def test_in_two_processes(tmp_path):
    torch.multiprocessing.spawn(run, args=(2, tmp_path / "store"), nprocs=2)


def replica_of(module: nn.Module, change: float) -> nn.Module:
    """As DataParallel replicates: parameters are plain tensors computed from the original's, here `change` times."""
    replica = module._replicate_for_data_parallel()
    replica._former_parameters = {}
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else replica_of(child, change)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            setattr(replica, name, parameter * change)
            replica._former_parameters[name] = getattr(replica, name)
    return replica


@pytest.mark.parametrize("name", NAMES)
def test_replicas_of_dataparallel(name):
    stock, swapped = stock_and_swapped(name)
    inputs = {**inputs_of(name, "right"), **labels_of(name, "right")}
    swapped(**inputs)
    for change in (1.0, 0.5):
        mine, theirs = (replica_of(model, change) for model in (swapped, stock))
        assert_close(mine(**inputs).loss, theirs(**inputs).loss, "loss")
        for replica in (mine, theirs):
            replica(**inputs).loss.backward()
        for (key, parameter), other in zip(swapped.named_parameters(), stock.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None), key
            if other.grad is not None:
                assert_close(parameter.grad, other.grad, key)


@WHEN
def test_dataparallel_on_the_cpu(when, packed_runs):
    stock, swapped = wrapped_pair(nn.DataParallel, when, NAMES[0])
    inputs = {**inputs_of(NAMES[0], "right"), **labels_of(NAMES[0], "right")}
    assert_same(swapped, stock, inputs, rows=inputs["attention_mask"])
    assert packed_runs.since() == 1
    assert bertfast.restore(swapped) and not traces_of_swap(swapped)


@WHEN
@pytest.mark.parametrize("name", NAMES)
def test_offloaded_weights(name, when):
    stock = stock_model(name).eval()
    swapped = copy.deepcopy(stock)
    if when == "before":
        assert bertfast.accelerate(swapped)
    accelerate.cpu_offload(swapped, execution_device="cpu")
    assert all(parameter.is_meta for parameter in swapped.parameters())
    if when == "after":
        bertfast.accelerate(swapped)
    with torch.no_grad():
        for mask in (None, "right"):
            inputs = inputs_of(name, mask)
            rows = slice(None) if mask is None else inputs["attention_mask"].bool()
            assert_close(swapped(**inputs).logits[rows], stock(**inputs).logits[rows], "logits")
    for name, (_, reason) in bertfast.restore(swapped).left.items():
        assert "forward" in reason and "forward" in swapped.get_submodule(name).__dict__
    remove_hook_from_module(swapped, recurse=True)
    bertfast.restore(swapped)
    assert not traces_of_swap(swapped)
    swapped.load_state_dict(stock.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(swapped(**inputs).logits, stock(**inputs).logits)


class Counted(ModelHook):
    """A hook of accelerate that counts calls."""

    def __init__(self) -> None:
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


@WHEN
@pytest.mark.parametrize("name", NAMES)
def test_every_hook_of_accelerate_fires(name, when):
    stock, swapped = wrapped_pair(lambda model: model, when, name)
    inputs = inputs_of(name, "right")
    for path, module in list(swapped.named_modules()):
        # LayerNorms, dropouts, activations, containers: whatever stock calls.
        if module is swapped or isinstance(module, nn.ModuleList):
            continue
        hooks = Counted(), Counted()
        for model, hook in zip((swapped, stock), hooks, strict=True):
            add_hook_to_module(model.get_submodule(path), hook)
        mine, theirs = swapped(**inputs).logits, stock(**inputs).logits
        rows = inputs["attention_mask"].bool()
        assert_close(mine[rows], theirs[rows], path)
        assert hooks[0].calls == hooks[1].calls, path
        for model in (swapped, stock):
            remove_hook_from_module(model.get_submodule(path))
    report = bertfast.restore(swapped)
    assert report and not report.left
    assert types_of(swapped) == types_of(stock)
