"""Why a module cannot be fused now. Looked at in every forward, because hooks, adapters and wrappers come and go.

`bertfast.nn.plain` says whether one leaf may be read instead of called; here are the questions about whole modules.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as _module

from bertfast.nn.plain import has_hooks, is_plain

__all__ = ["calls_only_forward", "has_hooks", "has_user_hooks", "is_plain", "may_skip_call"]

# transformers puts hooks on layers for outputs that were once asked for and never takes them off. They do nothing
# unless outputs are asked for again.
CAPTURING = "transformers.utils.output_capturing"


def has_user_hooks(module: nn.Module) -> bool:
    """Whether calling `module` runs a hook that somebody else put on it."""
    if not has_hooks(module):
        return False
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    return any(getattr(hook, "__module__", None) != CAPTURING for hook in module._forward_hooks.values())


def calls_only_forward(module: nn.Module) -> bool:
    """Whether calling `module` is calling its class's `forward`: no hooks of users, no `forward` of the instance as
    offloading sets it, no hooks on all modules."""
    return (
        "forward" not in module.__dict__
        and "_hf_hook" not in module.__dict__
        and not has_user_hooks(module)
        and not _module._has_any_global_hook()
    )


def may_skip_call(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether what `module`, exactly a `kind`, does may be done without calling it."""
    return type(module) is kind and calls_only_forward(module)
