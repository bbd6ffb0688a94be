"""Backward passes that say that they are differentiable once, and Functions in traces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


class _Gradients(torch.autograd.Function):
    """A backward op in a graph of its own, so that whatever asks for a second derivative meets the error. (Under
    `once_differentiable` gradients hang on nothing: `autograd.grad` then takes what other paths give for the whole.)"""

    @staticmethod
    def forward(ctx, op, backward, *arguments):
        ctx.op = op
        return backward(*arguments)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"{ctx.op} is differentiable once on fused backends; backend='torch' is any number of times")


def once(op: str, backward: Callable) -> Callable:
    """`backward`, as a Function's backward pass is to call it. It takes and returns tensors by position; the Function
    must have saved a tensor that leads back to its inputs, which only inputs and outputs do."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return partial(_Gradients.apply, op, backward)
    return backward


def distinct(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors; in a trace a view takes the place of one that came before: Dynamo takes none twice in a Function."""
    if not torch.compiler.is_compiling():
        return tensors
    seen = []
    for tensor in tensors:
        repeated = tensor is not None and any(tensor is other for other in seen)
        seen.append(tensor.view_as(tensor) if repeated else tensor)
    return tuple(seen)
