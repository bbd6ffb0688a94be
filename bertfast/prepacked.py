"""Weights of linear layers reordered once for oneDNN: inference on the CPU.

PyTorch hands an fp32 `F.linear` to MKL, which multiplies by a weight as it lies in memory; oneDNN has layouts of its
own that its kernels read as they multiply. On one core of an AMD EPYC with AVX-512, M = 128, K = 768 and N = 3072 took
0.4 of the time in fp32. A GELU rides along (`_linear_pointwise`), on sums that are not rounded yet.

Each weight that is used has its copy, so a model takes twice the memory. Copies never go stale: a copy is found by the
identity of its Parameters and held to what the host knows of them and to 64 spread-out values, as in `weight_cache`;
biases are not copied. `bertfast.refresh(model)` drops the copies after an edit that nothing can detect, and those of a
model that has moved to another dtype or device and comes not back.

The two operators are private to PyTorch, so they are tried once; where one fails, PyTorch's own GEMM runs.
`torch.backends.mkldnn.flags(enabled=False)` switches them off, and so does `use_backend("torch")`.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref

import torch
from torch import Tensor, nn

from bertfast.backends import is_traced, needs_grad
from bertfast.freshness import Facts, facts_of

SAMPLES = 64
ACTIVATIONS = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), None: ("none", "")}
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


class _Entry:
    """A reordered copy of weights that lie one below the other, and what they were. Holds them weakly."""

    def __init__(self, weights: tuple[nn.Parameter, ...], on_death) -> None:
        self.references = tuple(weakref.ref(weight, on_death) for weight in weights)
        self.facts: tuple[Facts, ...] = ()
        self.samples: tuple[Tensor, ...] = ()
        self.copy: Tensor | None = None

    def belongs_to(self, weights: tuple[nn.Parameter, ...]) -> bool:
        return all(reference() is weight for reference, weight in zip(self.references, weights, strict=True))

    def is_fresh(self, weights: tuple[nn.Parameter, ...]) -> bool:
        if self.facts != tuple(map(facts_of, weights)):
            return False
        return all(torch.equal(_samples(w), known) for w, known in zip(weights, self.samples, strict=True))

    def fill(self, weights: tuple[nn.Parameter, ...]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            whole = weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
            self.copy = torch.ops.mkldnn._reorder_linear_weight(whole)
            self.samples = tuple(_samples(weight).clone() for weight in weights)
            # Last: a copy that fails is made again.
            self.facts = tuple(map(facts_of, weights))


_entries: dict[tuple[int, ...], _Entry] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    """The lock may have been held by a thread that the child does not have."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _samples(weight: Tensor) -> Tensor:
    """Values spread over the rows and columns of a contiguous weight, as bits: NaN equals itself. A view, because to
    gather them by indices costs three times as much."""
    count = min(SAMPLES, weight.numel())
    step = max((weight.numel() - 1) // max(count - 1, 1), 1)
    return weight.detach().as_strided((count,), (step,)).view(_BITS[weight.dtype])


def _product(x: Tensor, copy: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    name, algorithm = ACTIVATIONS[activation]
    return torch.ops.mkldnn._linear_pointwise(x, copy, bias, name, [], algorithm)


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Whether this PyTorch on this machine has the two operators for a dtype."""
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        x = torch.eye(16, dtype=dtype, device="cpu")
        with torch.inference_mode(False), torch.no_grad():
            out = _product(x, torch.ops.mkldnn._reorder_linear_weight(x), None, "gelu")
        return bool((out.diagonal() > 0.8).all())
    except (AttributeError, RuntimeError, TypeError):
        return False


def _serves(x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> bool:
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype in _BITS
        and x.numel() > 0
        and all(map(functools.partial(_is_weight_of, x), weights))
        # oneDNN reads a bias as it would lie in memory if it were contiguous and of the right size.
        and all(map(functools.partial(_is_bias_of, x), weights, biases))
        and len({b is None for b in biases}) == 1
        and not needs_grad(x, *weights, *biases)
        and not is_traced(x)
        and torch._C._len_torch_dispatch_stack() == 0
        # The ops have cast their inputs by then; what has not been cast must be, by PyTorch's own.
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
        and _works(x.dtype)
    )


def _is_weight_of(x: Tensor, weight: Tensor) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.dtype == x.dtype
        and weight.device == x.device
        and weight.dim() == 2
        and weight.shape[1] == x.shape[-1]
        and weight.is_contiguous()
        and weight.numel() > 0
    )


def _is_bias_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if bias is None:
        return True
    return (
        bias.dtype == x.dtype
        and bias.device == x.device
        and bias.dim() == 1
        and bias.shape[0] == weight.shape[0]
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
    if not _serves(x, weights, biases):
        return None
    bias = biases[0] if len(biases) == 1 or biases[0] is None else torch.cat(biases)
    return _product(x, _copy_of(weights), bias, activation)


def _copy_of(weights: tuple[nn.Parameter, ...]) -> Tensor:
    key = tuple(map(id, weights))
    with _lock:
        entry = _entries.get(key)
        if entry is None or not entry.belongs_to(weights):
            entry = _entries[key] = _Entry(weights, lambda reference: _entries.pop(key, None))
        if not entry.is_fresh(weights):
            entry.fill(weights)
        return entry.copy


def forget(parameters: set[int]) -> None:
    """Drops the copies of parameters of these ids."""
    with _lock:
        for key in list(_entries):
            if parameters.intersection(key):
                _entries.pop(key, None)
