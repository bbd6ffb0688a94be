"""Which backend serves a call: capabilities as data, reasons as sentences, one chooser.

Every (op, backend) registers a :class:`Capability`. A public op describes its call as a :class:`Call`, made of facts
that are known while tracing (device, dtypes, head dim, width, mask kind, gradients), and :func:`choose` takes the first
backend of the order in force that has no reason against it.

The order for `"auto"` is, by device of the inputs:

    cuda   triton, cuda, torch
    cpu    cpu, torch
    other  torch

Ops that know better by the sizes of an eager call say so (`automatic`).

`use_backend` and the ops' `backend=` replace that order; what they name must serve the call or the call raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from bertfast import _extension

BACKENDS = ("triton", "cuda", "cpu", "torch")
OPS = (
    "attention",
    "varlen_attention",
    "add_layer_norm",
    "linear_gelu",
    "feed_forward",
    "qkv_projection",
    "embed_layer_norm",
)
AUTO_ORDER = {"cuda": ("triton", "cuda", "torch"), "cpu": ("cpu", "torch")}

HALF = frozenset({torch.float16, torch.bfloat16})
FLOAT = HALF | {torch.float32}


class BackendError(NotImplementedError):
    """No backend that was allowed to serve a call can serve it; the message lists the inputs and every reason."""


class Call(NamedTuple):
    """What the choice of a backend may depend on. Sizes and addresses are left out: they are not known in a trace."""

    op: str
    device: str
    compute: tuple[int, int] | None
    dtypes: tuple[torch.dtype, ...]
    grad: bool = False
    dropout: bool = False
    head_dim: int | None = None
    width: int | None = None
    mask: str = "none"
    features: tuple[str, ...] = ()
    transformed: bool = False

    def __str__(self) -> str:
        facts = [f"device={self.device}" + (" sm_{}{}".format(*self.compute) if self.compute else "")]
        facts.append("dtypes=" + "/".join(_name(dtype) for dtype in dict.fromkeys(self.dtypes)))
        facts += [f"{name}={value}" for name, value in (("head_dim", self.head_dim), ("width", self.width)) if value]
        facts += [f"mask={self.mask}"] if self.mask != "none" else []
        present = (("grad", self.grad), ("dropout", self.dropout), ("transformed", self.transformed))
        facts += [name for name, holds in present if holds]
        return f"{self.op}({', '.join([*facts, *self.features])})"


def _always_available() -> str | None:
    return None


@dataclass(frozen=True)
class Capability:
    """What one backend takes for one op. `None` means no limit.

    `implementation` is what the public op calls; its signature is the op's own affair. The automatic choice takes the
    backend for `auto_dtypes` only; one that is named serves all of `dtypes`. `unavailable` says why the backend cannot
    run on this machine at all (not built, library missing), or None.
    """

    op: str
    backend: str
    implementation: Callable[..., Any]
    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    auto_dtypes: frozenset[torch.dtype] | None = None
    min_compute: tuple[int, int] | None = None
    max_head_dim: int | None = None
    max_width: int | None = None
    masks: frozenset[str] = frozenset({"none", "bool", "float"})
    dropout: bool = True
    backward: bool = True
    features: frozenset[str] | None = None
    unavailable: Callable[[], str | None] = _always_available

    def unavailable_reason(self) -> str | None:
        """Why this backend cannot run here at all, or None."""
        return self.unavailable()

    def is_automatic_for(self, call: Call) -> bool:
        """Whether the automatic choice may take this backend for `call`, if it can serve it."""
        return self.auto_dtypes is None or self.auto_dtypes.issuperset(call.dtypes)

    def not_supported_reasons(self, call: Call) -> list[str]:
        """Every reason against serving `call`; empty when it can be served."""
        reasons = []
        unavailable = self.unavailable()
        if unavailable is not None:
            reasons.append(unavailable)
        if self.devices is not None and call.device not in self.devices:
            reasons.append(f"device is {call.device}, takes {_names(self.devices)}")
        if self.dtypes is not None:
            reasons.extend(
                f"dtype {_name(dtype)} is not one of {_names(self.dtypes)}"
                for dtype in dict.fromkeys(call.dtypes)
                if dtype not in self.dtypes
            )
        if self.min_compute is not None and call.compute is not None and call.compute < self.min_compute:
            have, need = call.compute, self.min_compute
            reasons.append(f"compute capability is {have[0]}.{have[1]}, needs {need[0]}.{need[1]}")
        if self.max_head_dim is not None and call.head_dim is not None and call.head_dim > self.max_head_dim:
            reasons.append(f"head dim is {call.head_dim}, at most {self.max_head_dim}")
        if self.max_width is not None and call.width is not None and call.width > self.max_width:
            reasons.append(f"width is {call.width}, at most {self.max_width}")
        if call.mask not in self.masks:
            reasons.append(f"mask is {call.mask}, takes {_names(self.masks)}")
        if call.dropout and not self.dropout:
            reasons.append("no dropout")
        if call.grad and not self.backward:
            reasons.append("no backward")
        if call.transformed and self.backend != "torch":
            reasons.append("no forward-mode derivatives and no torch.func transforms")
        if self.features is not None:
            reasons.extend(f"no {feature}" for feature in call.features if feature not in self.features)
        return reasons


def _name(item: object) -> str:
    return str(item).removeprefix("torch.")


def _names(items: frozenset) -> str:
    return ", ".join(sorted(_name(item) for item in items))


_capabilities: dict[tuple[str, str], Capability] = {}
_choices: dict[tuple[Call, tuple[str, ...] | None, tuple[str, ...] | None], Capability] = {}


class _Pinned(threading.local):
    def __init__(self) -> None:
        # An instance attribute: Dynamo does not guard on a class attribute read through a threading.local, so a
        # compiled function would keep the backend that it was traced with.
        self.order: tuple[str, ...] | None = None


_pinned = _Pinned()


def register(capability: Capability) -> None:
    """Makes an (op, backend) known; a second registration of the same pair is an error."""
    key = (capability.op, capability.backend)
    if capability.op not in OPS or capability.backend not in BACKENDS or key in _capabilities:
        raise ValueError(f"cannot register {key}: unknown or registered already")
    _capabilities[key] = capability
    _choices.clear()


def candidates() -> list[Capability]:
    """Every registered (op, backend), ops and backends in their documented order."""
    return [_capabilities[op, backend] for op in OPS for backend in BACKENDS if (op, backend) in _capabilities]


def _order(backends: tuple[str, ...]) -> tuple[str, ...] | None:
    unknown = [b for b in backends if b not in BACKENDS and b != "auto"]
    if unknown or not backends or ("auto" in backends and len(backends) > 1):
        got = ", ".join(map(str, backends)) or "none"
        raise ValueError(f"backend must be 'auto' or any of {', '.join(BACKENDS)}; got {got}")
    return None if backends == ("auto",) else backends


@contextmanager
def use_backend(*backends: str) -> Iterator[None]:
    """Pins the backend of every op called in this thread inside the `with` block.

    `use_backend("triton")` lets Triton kernels serve or raises :class:`BackendError`; `use_backend("triton",
    "torch")` tries them in that order; `use_backend("auto")` lifts an outer pin. Backward passes use the backend
    that the forward pass chose, wherever they run; so do recomputations of models' gradient checkpointing. Where you
    checkpoint by yourself, the backward pass has to run inside the block as well.

    Raises:
        ValueError: an unknown name.
    """
    order, previous = _order(backends), _pinned.order
    _pinned.order = order
    try:
        yield
    finally:
        _pinned.order = previous


def in_force(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to run under the backends that are in force now: a checkpoint's recomputation runs it behind the
    `with` block, on whatever thread, and another backend would drop other elements."""
    if torch.compiler.is_compiling():
        return function
    order = _pinned.order or ("auto",)

    def run(*args, **kwargs):
        with use_backend(*order):
            return function(*args, **kwargs)

    return run


def describe(
    op: str,
    tensors: tuple[Tensor | None, ...],
    *,
    grad: bool,
    dropout_p: float = 0.0,
    head_dim: int | None = None,
    width: int | None = None,
    mask: str = "none",
    features: tuple[str, ...] = (),
) -> Call:
    """The :class:`Call` for an op on `tensors` (None where an optional one is absent)."""
    device = tensors[0].device
    return Call(
        op,
        device.type,
        torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        tuple([tensor.dtype for tensor in tensors if tensor is not None]),
        grad,
        dropout_p > 0.0,
        head_dim,
        width,
        mask,
        features,
        is_transformed(),
    )


def is_transformed() -> bool:
    """Whether `torch.func` (vmap, grad, jvp) or forward-mode differentiation is at work. They know PyTorch's own ops;
    the tangent of a private one would be 0, without a word."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def has_values(tensor: Tensor) -> bool:
    """Whether there are values to look at: a compiler's trace, `torch.func`, meta and fake tensors have none."""
    without = torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor) or is_transformed()
    return not without


def is_traced(tensor: Tensor) -> bool:
    """Whether nothing may depend on values: there are none, or they are recorded, by `torch.jit.trace` or a CUDA
    graph's capture, for others that come later."""
    if not has_values(tensor) or torch.jit.is_tracing():
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd will want a backward pass through an op on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def is_pinned() -> bool:
    """Whether a `use_backend` is in force that names backends, be they those of the automatic order."""
    return _pinned.order is not None


def order_on(device: str) -> tuple[str, ...]:
    """The backends that may serve calls on a type of device, best first: those that are pinned, or the automatic
    order."""
    return _pinned.order or _automatic_order(device)


def _automatic_order(device: str) -> tuple[str, ...]:
    return AUTO_ORDER.get(device, ("torch",))


def choose(call: Call, backend: str | None = None, automatic: tuple[str, ...] | None = None) -> Capability:
    """The capability that serves `call`: of `backend` if given, else of the pinned order, else of the automatic one,
    `automatic` if given.

    Raises:
        BackendError: nothing that may serve the call can.
        ValueError: `backend` is no backend's name.
    """
    order = _pinned.order if backend is None else _order((backend,))
    if torch.compiler.is_compiling():
        return _select(call, order)
    key = call, order, automatic if order is None else None
    choice = _choices.get(key)
    if choice is None:
        choice = _choices[key] = _select(call, order, automatic)
        if call.device == "cpu" and choice.backend == "torch" and backend is None and _pinned.order is None:
            _extension.warn_pure_python()
    return choice


def _select(call: Call, named: tuple[str, ...] | None, automatic: tuple[str, ...] | None = None) -> Capability:
    order = named or automatic or _automatic_order(call.device)
    for backend in order:
        capability = _capabilities.get((call.op, backend))
        if capability is None or capability.not_supported_reasons(call):
            continue
        if named is not None or capability.is_automatic_for(call):
            return capability
    lines = [f"no backend can serve {call}; asked for: {', '.join(order)}"]
    for backend in BACKENDS:
        capability = _capabilities.get((call.op, backend))
        if capability is None:
            reasons = ["has no kernel for this op in this version"]
        else:
            reasons = capability.not_supported_reasons(call) or ["can serve it, but was not asked"]
        lines.append(f"  {backend}: {'; '.join(reasons)}")
    raise BackendError("\n".join(lines))
