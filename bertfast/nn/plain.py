"""Whether a child may be fused: reading its parameters must give what calling it would give."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules import module as _module

from bertfast.backends import is_traced, needs_grad

_PLAIN = (nn.Parameter, Tensor, FakeTensor)


def is_plain_tensor(weight: Tensor | None) -> bool:
    """Whether a weight is a tensor as any other: replicas and functional calls have no parameters, an export has fake
    ones, and weights that are quantised or sharded are of other classes (torchao, DTensor)."""
    return type(weight) in _PLAIN


def has_global_hooks() -> bool:
    """Whether there are hooks on all modules."""
    return _module._has_any_global_hook()


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` runs a hook of its own."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether `module` is exactly a `kind` with an ordinary weight and nothing attached to its call.

    False for subclasses (quantised, LoRA), parametrised modules (their class is made on the fly), hooks, a `forward`
    put on the instance (offloading) and weights that are no plain tensors.
    """
    return (
        type(module) is kind
        and is_plain_tensor(module.weight)
        and not has_hooks(module)
        and "forward" not in module.__dict__
        and not has_global_hooks()
    )


def are_untouched(kind: type[nn.Module], *modules: nn.Module) -> bool:
    """Whether all modules are exactly of a kind, ours, with nothing attached to their calls."""
    for module in modules:
        if type(module) is not kind or has_hooks(module) or "forward" in module.__dict__:
            return False
    return not has_global_hooks()


def are_alike(*parts: nn.Module) -> bool:
    """Whether what stands in the place of `nn.Linear` can multiply one input as one: all of one width, all with a
    bias or none."""
    return len({(part.in_features, part.bias is None) for part in parts}) == 1


def check_inference(x: Tensor, parameters: Iterable[Tensor | None], layers: str, undo: str) -> None:
    """Raises RuntimeError where what stands in the place of `nn.Linear` would need a gradient of `x` or of parameters,
    or is recorded.

    Args:
        layers: what they are called.
        undo: the function of bertfast that brings `nn.Linear` back.
    """
    if needs_grad(x, *parameters):
        raise RuntimeError(
            f"{layers} layers have no gradients: call the model under torch.inference_mode() or torch.no_grad(), "
            f"or bertfast.{undo}(model) to train it"
        )
    if is_traced(x):
        raise RuntimeError(f"{layers} layers cannot be exported or traced: bertfast.{undo}(model) first")


def uncompiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, at which `torch.compile` breaks the graph. Decorating it with `torch.compiler.disable` would import
    Dynamo, and that Triton, with the package."""

    @functools.wraps(function)
    def run(*arguments):
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function, reason="what stands in the place of nn.Linear runs as it is")(
                *arguments
            )
        return function(*arguments)

    return run


def any_hooks(root: nn.Module, has: Callable[[nn.Module], bool] = has_hooks) -> bool:
    """Whether a hook that `has` knows of sits on `root` or on any module inside it, or any hook on all modules."""
    if has_global_hooks():
        return True
    # Not root.modules(): its generators and its set of what was seen cost four times as much, in every forward.
    pending = [root]
    while pending:
        module = pending.pop()
        if module is None:
            continue
        if has(module):
            return True
        pending.extend(module._modules.values())
    return False
