"""`accelerate` and `restore`: fused forwards for the modules of a model that exists, and back.

A module is swapped by a new `__class__`, a subclass of its own that keeps its name and only has another forward; so
its parameters, children, hooks and state dict stay what they are. Models of transformers keep their class and get a
forward pre-hook instead. Which modules, and how, is known by providers, one module of Python for each library:

    def swapper_for(module: nn.Module) -> Swapper | None    how to swap it; None for what is not a stock type
    def reason_left(module: nn.Module) -> str | None        why a module that one might expect swapped is not
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import ClassVar, NamedTuple, Protocol

from torch import nn

from bertfast.backends import use_backend
from bertfast.swap.eligibility import has_own_forward
from bertfast.swap.report import SwapReport

# A provider, and the package without which none of its modules exist.
PROVIDERS = {
    "bertfast.swap.torch_nn": "torch",
    "bertfast.swap.huggingface": "transformers",
    "bertfast.swap.sentence_transformers": "sentence_transformers",
}
PREFIX = "_bertfast_"
STOCK = "_bertfast_stock"
OPTIONS = "_bertfast_options"


class SwapError(ValueError):
    """`accelerate(strict=True)` found modules that cannot be swapped."""


class Options(NamedTuple):
    """What `accelerate` was asked for; of a swapped module, its attribute `_bertfast_options`."""

    unpad: bool = True
    backend: str = "auto"


def pinned(options: Options) -> AbstractContextManager[None]:
    """The context in which a swapped module runs: its backend, or with "auto" whatever is in force around it."""
    return nullcontext() if options.backend == "auto" else use_backend(options.backend)


class Swapper(Protocol):
    """How modules of one type are swapped."""

    becomes: str

    def reason(self, module: nn.Module) -> str | None:
        """Why `module` cannot be swapped, or None."""

    def swap(self, module: nn.Module, options: Options) -> None:
        """Swaps `module`, for which there is no reason."""


class ClassSwapper:
    """Gives a module another class.

    Args:
        swapped: a subclass of the stock class, with its name, whose attribute `_bertfast_stock` is the stock class.
            Found under its name in its Python module, so that modules can be pickled.
        becomes: what the report says of it.
        reason: why a module cannot be swapped, or None.
    """

    def __init__(self, swapped: type[nn.Module], becomes: str, reason: Callable[[nn.Module], str | None]) -> None:
        self.swapped, self.becomes, self.reason = swapped, becomes, reason

    def swap(self, module: nn.Module, options: Options) -> None:
        change_class(module, self.swapped)
        module.__dict__[OPTIONS] = options


class SwappedForward:
    """In front of a stock class, makes a swapped class: a subclass whose `forward` is `fused_forward` in the context
    of the module's options. `stock_forward` is the forward that it had. A mixin derived from it has to define
    `fused_forward`, with the arguments and the result of stock's, and `becomes`, which the report says of it."""

    becomes: ClassVar[str]

    def forward(self, *args, **kwargs):
        with pinned(self._bertfast_options):
            return self.fused_forward(*args, **kwargs)

    def stock_forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def swapped_class(mixin: type, stock: type[nn.Module], where: str, **attributes: object) -> type[nn.Module]:
    """The class that takes the place of `stock`: `mixin`, a `SwappedForward`, in front of it, under its name.

    Args:
        where: name of the Python module that has it as an attribute of that name.
        attributes: of the class.
    """
    attributes |= {"__module__": where, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__, STOCK: stock}
    return type(stock.__name__, (mixin, stock), attributes)


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Sets `module.__class__`. A `forward` on the instance that only repeats the old class's goes."""
    if "forward" in module.__dict__ and not has_own_forward(module):
        del module.__dict__["forward"]
    module.__class__ = cls


class SwapHook:
    """A forward pre-hook of ours, with keyword arguments. It has no state but its options, and can be pickled."""

    becomes: ClassVar[str]

    def __init__(self, options: Options) -> None:
        self.options = options

    def is_last(self, module: nn.Module) -> bool:
        """Whether the arguments that the hook sees are those of the forward: no user's hook changes them after it."""
        return list(module._forward_pre_hooks.values())[-1] is self

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        raise NotImplementedError

    @classmethod
    def prepare(cls, module: nn.Module) -> None:
        """Leaves `_bertfast_` attributes that others look for on a module that gets such a hook, or inside it."""


class HookSwapper:
    """Registers a `SwapHook` of a class on a module, which keeps its own class.

    Args:
        hook: whose `becomes` is what the report says of it.
        reason: as of `ClassSwapper`.
    """

    def __init__(self, hook: type[SwapHook], reason: Callable[[nn.Module], str | None]) -> None:
        self.hook, self.becomes, self.reason = hook, hook.becomes, reason

    def swap(self, module: nn.Module, options: Options) -> None:
        module.register_forward_pre_hook(self.hook(options), with_kwargs=True)
        self.hook.prepare(module)


def stock_of(module: nn.Module) -> type[nn.Module] | None:
    """The class that a module had before we swapped it; None where its class is none of ours."""
    return vars(type(module)).get(STOCK)


def our_hooks(module: nn.Module) -> list[int]:
    """Ids of our pre-hooks of a module."""
    return [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, SwapHook)]


def accelerate(model: nn.Module, *, unpad: bool = True, backend: str = "auto", strict: bool = False) -> SwapReport:
    """Swaps fused forwards into the modules of a model, in place; `restore` undoes it.

    Parameters, `state_dict()`, the training flag, dtypes, devices and what `save_pretrained` writes stay as they are.
    Whether a module can be fused is looked at again in each forward: hooks, adapters and quantised layers that come
    later work as they do without the swap. A second call only replaces the options.

    Args:
        model: any module; models that are known are found inside it.
        unpad: compute no padding where there is a 2-D mask; padded rows of the encoder's output are then 0. False
            gives stock's rows. torch.nn's encoders compute the padding of small fp32 batches on the CPU, which is
            faster there; their rows are 0 as well.
        backend: of every op in the swapped modules, as in `use_backend`.
        strict: raise where a module cannot be swapped, instead of reporting it.

    Returns:
        What was swapped and what was left, with reasons.

    Raises:
        TypeError: `model` is no module.
        ValueError: an unknown backend.
        SwapError: with `strict`, when something is left or nothing is known; the model is as it was.
    """
    modules = _named_modules(model)
    with use_backend(backend):
        pass  # raises for an unknown name
    options = Options(unpad, backend)
    report = SwapReport(type(model).__name__)
    todo: list[Callable[[], None]] = []
    again = 0
    providers = list(_providers())
    for name, module in modules:
        kind = type(module).__name__
        if hasattr(type(module), STOCK) or our_hooks(module):
            report.swapped[name] = (kind, "swapped already")
            todo.append(lambda module=module: _set_options(module, options))
            again += 1
            continue
        swapper = next(filter(None, (provider.swapper_for(module) for provider in providers)), None)
        if swapper is not None:
            reason = swapper.reason(module)
        else:
            reason = next(filter(None, (provider.reason_left(module) for provider in providers)), None)
        if reason is not None:
            report.left[name] = (kind, reason)
        elif swapper is not None:
            report.swapped[name] = (kind, swapper.becomes)
            todo.append(lambda module=module, swapper=swapper: swapper.swap(module, options))
    if not report.swapped and not report.left:
        report.left[""] = (type(model).__name__, "there is no module of a supported class in it")
    if strict and report.left:
        untouched = SwapReport(report.model, left=report.left)
        raise SwapError(f"strict=True, so nothing was changed: some modules cannot be swapped\n{untouched}")
    for step in todo:
        step()
    if again:
        report.notes.append(f"{again} modules were swapped already; their options are now those of this call")
    return report


def restore(model: nn.Module) -> SwapReport:
    """Undoes `accelerate`, for every module inside `model` that is still as it left it.

    Args:
        model: what was given to `accelerate`, or a part of it, or a wrapper around it.

    Returns:
        What was restored, and what was left because its class was changed again since.

    Raises:
        TypeError: `model` is no module.
    """
    report = SwapReport(type(model).__name__, verb="restored")
    for name, module in _named_modules(model):
        kind = type(module)
        stock = stock_of(module)
        if stock is not None and not has_own_forward(module):
            change_class(module, stock)
            report.swapped[name] = (kind.__name__, f"{stock.__module__}.{stock.__qualname__}")
        elif hasattr(kind, STOCK):
            what = "class" if stock is None else "forward"
            report.left[name] = (kind.__name__, f"its {what} was changed after the swap; undo that first")
        hooks = our_hooks(module)
        for key in hooks:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        if hooks:
            report.swapped[name] = (kind.__name__, "hook removed")
        if name not in report.left:
            _forget(module)
    return report


def _forget(module: nn.Module) -> None:
    for name in [name for name in module.__dict__ if name.startswith(PREFIX)]:
        del module.__dict__[name]


def _named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return list(model.named_modules())


def _providers() -> Iterator[ModuleType]:
    for name, package in PROVIDERS.items():
        if package in sys.modules:
            yield importlib.import_module(name)


def _set_options(module: nn.Module, options: Options) -> None:
    if hasattr(type(module), STOCK):
        module.__dict__[OPTIONS] = options
    for key in our_hooks(module):
        hook = module._forward_pre_hooks[key]
        module._forward_pre_hooks[key] = type(hook)(options)
        hook.prepare(module)
