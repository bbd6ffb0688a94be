"""Ops as data: what a cell draws, who takes part in it, and how a formula becomes a pass that is timed.

Sizes are BERT-base's: width 768 of 12 heads, feed-forward 3072.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from bertfast import backends
from bertfast.benchmarks import peers
from bertfast.benchmarks.harness import Contest, Entrant, Results
from bertfast.benchmarks.records import OP_PASSES, Cell
from bertfast.benchmarks.roofline import Cost

WIDTH, HEADS, INNER = 768, 12, 3072
HEAD_DIM = WIDTH // HEADS
VOCAB, POSITIONS, TYPES = 30522, 512, 2
# On a GPU inputs rotate through twice its L2 cache. Caches of servers' CPUs are too large for that: what does not fit
# this stays warm there, as in a model, and a share of the floor above 1 is the cache's.
ROTATED_BYTES = 64 * 2**20
LEAST_SETS, MOST_SETS = 2, 8
# Sizes of these decide in eager mode who serves, so the one that a table names may not be the one of `auto`.
SIZED_OPS = ("linear_gelu", "feed_forward", "qkv_projection")
COMPILE_MODES = {"compile": None, "compile max-autotune": "max-autotune"}
WITHOUT_GRAPHS = "max-autotune-no-cudagraphs"

Inputs = dict[str, Any]
Forward = Callable[[Inputs], Any]


def compile_mode(name: str, replayed: bool) -> str | None:
    """torch.compile's, of a contestant of `COMPILE_MODES`: a graph cannot record the replay of another."""
    mode = COMPILE_MODES[name]
    return WITHOUT_GRAPHS if replayed and mode == "max-autotune" else mode


def lengths_of(cell: Cell) -> list[int]:
    """Tokens of each row; padding is on the right.

    dense: S. half: spread evenly between S and 1, so that half of the batch is padding; a single row is half padding.
    mixed: one row of S, the others as sentences are, log-normal about S/4, the same for every run.
    """
    batch, length = cell.batch, cell.length
    if cell.fill == "dense":
        return [length] * batch
    if cell.fill == "half":
        spread = torch.linspace(length, 1, batch) if batch > 1 else torch.tensor([(length + 1) // 2])
        return spread.round().int().tolist()
    generator = torch.Generator().manual_seed(0)
    drawn = length / 4 * torch.exp(0.6 * torch.randn(batch - 1, generator=generator, dtype=torch.float64))
    return [length, *drawn.round().int().clamp(1, length).tolist()]


def key_mask(lengths: Sequence[int], length: int, device: str) -> Tensor:
    """(B, S) bool, True at tokens."""
    return (torch.arange(length) < torch.tensor(lengths)[:, None]).to(device)


class Draw:
    """Random numbers for a cell, the same in every run."""

    def __init__(self, cell: Cell, seed: int):
        self.cell = cell
        self.dtype = getattr(torch, cell.dtype)
        self._generator = torch.Generator(cell.device).manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        """Normal numbers in the cell's dtype, a leaf that gets a gradient."""
        return self.like(shape, scale, shift).requires_grad_()

    def parameter(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> nn.Parameter:
        """The same as a module holds it: some backends keep copies of weights, and know by this what is one."""
        return nn.Parameter(self.like(shape, scale, shift))

    def like(self, shape: Sequence[int], scale: float = 1.0, shift: float = 0.0) -> Tensor:
        """Normal numbers without a gradient."""
        drawn = torch.randn(tuple(shape), generator=self._generator, device=self.cell.device)
        return drawn.mul_(scale).add_(shift).to(self.dtype)

    def ids(self, rows: int, *shape: int) -> Tensor:
        """Indices of a table."""
        return torch.randint(rows, shape, generator=self._generator, device=self.cell.device)


@dataclass(frozen=True)
class Op:
    """An op and its contestants.

    Attributes:
        name: the public op's.
        draw: a set of inputs by name; those drawn as leaves are differentiated.
        eager: the formula in plain PyTorch, one op after the other.
        ours: the public op on a backend, None for the automatic choice.
        exact: `bertfast.reference`'s formula.
        cost: the floor, of a pass with rows of these lengths and elements of e bytes.
        facts: what `backends.Call` is told apart from device, dtypes and gradients.
        others: more contestants, of PyTorch too.
        shared: inputs that are the same in all sets: tables that are read in few places.
        outputs: names of what is returned.
        fills: of `records.FILLS`.
    """

    name: str
    draw: Callable[[Draw, Cell], Inputs]
    eager: Forward
    ours: Callable[[Inputs, str | None], Any]
    exact: Forward
    cost: Callable[[str, Cell, list[int], int], Cost]
    facts: Callable[[Cell], dict[str, Any]] = lambda cell: {}
    others: Mapping[str, Forward] = field(default_factory=dict)
    shared: Callable[[Draw, Cell], Inputs] = lambda draw, cell: {}
    outputs: tuple[str, ...] = ("out",)
    fills: tuple[str, ...] = ("dense",)
    passes: tuple[str, ...] = OP_PASSES

    def contestants(
        self, cell: Cell, *, compiled: bool = False, replayed: bool = False
    ) -> dict[str, Callable[[], Entrant]]:
        """Who takes part in a cell; with `compiled` also what torch.compile makes of the formula, without CUDA graphs
        of its own where it is to be recorded in one and `replayed`."""
        formulas = {name: partial(self.ours, backend=backend) for name, backend in self._backends(cell).items()}
        formulas |= {"eager": self.eager, **self.others}
        contestants = {name: partial(self._entrant, cell, formula) for name, formula in formulas.items()}
        contestants |= {name: partial(self._peer, cell, name) for name in peers.taking_part(cell)}
        if compiled:
            modes = {name: compile_mode(name, replayed) for name in COMPILE_MODES}
            contestants |= {name: partial(self._compiled, cell, mode) for name, mode in modes.items()}
        return contestants

    def contest(self, cell: Cell, *, compiled: bool = False, replayed: bool = False) -> Contest:
        """Everything that the harness needs for a cell."""
        sets = self._sets(cell)
        return Contest(
            cell,
            self.cost(cell.pass_, cell, lengths_of(cell), getattr(torch, cell.dtype).itemsize),
            sets,
            self.contestants(cell, compiled=compiled, replayed=replayed),
            exact=lambda: self._entrant(cell, self.exact).call(_doubled(sets[0])),
            yardsticks=[
                lambda way=way: self._entrant(cell, way).call(sets[0]) for way in (self.eager, *self.others.values())
            ],
        )

    def _sets(self, cell: Cell) -> list[InputSet]:
        shared = self.shared(Draw(cell, -1), cell)
        sets: list[InputSet] = []
        while len(sets) < self._count(cell, sets):
            draw = Draw(cell, len(sets))
            tensors = {**shared, **self.draw(draw, cell)}
            with torch.no_grad():
                outputs = _tuple(self.eager(tensors))
            cotangents = tuple(draw.like(out.shape) for out in outputs) if cell.pass_ != "forward" else ()
            sets.append(InputSet(tensors, cotangents, frozenset(shared)))
        return sets

    def _count(self, cell: Cell, sets: list[InputSet]) -> int:
        if not sets:
            return 1
        rotated = ROTATED_BYTES
        if cell.device == "cuda":
            rotated = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        return min(max(-(-rotated // sets[0].bytes), LEAST_SETS), MOST_SETS)

    def _backends(self, cell: Cell) -> dict[str, str | None]:
        """Ours by name: the automatic choice, and those that can be named instead."""
        compute = torch.cuda.get_device_capability() if cell.device == "cuda" else None
        dtypes, grad = (getattr(torch, cell.dtype),), cell.pass_ != "forward"
        call = backends.Call(self.name, cell.device, compute, dtypes, grad, **self.facts(cell))
        chosen = backends.choose(call).backend
        serving = [c.backend for c in backends.candidates() if c.op == self.name and not c.not_supported_reasons(call)]
        named = [name for name in serving if name in backends.AUTO_ORDER.get(cell.device, ())]
        if not (cell.device == "cuda" and self.name in SIZED_OPS):
            named = [name for name in named if name != chosen]
        return {"bertfast": None, **{f"bertfast {name}": name for name in named}}

    def _entrant(self, cell: Cell, formula: Forward) -> Entrant:
        return Entrant(PASSES[cell.pass_](self.outputs, formula))

    def _peer(self, cell: Cell, name: str) -> Entrant:
        return self._entrant(cell, getattr(peers.adapter(name), self.name)(cell))

    def _compiled(self, cell: Cell, mode: str | None) -> Entrant:
        # Every op begins anew. A backward pass that is timed keeps its graph, so no buffer of it can be given away.
        torch._dynamo.reset()
        torch._functorch.config.donated_buffer = False
        if cell.pass_ == "backward" and mode == "max-autotune":
            mode = WITHOUT_GRAPHS  # a graph's next replay overwrites what the kept one needs
        return self._entrant(cell, torch.compile(self.eager, mode=mode))


@dataclass(frozen=True)
class InputSet:
    """Inputs by name, gradients of the outputs, and which inputs other sets share."""

    tensors: Inputs
    cotangents: tuple[Tensor, ...]
    shared: frozenset[str] = frozenset()

    @cached_property
    def leaves(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.tensors.items() if isinstance(t, Tensor) and t.requires_grad}

    @property
    def bytes(self) -> int:
        own = [t for name, t in self.tensors.items() if name not in self.shared and isinstance(t, Tensor)]
        return sum(t.nbytes for t in (*own, *self.cotangents))


def _doubled(inputs: InputSet) -> InputSet:
    def double(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().double().requires_grad_(value.requires_grad)

    tensors = {name: double(value) for name, value in inputs.tensors.items()}
    return InputSet(tensors, tuple(map(double, inputs.cotangents)))


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _forward(names: tuple[str, ...], formula: Forward) -> Callable[[InputSet], Results]:
    @torch.no_grad()
    def call(inputs: InputSet) -> Results:
        return dict(zip(names, _tuple(formula(inputs.tensors)), strict=True))

    return call


def _both(names: tuple[str, ...], formula: Forward) -> Callable[[InputSet], Results]:
    def call(inputs: InputSet) -> Results:
        outputs, leaves = _tuple(formula(inputs.tensors)), inputs.leaves
        gradients = torch.autograd.grad(outputs, tuple(leaves.values()), inputs.cotangents)
        return {**dict(zip(names, outputs, strict=True)), **_named(leaves, gradients)}

    return call


def _backward(names: tuple[str, ...], formula: Forward) -> Callable[[InputSet], Results]:
    """The first call on a set runs forward as well; its graph is kept."""
    graphs: dict[int, tuple[Tensor, ...]] = {}

    def call(inputs: InputSet) -> Results:
        outputs = graphs.get(id(inputs))
        if outputs is None:
            outputs = graphs[id(inputs)] = _tuple(formula(inputs.tensors))
        leaves = inputs.leaves
        gradients = torch.autograd.grad(outputs, tuple(leaves.values()), inputs.cotangents, retain_graph=True)
        return _named(leaves, gradients)

    return call


def _named(leaves: Mapping[str, Tensor], gradients: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


PASSES = {"forward": _forward, "backward": _backward, "both": _both}
