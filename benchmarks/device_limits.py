"""Where indices of 32 bits and small grids end, and which device a launch goes to: each op on each GPU backend.

Tensors of more than 2^31 elements, and more blocks than two of a grid's three dimensions take (65,535). What is
computed at the far end must be what the op computes of that end alone: the error of both against float64 is compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from unittest.mock import patch

import torch
from torch import Tensor

from bertfast import BackendError, backends, gemm_forms, ops
from bertfast.benchmarks import device_models
from bertfast.benchmarks.device_check import Report
from bertfast.benchmarks.device_parity import GPU_BACKENDS, NEEDS_CHECKOUT, cases, on_device

DTYPE = torch.bfloat16
FAR, GRID = 2**31, 65_535
# The largest case, attention with gradients, holds six tensors of 4.3 GB: q, k and v in one, out, and four gradients.
MEMORY = 48 * 2**30
# A case that is begun with less left would be cut short by the stage's limit.
CASE_SECONDS = 4.0
Outputs = Tensor | tuple[Tensor, ...]
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """An op on large tensors, and on what lies at their end.

    Attributes:
        title, op: for people; the op's name.
        call: the op, on inputs by name and a backend.
        inputs: the large ones.
        end: those of the same call on the end alone.
        rows: how many of the first dimension of outputs and gradients that is.
        leaves: inputs with gradients that are compared; none: forward only.
    """

    title: str
    op: str
    call: Callable[[Mapping[str, Tensor], str], Outputs]
    inputs: Mapping[str, Tensor]
    end: Mapping[str, Tensor]
    rows: int
    leaves: tuple[str, ...]


def limits(report: Report) -> None:
    """Other devices and threads, then large grids, then far offsets."""
    with report.guard("devices and threads"):
        _devices_and_threads(report)
    grid, far, d = (GRID, FAR, 64) if report.device == "cuda" else (40, 2**12, 4)
    for make in chain(_large_grids(grid, report.device), _far_offsets(far, d, report.device)):
        _compare(report, make)
        device_models.release(report.device)


def _names(report: Report) -> tuple[str, ...]:
    return GPU_BACKENDS if report.device == "cuda" else ("cpu", "torch")


def _candidates(report: Report, op: str) -> list[backends.Capability]:
    return [c for c in backends.candidates() if c.op == op and c.backend in _names(report)]


def _devices_and_threads(report: Report) -> None:
    """A launch enters the device of its tensors, whatever the current one is, also where a thread has none yet."""
    try:
        made = {op: next(iter(cases(op, small=True).values()))(DTYPE) for op in backends.OPS}
    except ImportError as error:
        report.not_run("devices and threads", f"{NEEDS_CHECKOUT} ({error})")
        return
    cards = torch.cuda.device_count() if report.device == "cuda" else 0
    for op, case in made.items():
        for capability in _candidates(report, op):
            what, reason = f"{op} {capability.backend}", capability.unavailable_reason()
            if reason is not None:
                report.not_run(what, reason)
                continue
            with report.guard(what):
                try:
                    expected = _outputs(case, capability.backend, report.device)
                except BackendError:
                    report.not_run(what, "the backend declares that it does not serve this, and refused it")
                    continue
                got = _in_thread(partial(_outputs, case, capability.backend, report.device))
                report.check(f"{what} in a new thread", _equal(got, expected), "the result differs")
                if cards < 2:
                    report.not_run(f"{what} on another device", "needs two GPUs")
                    continue
                got = _outputs(case, capability.backend, "cuda:1")
                good = _equal(got, expected) and torch.cuda.current_device() == 0
                report.check(f"{what} on another device", good, "the result or the current device differs")


def _outputs(case, backend: str, device: str) -> dict[str, Tensor]:
    placed = on_device(case, device)
    outputs = placed.ours(placed.inputs, backend)
    wrong = {str(out.device) for out in outputs.values()} - {str(torch.empty(0, device=device).device)}
    if wrong:
        raise RuntimeError(f"outputs are on {', '.join(sorted(wrong))}, inputs on {device}")
    return {name: out.detach().cpu() for name, out in outputs.items()}


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _in_thread(call: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    done: list[dict[str, Tensor]] = []
    raised: list[Exception] = []

    def run() -> None:
        try:
            done.append(call())
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return done[0]


def _numbers(*shape: int, device: str, scale: float = 1.0) -> Tensor:
    # In place and in the dtype itself: in fp32 the largest ones take 8.6 GB.
    return torch.empty(shape, dtype=DTYPE, device=device).normal_(std=scale)


def _large_grids(grid: int, device: str) -> Iterator[partial[Case]]:
    """Small tensors of more sequences, heads and tiles of 128 rows than `grid`."""
    rows, note = 128 * (grid + 9), f", {grid + 9} tiles"
    yield partial(_attention, grid // 12 + 9, 12, 4, 64, device, f", {12 * (grid // 12 + 9)} heads")
    yield partial(_varlen_attention, grid + 9, 3, 1, 64, device, f", {grid + 9} sequences")
    yield partial(_add_layer_norm, rows, 16, device, note)
    yield partial(_embed_layer_norm, grid + 9, 128, 16, device, note)
    yield partial(_linear_gelu, rows, 16, 8, device, note)
    yield partial(_feed_forward, rows, 16, 8, device, note)
    yield partial(_qkv_projection, rows, 16, device, note)


def _far_offsets(far: int, d: int, device: str) -> Iterator[partial[Case]]:
    """BERT-base's sizes, or small ones, in tensors of more than `far` elements."""
    width, length, note = 12 * d, 8 * d, f", more than {far} elements"
    rows = -(-far // width) + 130
    inner_rows, packed_rows = (-(-far // n) + 130 for n in (4 * width, 3 * width))
    yield partial(_add_layer_norm, rows, width, device, note)
    yield partial(_attention, -(-far // (length * width)) + 1, 12, length, d, device, note)
    yield partial(_varlen_attention, -(-far // (length * width)) + 1, length, 12, d, device, note)
    yield partial(_linear_gelu, inner_rows, width, 4 * width, device, note)
    yield partial(_feed_forward, inner_rows, width, 4 * width, device, note)
    yield partial(_qkv_projection, packed_rows, width, device, note)
    yield partial(_embed_layer_norm, -(-rows // length), length, width, device, note)
    yield partial(_table, rows, width, device, note)


def _rows_of(inputs: Mapping[str, Tensor], count: int, *names: str) -> dict[str, Tensor]:
    return {name: t[-count:] if name in names else t for name, t in inputs.items()}


def _attention(b: int, h: int, s: int, d: int, device: str, note: str) -> Case:
    x = _numbers(b, s, h, d, device=device).transpose(1, 2)
    inputs = {"query": x, "key": x, "value": x}

    def call(given: Mapping[str, Tensor], backend: str) -> Tensor:
        return ops.attention(given["query"], given["key"], given["value"], backend=backend)

    return Case(f"attention{note}", "attention", call, inputs, _rows_of(inputs, 1, *inputs), 1, tuple(inputs))


def _varlen_attention(count: int, s: int, h: int, d: int, device: str, note: str) -> Case:
    x = _numbers(count * s, h, d, device=device)
    names = ("query", "key", "value")
    ends = torch.arange(count + 1, dtype=torch.int32, device=device) * s
    inputs = {**dict.fromkeys(names, x), "ends": ends}

    def call(given: Mapping[str, Tensor], backend: str) -> Tensor:
        q, k, v, e = given.values()
        return ops.varlen_attention(q, k, v, e, e, s, s, backend=backend)

    end = {**_rows_of(inputs, s, *names), "ends": ends[:2]}
    return Case(f"varlen_attention{note}", "varlen_attention", call, inputs, end, s, names)


def _add_layer_norm(m: int, n: int, device: str, note: str) -> Case:
    inputs = {"x": _numbers(m, n, device=device)}
    inputs |= {name: _numbers(n, device=device) for name in ("weight", "bias")}

    def call(given: Mapping[str, Tensor], backend: str) -> Tensor:
        return ops.add_layer_norm(given["x"], None, given["weight"], given["bias"], backend=backend)

    return Case(f"add_layer_norm{note}", "add_layer_norm", call, inputs, _rows_of(inputs, 4, "x"), 4, ("x",))


def _embedding(given: Mapping[str, Tensor], backend: str) -> Tensor:
    ids, *tables, weight, bias = given.values()
    return ops.embed_layer_norm(ids, None, None, *tables, None, weight, bias, backend=backend)


def _tables(rows: int, positions: int, n: int, device: str) -> dict[str, Tensor]:
    tables = {"word": _numbers(rows, n, device=device), "position": _numbers(positions, n, device=device)}
    return tables | {name: _numbers(n, device=device) for name in ("weight", "bias")}


def _embed_layer_norm(b: int, s: int, n: int, device: str, note: str) -> Case:
    inputs = {"ids": torch.randint(50, (b, s), device=device), **_tables(50, s, n, device)}
    # A sum over all ids has no end to compare.
    return Case(f"embed_layer_norm{note}", "embed_layer_norm", _embedding, inputs, _rows_of(inputs, 1, "ids"), 1, ())


def _table(rows: int, n: int, device: str, note: str) -> Case:
    """Ids at the end of a table, whose gradient is as large."""
    ids = rows - torch.tensor([[8, 1, 4, 1]], device=device)
    inputs = {"ids": ids, **_tables(rows, 4, n, device)}
    end = {**_rows_of(inputs, 8, "word"), "ids": ids - (rows - 8)}
    return Case(f"embed_layer_norm's table{note}", "embed_layer_norm", _embedding, inputs, end, 8, ("word",))


def _linear_gelu(m: int, n: int, f: int, device: str, note: str) -> Case:
    inputs = {"x": _numbers(m, n, device=device)}
    inputs |= {"weight": _numbers(f, n, device=device, scale=n**-0.5), "bias": _numbers(f, device=device)}

    def call(given: Mapping[str, Tensor], backend: str) -> Tensor:
        return ops.linear_gelu(*given.values(), backend=backend)

    return Case(f"linear_gelu{note}", "linear_gelu", call, inputs, _rows_of(inputs, 130, "x"), 130, ("x",))


def _feed_forward(m: int, n: int, f: int, device: str, note: str) -> Case:
    inputs = {"x": _numbers(m, n, device=device)}
    inputs |= {"w_in": _numbers(f, n, device=device, scale=n**-0.5), "b_in": _numbers(f, device=device)}
    inputs |= {"w_out": _numbers(n, f, device=device, scale=f**-0.5), "b_out": _numbers(n, device=device)}

    def call(given: Mapping[str, Tensor], backend: str) -> Tensor:
        return ops.feed_forward(*given.values(), backend=backend)

    return Case(f"feed_forward{note}", "feed_forward", call, inputs, _rows_of(inputs, 130, "x"), 130, ("x",))


def _qkv_projection(m: int, n: int, device: str, note: str) -> Case:
    inputs = {"x": _numbers(m, n, device=device)}
    inputs |= {f"w{name}": _numbers(n, n, device=device, scale=n**-0.5) for name in "qkv"}
    inputs |= {f"b{name}": _numbers(n, device=device) for name in "qkv"}

    def call(given: Mapping[str, Tensor], backend: str) -> tuple[Tensor, ...]:
        x, *rest = given.values()
        return tuple(ops.qkv_projection(x, rest[:3], rest[3:], backend=backend))

    return Case(f"qkv_projection{note}", "qkv_projection", call, inputs, _rows_of(inputs, 130, "x"), 130, ("x",))


def _compare(report: Report, make: partial[Case]) -> None:
    title = make.func.__name__.strip("_") + make.args[-1]
    if report.device == "cuda" and torch.cuda.mem_get_info()[0] < MEMORY:
        report.not_run(title, f"less than {MEMORY / 2**30:.0f} GiB of the card's memory are free")
        return
    if report.seconds_left() < CASE_SECONDS:
        report.not_run(title, "out of time")
        return
    with report.guard(title):
        case = make()
        stock = _results(case, case.end, "torch")
        doubled = {name: t.double() if t.is_floating_point() else t for name, t in case.end.items()}
        exact = _results(case, doubled, "torch")
        for capability in _candidates(report, case.op):
            item, reason = f"{case.title}, {capability.backend}", capability.unavailable_reason()
            if reason is not None:
                report.not_run(item, reason)
                continue
            _compare_end(report, item, case, capability.backend, stock, exact)
            if capability.backend == "cuda" and case.op in ("linear_gelu", "feed_forward"):
                # At these sizes it leaves the product to torch.
                with patch.object(gemm_forms, "is_separate", return_value=False):
                    _compare_end(report, f"{item}, its own GEMM", case, "cuda", stock, exact)


def _compare_end(report: Report, item: str, case: Case, backend: str, stock: Results, exact: Results) -> None:
    with report.guard(item):
        try:
            found = _results(case, case.inputs, backend)
        except BackendError:
            report.not_run(item, "the backend declares that it does not serve this, and refused it")
            return
        wrong = [name for name in exact if not _is_near(found[name], stock[name], exact[name])]
        report.check(item, not wrong, f"{', '.join(wrong)} at the end differ from those of the end alone")


def _results(case: Case, given: Mapping[str, Tensor], backend: str) -> Results:
    """Outputs and gradients at the end, copied, so that the rest can go."""
    leaves = {name: given[name].detach().requires_grad_() for name in case.leaves}
    with torch.set_grad_enabled(bool(leaves)):
        outputs = case.call({**given, **leaves}, backend)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results = {f"out {i}": out[-case.rows :].detach().clone() for i, out in enumerate(outputs)}
    if leaves:
        generator = torch.Generator(outputs[0].device).manual_seed(0)
        # The same for every row, which takes no memory.
        row = torch.randn(outputs[0].shape[-1], generator=generator, device=outputs[0].device).to(outputs[0].dtype)
        gradients = torch.autograd.grad(outputs, tuple(leaves.values()), [row.expand_as(out) for out in outputs])
        results |= {f"d{name}": d[-case.rows :].clone() for name, d in zip(leaves, gradients, strict=True)}
    return results


def _is_near(found: Tensor, stock: Tensor, exact: Tensor) -> bool:
    """Within twice the error of PyTorch and two roundings of the largest value."""
    errors = [(t.double() - exact).abs().nan_to_num(nan=torch.inf).max().item() for t in (found, stock)]
    return errors[0] <= 2 * errors[1] + 2 * torch.finfo(DTYPE).eps * exact.abs().max().item()
