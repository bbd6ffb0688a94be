"""Why a module cannot be fused now. Looked at in every forward, because hooks, adapters and wrappers come and go.

`bertfast.nn.plain` says whether one leaf may be read instead of called; here are the questions about whole modules.
"""

from __future__ import annotations

import inspect
import sys
from types import MethodType

from torch import nn

from bertfast.nn.plain import has_hooks, is_plain_tensor

# transformers puts hooks on layers for outputs that were once asked for and never takes them off. They do nothing
# unless outputs are asked for again.
CAPTURING = "transformers.utils.output_capturing"


def has_own_forward(module: nn.Module) -> bool:
    """Whether a `forward` on the instance, as offloading sets it, does something else than its class's, which
    transformers 5.0 leaves there where it has captured outputs."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return False
    bound_here = isinstance(forward, MethodType) and forward.__self__ is module
    return not (bound_here and forward.__func__ is type(module).forward)


def ends_in_class(module: nn.Module) -> bool:
    """Whether a `forward` on the instance, if there is one, only wraps its class's, as autocast and offloading do."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return True
    inner = inspect.unwrap(forward)
    return getattr(inner, "__func__", inner) is inspect.unwrap(type(module).forward)


def has_user_hooks(module: nn.Module) -> bool:
    """Whether calling `module` runs a hook that somebody put on it. Those of transformers that capture attentions and
    hidden states count while they do."""
    if not has_hooks(module):
        return False
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    if any(getattr(hook, "__module__", None) != CAPTURING for hook in module._forward_hooks.values()):
        return True
    return bool(sys.modules[CAPTURING]._active_collector.get())


def may_skip_call(module: nn.Module, kinds: frozenset[type[nn.Module]]) -> bool:
    """Whether what `module`, exactly one of `kinds`, does may be done without calling it. Global hooks are left out:
    they are one question for a whole layer."""
    return type(module) in kinds and not has_own_forward(module) and not has_user_hooks(module)


def is_readable_norm(module: nn.Module) -> bool:
    """Whether `module` is exactly a LayerNorm over the last dimension whose weight and bias may be read instead of
    calling it."""
    return (
        type(module) is nn.LayerNorm
        and is_plain_tensor(module.weight)
        and is_plain_tensor(module.bias)
        and len(module.normalized_shape) == 1
        and "forward" not in module.__dict__
        and not has_user_hooks(module)
    )


def dropout_of(module: nn.Dropout) -> float:
    """The probability that a dropout module applies now."""
    return module.p if module.training else 0.0
