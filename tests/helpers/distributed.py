"""Swapped models under DDP and FSDP2, compared with stock ones under the same, in processes of their own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import bertfast
from helpers.checkpoints import tiny_stock
from helpers.models import NO_DROPOUT, assert_close, inputs_of, labels_of

NAME = "BertForTokenClassification"


@contextmanager
def process_group(file: Path, rank: int = 0, size: int = 1) -> Iterator[None]:
    """A gloo group that meets in a file."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The encoder's layers."""
    base = model.base_model
    return base.transformer.layer if hasattr(base, "transformer") else base.encoder.layer


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2 around each layer and the whole."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradients_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients under the names without wrappers."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            found[name.removeprefix("module.")] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def assert_trains_alike(swapped: nn.Module, stock: nn.Module, name: str = NAME, steps: int = 2) -> None:
    """Losses, and gradients as the wrappers left them, over steps on this rank's share of the data."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (swapped, stock)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs = inputs_of(name, "right" if rank == 0 else "holes", seed=step + 10 * rank)
        inputs |= labels_of(name, inputs["attention_mask"], seed=step)
        losses = [model(**inputs).loss for model in (swapped, stock)]
        assert_close(*(loss.detach() for loss in losses), f"loss of step {step}")
        for loss in losses:
            loss.backward()
        mine, theirs = map(gradients_by_name, (swapped, stock))
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_close(mine[key], value, key)
        for optimizer in optimizers:
            optimizer.step()


def stock_model(name: str = NAME) -> nn.Module:
    """A tiny model in training, without dropout."""
    return tiny_stock(name, **NO_DROPOUT["distilbert" if "DistilBert" in name else "bert"]).double().train()


def run(rank: int, size: int, file: Path) -> None:
    """One of several processes: a swapped model that arrives pickled, under DDP and FSDP2."""
    torch.set_num_threads(1)
    with process_group(file, rank, size):
        for wrap in (DistributedDataParallel, sharded):
            stock = stock_model()
            swapped = copy.deepcopy(stock)
            assert bertfast.accelerate(swapped)
            assert_trains_alike(wrap(swapped), wrap(stock))
