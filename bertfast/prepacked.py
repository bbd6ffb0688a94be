"""Weights of linear layers reordered once for oneDNN: inference on the CPU.

PyTorch hands an fp32 `F.linear` to MKL, which multiplies by a weight as it lies in memory; oneDNN has layouts of its
own that its kernels read as they multiply. On one core of an AMD EPYC with AVX-512, M = 128, K = 768 and N = 3072 took
0.4 of the time in fp32. A GELU rides along (`_linear_pointwise`), on sums that are not rounded yet.

Each weight that is used has its copy, so a model takes twice the memory. Copies never go stale: a copy is found by the
identity of its Parameters and held to what the host knows of them and to 64 spread-out values, as in `weight_cache`;
biases are not copied. `bertfast.refresh(model)` drops the copies after an edit that nothing can detect.

The two operators are private to PyTorch, so they are tried once; where one fails, PyTorch's own GEMM runs.
`torch.backends.mkldnn.flags(enabled=False)` switches them off, and so does `use_backend("torch")`.
"""

from __future__ import annotations

import functools
import threading
import weakref

import torch
from torch import Tensor, nn

from bertfast.backends import is_traced, needs_grad
from bertfast.freshness import Facts, facts_of

SAMPLES = 64
_ALGORITHMS = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), None: ("none", "")}


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


def _samples(weight: Tensor) -> Tensor:
    """A view of values spread over the whole of a contiguous weight: one call, where indices would cost three."""
    count = min(SAMPLES, weight.numel())
    return weight.detach().as_strided((count,), (max(weight.numel() // count, 1),))


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Whether this PyTorch on this machine has the two operators for a dtype."""
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        x = torch.eye(16, dtype=dtype)
        with torch.inference_mode(False), torch.no_grad():
            out = torch.ops.mkldnn._linear_pointwise(
                x, torch.ops.mkldnn._reorder_linear_weight(x), None, *_ALGORITHMS["gelu"][:1], [], "none"
            )
        return bool((out.diagonal() > 0.8).all())
    except (AttributeError, RuntimeError, TypeError):
        return False


def _serves(x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> bool:
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.numel() > 0
        and all(type(w) is nn.Parameter and w.dtype == x.dtype and w.is_contiguous() and w.numel() for w in weights)
        and all(b is None or b.dtype == x.dtype for b in biases)
        and not needs_grad(x, *weights, *biases)
        and not is_traced(x)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch.backends.mkldnn.enabled
        and _works(x.dtype)
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
        DataParallel, what autocast has cast), under a trace, a transform or a dispatch mode (a FLOP counter does not
        know the operators).
    """
    if not _serves(x, weights, biases):
        return None
    bias = biases[0] if len(biases) == 1 or biases[0] is None else torch.cat(biases)
    name, algorithm = _ALGORITHMS[activation]
    return torch.ops.mkldnn._linear_pointwise(x, _copy_of(weights), bias, name, [], algorithm)


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
        for key in [key for key in _entries if parameters.intersection(key)]:
            del _entries[key]
