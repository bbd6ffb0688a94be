"""Weights of linear layers reordered once for oneDNN: inference on the CPU.

PyTorch hands an fp32 `F.linear` to MKL, which multiplies by a weight as it lies in memory; oneDNN has layouts of its
own that its kernels read as they multiply. On one core of an AMD EPYC with AVX-512, M = 128, K = 768 and N = 3072 took
0.4 of the time in fp32. A GELU rides along (`_linear_pointwise`), on sums that are not rounded yet.

Each weight that is used has its copy, so a model takes twice the memory (`bertfast.freeze` keeps the copies alone).
Int8 layers keep their copies here too. Copies never go stale: a copy is found by the
identity of its Parameters and held to what the host knows of them and to 64 spread-out values, as in `weight_cache`;
biases are not copied. `bertfast.refresh(model)` drops the copies after an edit that nothing can detect, and those of a
model that has moved to another dtype or device and comes not back.

The two operators are private to PyTorch, so they are tried once; where one fails, PyTorch's own GEMM runs.
`torch.backends.mkldnn.flags(enabled=False)` switches them off, and so does `use_backend("torch")`; frozen and int8
layers do not ask.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bertfast.backends import is_traced, needs_grad
from bertfast.freshness import Facts, facts_of

SAMPLES = 64
ACTIVATIONS = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), None: ("none", "")}
DTYPES = frozenset({torch.float32, torch.bfloat16})
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a value


class _Entry:
    """A copy of weights that lie one below the other, and what they were. Holds them weakly."""

    def __init__(self, weights: tuple[Tensor, ...], on_death) -> None:
        self.references = [weakref.ref(weight, on_death) for weight in weights]
        self.facts: list[Facts] = []
        self.samples: list[Tensor] = []
        self.copy: Any = None

    def is_fresh(self, weights: tuple[Tensor, ...]) -> bool:
        if [facts_of(weight) for weight in weights] != self.facts:
            return False
        for weight, reference, known in zip(weights, self.references, self.samples, strict=True):
            # Another weight may have got the address of one that is gone, which has its id.
            if reference() is not weight or not _is_equal(_samples(weight), known):
                return False
        return True

    def fill(self, weights: tuple[Tensor, ...], make: Callable[[Tensor], Any]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.copy = make(weights[0].detach() if len(weights) == 1 else torch.cat([w.detach() for w in weights]))
            self.samples = [_samples(weight).clone() for weight in weights]
            # Last: a copy that fails is made again.
            self.facts = [facts_of(weight) for weight in weights]


_entries: dict[tuple, _Entry] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    """The lock may have been held by a thread that the child does not have."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _samples(weight: Tensor) -> Tensor:
    """Values spread over the rows and columns of a weight. A view where it is contiguous, because to gather them by
    indices costs three times as much."""
    size = weight.numel()
    count = min(SAMPLES, size)
    step = max((size - 1) // max(count - 1, 1), 1)
    if weight.is_contiguous():
        return weight.as_strided((count,), (step,))
    return weight.reshape(-1)[::step][:count]


def _is_equal(samples: Tensor, known: Tensor) -> bool:
    if torch.equal(samples, known):
        return True
    # NaN equals itself as bits only.
    bits = _BITS[known.element_size()]
    return torch.equal(samples.view(bits), known.view(bits))


def product(x: Tensor, copy: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
    """activation(x W^T + bias) by a reordered copy of W."""
    name, algorithm = ACTIVATIONS[activation]
    return torch.ops.mkldnn._linear_pointwise(x, copy, bias, name, [], algorithm)


@functools.cache
def works(dtype: torch.dtype) -> bool:
    """Whether this PyTorch on this machine has the two operators for a dtype."""
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        x = torch.eye(16, dtype=dtype, device="cpu")
        with torch.inference_mode(False), torch.no_grad():
            out = product(x, reordered(x), None, "gelu")
        return bool((out.diagonal() > 0.8).all())
    except (AttributeError, RuntimeError, TypeError):
        return False


def takes_private_operators(x: Tensor) -> bool:
    """Whether oneDNN's operators may be called on `x`: not under a trace, a transform, a dispatch mode or autocast, nor
    where oneDNN is switched off."""
    return (
        not is_traced(x)
        and torch._C._len_torch_dispatch_stack() == 0
        # The ops have cast their inputs by then; what has not been cast must be, by PyTorch's own.
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
    )


def _is_served(x: Tensor) -> bool:
    return (
        type(x) is Tensor
        and x.dtype in DTYPES
        and x.device.type == "cpu"
        and x.numel() > 0
        and takes_private_operators(x)
        and works(x.dtype)
    )


def _is_fit(weight: Tensor) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dim() == 2
        and weight.is_contiguous()
        and weight.numel() > 0
    )


def is_bias(bias: Tensor | None, rows: int, dtype: torch.dtype) -> bool:
    """Whether oneDNN may be given a bias: it reads one as it would lie in memory if it were contiguous, on the CPU
    and of shape (rows,). None may be."""
    return bias is None or (
        bias.dtype == dtype
        and bias.device.type == "cpu"
        and bias.dim() == 1
        and bias.shape[0] == rows
        and bias.is_contiguous()
    )


def linear(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...], activation: str | None = None
) -> Tensor | None:
    """activation(x W^T + b) for weights one below the other.

    Args:
        x: (..., K).
        weights: (N_1, K), (N_2, K), ...
        biases: (N_1,), (N_2,), ..., or None each.
        activation: `"gelu"`, `"gelu_tanh"` or None.

    Returns:
        (..., N_1 + N_2 + ...); None for a call that is PyTorch's: not on the CPU, one that needs a gradient, of other
        than fp32 or (where the machine multiplies it) bf16, of weights that are no contiguous Parameters (replicas of
        DataParallel, what autocast has cast), of biases that are not contiguous, under autocast, a trace, a transform
        or a dispatch mode (a FLOP counter does not know the operators).
    """
    if needs_grad(x, *weights, *biases) or not _is_served(x):
        return None
    bias = biases[0]
    for weight, own in zip(weights, biases, strict=True):
        if weight.shape[-1] != x.shape[-1] or weight.dtype != x.dtype:
            return None
        if (own is None) != (bias is None) or not is_bias(own, weight.shape[0], x.dtype):
            return None
    copy = copy_of(weights, reordered, _is_fit)
    if copy is None:
        return None
    if bias is not None and len(biases) > 1:
        bias = torch.cat(biases)
    return product(x, copy, bias, activation)


def reordered(weight: Tensor) -> Tensor:
    """A copy of a contiguous (N, K) weight in oneDNN's layout; `to_dense()` brings the same bits back."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def copy_of(
    weights: tuple[Tensor, ...], make: Callable[[Tensor], Any], is_fit: Callable[[Tensor], bool] | None = None
) -> Any:
    """What `make` makes of weights, kept, and made again where they are not what they were.

    One lock is held while copies are looked at and made, so threads wait for each other meanwhile.

    Args:
        weights: (N_1, K), (N_2, K), ...
        make: takes them one below the other, (N_1 + N_2 + ..., K), contiguous if there are several. Each has copies of
            its own.
        is_fit: asked of weights that have no copy yet.

    Returns:
        The copy; None unless all weights are fit.
    """
    key = (make, *[id(weight) for weight in weights])
    with _lock:
        entry = _entries.get(key)
        if entry is None or not entry.is_fresh(weights):
            if is_fit is not None and not all(map(is_fit, weights)):
                return None
            entry = _entries[key] = _Entry(weights, lambda reference: _entries.pop(key, None))
            entry.fill(weights, make)
        return entry.copy


def forget(parameters: set[int]) -> None:
    """Drops the copies of parameters of these ids."""
    with _lock:
        for key in list(_entries):
            if parameters.intersection(key):
                _entries.pop(key, None)
