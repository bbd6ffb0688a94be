"""One cell: contestants that do the same work are held to a float64 result, and those that are right are timed in turn.

A contestant that cannot be built, raises, is in the wrong mode, has another dtype or is wrong gets a line with its
reason and no number; the others go on. The first call is timed apart. Inputs are random, and rotate from call to call
through more memory than a cache holds, as far as that is cheap (`cases.ROTATED_BYTES`). Where replays of CUDA graphs
are timed, each of the inputs has a graph of its own, and what the first one computes is compared as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bertfast.benchmarks import graphs, measure
from bertfast.benchmarks.memory import peak_bytes
from bertfast.benchmarks.records import Cell, Row, Skipped
from bertfast.benchmarks.roofline import Ceilings, Cost
from bertfast.benchmarks.timer import Timer

Results = Mapping[str, Tensor]
# An error may be twice the largest of the yardsticks and two roundings of the largest value.
STOCK_FACTOR, ROUNDINGS = 2.0, 2.0
LONGEST_REASON = 200


class Refused(Exception):
    """Why a contestant gets no number, in a sentence."""


@dataclass(frozen=True)
class Entrant:
    """A contestant that is ready.

    Attributes:
        call: what is timed, on one of the contest's inputs.
        check: what it computes of the first inputs, by name; by default `call` returns that.
        results: the same of what a replay of `call` on the first inputs leaves, by name; None where that cannot be
            compared, as with dropout. By default what `call` returned, if that is what is compared.
        modules: those at work: their mode and their parameters' dtype must be the cell's.
        reset: frees what an earlier call left to a later one, so that peaks of memory are alike.
        own_memory: it allocates where torch does not see it, so that its peak is not known.
    """

    call: Callable[[Any], Any]
    check: Callable[[], Results] | None = None
    results: Callable[[Any], Results] | None = None
    modules: Sequence[nn.Module] = ()
    reset: Callable[[], object] = lambda: None
    own_memory: bool = False


@dataclass(frozen=True)
class Contest:
    """Everything about a cell but who is the fastest.

    Attributes:
        cell: what is compared.
        cost: its floor.
        inputs: alike in everything but their numbers.
        contestants: functions that build them, so that one that cannot be built is one line; the first one that is
            timed of `over` is what the others' speed is compared with.
        exact: the results in float64.
        yardsticks: those of PyTorch in the cell's dtype: what rounding does to a formula.
        over: contestants to take as baseline, in this order.
        parameter_dtype: what modules must have; the cell's by default.
    """

    cell: Cell
    cost: Cost
    inputs: Sequence[Any]
    contestants: Mapping[str, Callable[[], Entrant]]
    exact: Callable[[], Results]
    yardsticks: Sequence[Callable[[], Results]]
    over: Sequence[str] = ("eager",)
    parameter_dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.cell.dtype)

    @property
    def is_training(self) -> bool:
        return self.cell.pass_ == "training"


@dataclass(frozen=True)
class _Admitted:
    """A contestant that is right, and what is known of it before it is timed."""

    call: Callable[[], object]
    first_call_seconds: float
    error: float
    peak_bytes: int | None


class _Died(Exception):
    """A contestant raised while it was timed."""

    def __init__(self, name: str, cause: Exception):
        super().__init__(name)
        self.name, self.cause = name, cause


def run(contest: Contest, ceilings: Ceilings, timer: Timer) -> list[Row | Skipped]:
    """A row or a reason for each contestant, in their order. Raises nothing that a contestant raises.

    Raises:
        Exception: the float64 result or a yardstick cannot be had, without which there is no comparison.
    """
    with timer.place():
        return _run(contest, ceilings, timer)


def _run(contest: Contest, ceilings: Ceilings, timer: Timer) -> list[Row | Skipped]:
    tolerances = _Tolerances(contest)
    admitted: dict[str, _Admitted] = {}
    reasons: dict[str, Exception] = {}
    for name, build in contest.contestants.items():
        try:
            admitted[name] = _admit(contest, name, build(), tolerances, timer)
        except Exception as error:
            reasons[name] = error
            _release(contest.cell)
    del tolerances
    timings: dict[str, measure.Timing] = {}
    while admitted and not timings:
        try:
            timings = timer.rounds_of({name: found.call for name, found in admitted.items()})
        except _Died as died:
            reasons[died.name] = died.cause
            del admitted[died.name]
            _release(contest.cell)
    over = next((name for name in (*contest.over, *timings) if name in timings), None)
    return [
        _row(contest, ceilings, name, admitted[name], timings, over)
        if name in timings
        else skip(contest.cell, name, reasons[name], excused=isinstance(reasons[name], graphs.CannotCapture))
        for name in contest.contestants
    ]


def ready(contest: Contest, name: str, timer: Timer) -> Callable[[], object]:
    """One contestant's call, warm and found to be right, on the next of the inputs each time.

    Raises:
        Refused: it is not right.
        Exception: what it raises.
    """
    return _admit(contest, name, contest.contestants[name](), _Tolerances(contest), timer).call


class _Tolerances:
    """What each result may be off, in float64.

    Raises:
        ValueError: a yardstick is that far off that it must be wrong.
    """

    def __init__(self, contest: Contest):
        self._exact = {name: value.detach().double() for name, value in contest.exact().items()}
        largest = {name: value.abs().max().item() if value.numel() else 0.0 for name, value in self._exact.items()}
        eps = torch.finfo(contest.dtype).eps
        errors = dict.fromkeys(self._exact, 0.0)
        for yardstick in contest.yardsticks:
            for name, value in yardstick().items():
                error = _distance(value, self._exact[name])
                if not error <= eps**0.5 * largest[name]:
                    raise ValueError(f"nothing to compare with: {name} of plain PyTorch is {error:.3g} off")
                errors[name] = max(errors[name], error)
        self._allowed = {
            name: STOCK_FACTOR * error + ROUNDINGS * eps * max(largest[name], torch.finfo(torch.float32).tiny)
            for name, error in errors.items()
        }

    def error_of(self, results: Results) -> float:
        """The largest error, as a multiple of what is allowed.

        Raises:
            Refused: it is above 1, or results are missing.
        """
        if missing := self._exact.keys() ^ results.keys():
            raise Refused(f"wrong result: has {', '.join(sorted(results))}, not alike in {', '.join(sorted(missing))}")
        errors = {}
        for name, exact in self._exact.items():
            if results[name].shape != exact.shape:
                shapes = f"{tuple(results[name].shape)}, not {tuple(exact.shape)}"
                raise Refused(f"wrong result: the shape of {name} is {shapes}")
            errors[name] = _distance(results[name], exact) / self._allowed[name]
        worst = max(errors, key=errors.__getitem__)
        if not errors[worst] <= 1:
            raise Refused(f"wrong result: {worst} is off by {errors[worst]:.3g} times what is allowed")
        return errors[worst]


def _distance(value: Tensor, exact: Tensor) -> float:
    """The largest; infinite where there is a NaN."""
    if not exact.numel():
        return 0.0
    return (value.detach().to(exact.device).double() - exact).nan_to_num_(nan=math.inf).abs().max().item()


def _admit(contest: Contest, name: str, entrant: Entrant, tolerances: _Tolerances, timer: Timer) -> _Admitted:
    """Calls for the first time, compares, looks at modes and dtypes, warms up, and measures memory."""
    first_call_seconds, results = timer.first(lambda: entrant.call(contest.inputs[0]))
    results = results if entrant.check is None else entrant.check()
    error = tolerances.error_of(results)
    _check_mode(contest, entrant, results)
    del results
    for inputs in contest.inputs:
        entrant.call(inputs)
    entrant.reset()
    peak = None
    if not entrant.own_memory:
        peak = peak_bytes(lambda: entrant.call(contest.inputs[0]), contest.cell.device)
    timed = timer.prepared([partial(entrant.call, inputs) for inputs in contest.inputs])
    if timer.replayed:
        _check_replay(entrant, timed[0], tolerances)
    turn = itertools.cycle(timed)

    def call() -> object:
        try:
            return next(turn)()
        except Exception as error:
            raise _Died(name, error) from error

    return _Admitted(call, first_call_seconds, error, peak)


def _check_replay(entrant: Entrant, replay: Callable[[], Any], tolerances: _Tolerances) -> None:
    """The last of the graphs may have overwritten what the recorded call had computed; a replay computes it again."""
    output = replay()
    if entrant.results is not None:
        tolerances.error_of(entrant.results(output))
    elif entrant.check is None:
        tolerances.error_of(output)


def _check_mode(contest: Contest, entrant: Entrant, results: Results) -> None:
    wanted = "train" if contest.is_training else "eval"
    for child in itertools.chain.from_iterable(module.modules() for module in entrant.modules):
        if child.training != contest.is_training:
            got = "train" if child.training else "eval"
            raise Refused(f"{type(child).__name__} is in {got} mode, this cell is measured in {wanted} mode")
    dtype = contest.parameter_dtype or contest.dtype
    for module in entrant.modules:
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype:
                raise Refused(f"{name} is {parameter.dtype}, this cell has parameters of {dtype}")
    if not entrant.modules:
        for name, value in results.items():
            if value.dtype != contest.dtype:
                raise Refused(f"{name} is {value.dtype}, this cell is measured in {contest.dtype}")


def _row(contest, ceilings: Ceilings, name: str, found: _Admitted, timings, over: str | None) -> Row:
    timing, cost = timings[name], contest.cost
    quantiles = timing.quantiles
    floor = ceilings.floor_seconds(cost, contest.cell.dtype)
    speedup = None if name == over else {"over": over, **asdict(timing.speedup_over(timings[over]))}
    return Row(
        **asdict(contest.cell),
        contestant=name,
        seconds=list(timing.seconds),
        **asdict(quantiles),
        speedup=speedup,
        first_call_seconds=found.first_call_seconds,
        peak_bytes=found.peak_bytes,
        error=found.error,
        flops=cost.flops,
        bytes=cost.bytes,
        flops_per_second=cost.flops / quantiles.median,
        bytes_per_second=cost.bytes / quantiles.median,
        floor_seconds=floor,
        of_floor=floor / quantiles.median,
    )


def skip(cell: Cell, contestant: str, error: BaseException, *, excused: bool) -> Skipped:
    """The line of a contestant that raised."""
    return Skipped(**asdict(cell), contestant=contestant, reason=reason_of(error), excused=excused)


def reason_of(error: BaseException) -> str:
    """One line for people."""
    text = " ".join(str(error).split())
    text = (
        text
        if isinstance(error, (Refused, graphs.CannotCapture))
        else f"{type(error).__name__}: {text}".removesuffix(": ")
    )
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 4]} ..."


def _release(cell: Cell) -> None:
    if cell.device == "cuda":
        torch.cuda.empty_cache()
