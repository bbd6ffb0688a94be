"""Packed copies of weights that never go stale.

A pack is found by the identity of its Parameters and held to them before each use:

* by what the host knows of each: data_ptr, version counter, dtype, device, shape, strides. A change makes a new copy,
  in the same memory where its form is the same;
* by its values, because writes through `.data` count nothing: 64 spread-out values of each weight are compared with the
  pack, and the biases copied. On a GPU a kernel does that for every 32 rows of a weight and copies those that differ,
  without a word to the host (`bertfast.kernels.qkv_projection`).

That sees `load_state_dict`, optimizer steps, `.half()` and `.to()`, resizing, merged and unmerged adapters and averages
copied through `.data`. An edit of part of a weight through `.data` may be missed: `bertfast.refresh(model)`. A CUDA
graph is captured without packs: its replays would see samples only, and the host nothing.

For three weights and biases that costs 9 us of the host (a shared 2-core machine), and on a GPU the launch of one
kernel, whose time the device check takes.

Packs live here, outside of modules, and go when one of their Parameters goes. So state dicts, pickles and copies of a
model know nothing of them. The weak references by which that is known are in the way of `torch.utils.swap_tensors`, and
so of `torch.__future__.set_swap_module_params_on_conversion(True)`, which is not torch's default.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bertfast import prepacked
from bertfast.freshness import facts_of
from bertfast.ops._library import define

SAMPLES = 64


class Pack(NamedTuple):
    """Weights one below the other, (N_1 + N_2 + ..., K), and their biases, or None."""

    weight: Tensor
    bias: Tensor | None


_UPDATE = define(
    "update_pack",
    "(Tensor weight_q, Tensor weight_k, Tensor weight_v, Tensor? bias_q, Tensor? bias_k, Tensor? bias_v,"
    " Tensor(a!) pack, Tensor(b!)? bias_pack) -> ()",
    lambda *arguments: None,
    ("triton",),
    launcher="qkv_projection",
)["triton"]


class _Entry:
    """One pack with what its Parameters were when it was filled. Holds them weakly."""

    def __init__(self, parameters: tuple[nn.Parameter | None, ...], on_death) -> None:
        self.references = tuple(None if p is None else weakref.ref(p, on_death) for p in parameters)
        self.facts: tuple | None = None
        self.pack: Pack | None = None
        self.samples: tuple[Tensor, Tensor] | None = None
        self.stream = 0
        self.filled: torch.cuda.Event | None = None

    def parameters(self) -> tuple[nn.Parameter | None, ...]:
        return tuple(None if reference is None else reference() for reference in self.references)

    def belongs_to(self, parameters: tuple[nn.Parameter | None, ...]) -> bool:
        return all(
            p is None if reference is None else reference() is p
            for reference, p in zip(self.references, parameters, strict=True)
        )

    def fill(self, weights: tuple[nn.Parameter, ...], biases: tuple[nn.Parameter | None, ...]) -> None:
        """Copies the weights and remembers what they are."""
        with torch.inference_mode(False), torch.no_grad():
            facts = tuple(map(facts_of, (*weights, *biases)))
            if self.facts is not None and _forms(facts) == _forms(self.facts):
                self._join(weights[0].device)
                torch.cat(weights, out=self.pack.weight)
                if self.pack.bias is not None:
                    torch.cat(biases, out=self.pack.bias)
            else:
                self.pack = Pack(torch.cat(weights), None if biases[0] is None else torch.cat(biases))
            if weights[0].is_cuda:
                self.stream = torch._C._cuda_getCurrentRawStream(weights[0].device.index)
                self.filled = torch.cuda.current_stream(weights[0].device).record_event()
            else:
                self.samples = _sample_positions(weights[0])
            # Last: a copy that fails is made again.
            self.facts = facts

    def hold_to_values(self, weights: tuple[nn.Parameter, ...], biases: tuple[nn.Parameter | None, ...]) -> None:
        """Copies again what writes that nothing counts have changed, as far as samples tell."""
        device = weights[0].device
        with torch.inference_mode(False), torch.no_grad():
            if device.type == "cuda":
                self._join(device)
                _UPDATE(*weights, *biases, *self.pack)
            else:
                self._compare(weights, biases)

    def _compare(self, weights: tuple[nn.Parameter, ...], biases: tuple[nn.Parameter | None, ...]) -> None:
        parts = self.pack.weight.view(len(weights), *weights[0].shape)
        pairs = zip(weights, parts, strict=True)
        if not all(torch.equal(weight[self.samples], part[self.samples]) for weight, part in pairs):
            torch.cat(weights, out=self.pack.weight)
        if self.pack.bias is not None:
            torch.cat(biases, out=self.pack.bias)

    def _join(self, device: torch.device) -> None:
        """Where another stream made the last copy: has the current one wait for it, and its memory for the current."""
        if device.type != "cuda" or torch._C._cuda_getCurrentRawStream(device.index) == self.stream:
            return
        stream = torch.cuda.current_stream(device)
        stream.wait_event(self.filled)
        for tensor in self.pack:
            if tensor is not None:
                tensor.record_stream(stream)


_entries: dict[tuple[int, ...], _Entry] = {}
# A thread on another stream must not find a pack before the event that it has to wait for.
_lock = threading.Lock()


def _forms(facts: tuple) -> list:
    """What decides the memory of a pack."""
    return [None if fact is None else fact[2:5] for fact in facts]


def _sample_positions(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of the values that are compared, spread over the whole of a weight (N, K)."""
    at = torch.linspace(0, max(weight.numel() - 1, 0), min(SAMPLES, weight.numel()), dtype=torch.float64).long()
    return at // max(weight.shape[1], 1), at % max(weight.shape[1], 1)


def _is_capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def packed(
    weights: tuple[nn.Parameter, nn.Parameter, nn.Parameter],
    biases: tuple[nn.Parameter | None, nn.Parameter | None, nn.Parameter | None],
) -> Pack | None:
    """The pack of three weights (N, K) and three biases (N,), or of none; for calls that need no gradient.

    Returns:
        None where there can be none: while compiling, while a CUDA graph is captured, and where a weight or bias is no
        Parameter (replicas of DataParallel) or of a subclass, or weights have no elements.
    """
    parameters = (*weights, *biases)
    if torch.compiler.is_compiling() or not all(p is None or type(p) is nn.Parameter for p in parameters):
        return None
    if weights[0].numel() == 0 or _is_capturing(weights[0]):
        return None
    key = tuple(map(id, parameters))
    with _lock:
        entry = _entries.get(key)
        if entry is not None and entry.belongs_to(parameters):
            if entry.facts == tuple(map(facts_of, parameters)):
                entry.hold_to_values(weights, biases)
                return entry.pack
        else:
            entry = None
        if entry is None:
            entry = _entries[key] = _Entry(parameters, lambda reference: _entries.pop(key, None))
        entry.fill(weights, biases)
        return entry.pack


def refresh(model: nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Copies the weights of a model into their packs again.

    Needed after an edit through `.data` of part of a weight in place, which nothing can detect; every other change is
    seen without it.

    Args:
        model: a module, a parameter, or several.

    Raises:
        TypeError: something else.
        RuntimeError: a CUDA graph is being captured.
    """
    is_module = isinstance(model, nn.Module)
    parameters = itertools.chain(model.parameters(), model.buffers()) if is_module else model
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not all(isinstance(p, Tensor) for p in parameters):
        raise TypeError(f"model must be a module or parameters, got {type(model).__name__}")
    changed = {id(p) for p in parameters}
    prepacked.forget(changed)
    with _lock:
        for key, entry in list(_entries.items()):
            parameters = entry.parameters()
            if changed.intersection(key) and entry.belongs_to(parameters) and parameters[0] is not None:
                if _is_capturing(parameters[0]):
                    raise RuntimeError("packed weights cannot be refreshed while a CUDA graph is captured")
                entry.fill(parameters[:3], parameters[3:])
