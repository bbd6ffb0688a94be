"""Timings of single ops on the device: every backend that serves an op in turn, next to what the card can do.

Inputs are as warm in cache as they are inside a model, so a row op on few rows may pass the bandwidth of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from bertfast import backends, ops
from bertfast.benchmarks import measure
from bertfast.benchmarks.device_check import Report
from bertfast.ops.linear_gelu import FWD, SEPARATE_FWD

DTYPE = torch.bfloat16
WIDTH, FEED_FORWARD = 768, 3072
ROWS = (128, 1024, 4096, 16384)
LENGTHS = (128, 512)
# A case that is begun with less left would be cut short by the stage's limit.
CASE_SECONDS = 4.0


@dataclass(frozen=True)
class OpTiming:
    """One op at one size.

    Attributes:
        title: with the size.
        op: its name.
        call: the op on a backend.
        bytes, flops: of the floor: every input read once, every output written once.
    """

    title: str
    op: str
    call: Callable[[str], object]
    bytes: int
    flops: int = 0


def timings(report: Report) -> None:
    """Each op of the GPU's own backends against PyTorch's, forward, and forward with backward."""
    on_gpu = report.device == "cuda"
    stopwatch = measure.cuda_stopwatch if on_gpu else None
    width, inner, rows, lengths = (WIDTH, FEED_FORWARD, ROWS, LENGTHS) if on_gpu else (48, 96, (16,), (8,))
    rounds, seconds = (15, 0.005) if on_gpu else (3, 0.001)
    peaks = _peaks(report, rounds, stopwatch)
    # Each line of the table in `gemm_forms`: few rows, many, K in between, and long.
    many = ((m, width, inner) for m in rows)
    gemms = ((16, width, inner), *many, (rows[-1], 512, inner), (rows[-1], 8192, 1024)) if on_gpu else ((8, 16, 24),)
    for sizes in gemms:
        _gemms(report, *sizes, rounds, seconds, stopwatch)
    for m in rows:
        around, attention = _cases(m, width, inner, report.device), _attention_cases(m, lengths, width, report.device)
        for case in chain(around, attention):
            if report.seconds_left() < CASE_SECONDS:
                report.not_run(case.title, "out of time")
                continue
            with report.guard(case.title):
                names = [c.backend for c in backends.candidates() if c.op == case.op and _serves(c, report.device)]
                calls = {name: lambda case=case, name=name: case.call(name) for name in names}
                taken = measure.interleave(calls, rounds=rounds, min_seconds=seconds, stopwatch=stopwatch)
                for name, timing in taken.items():
                    _measured(report, case, name, timing, taken["torch"], peaks)


def _serves(capability: backends.Capability, device: str) -> bool:
    compute = torch.cuda.get_device_capability() if device == "cuda" else None
    return not capability.not_supported_reasons(backends.Call(capability.op, device, compute, (DTYPE,), grad=True))


def _measured(report, case, name, timing, torch_timing, peaks) -> None:
    median = timing.quantiles.median
    rates = {"GB_per_second": case.bytes / median / 1e9, "of_bandwidth": case.bytes / median / peaks["bandwidth"]}
    if case.flops:
        rates |= {"TFLOP_per_second": case.flops / median / 1e12, "of_matmul": case.flops / median / peaks["matmul"]}
    report.measured(
        f"{case.title}, {name}",
        cell=case.title,
        contestant=name,
        ms={key: 1e3 * value for key, value in asdict(timing.quantiles).items()},
        gain=None if name == "torch" else asdict(timing.speedup_over(torch_timing)),
        **rates,
    )


def _peaks(report: Report, rounds: int, stopwatch) -> dict[str, float]:
    """Bytes per second of a copy, FLOPs per second of a large GEMM, both of PyTorch."""
    size = 4096 if report.device == "cuda" else 64
    source = torch.zeros(16 * size * size, dtype=DTYPE, device=report.device)
    target, a, b = torch.empty_like(source), *source.view(16, size, size)[:2]
    calls = {"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}
    taken = measure.interleave(calls, rounds=rounds, stopwatch=stopwatch)
    copy, matmul = (taken[name].quantiles.median for name in ("copy", "matmul"))
    peaks = {"bandwidth": 2 * source.nbytes / copy, "matmul": 2 * size**3 / matmul}
    report.measured("peaks", GB_per_second=peaks["bandwidth"] / 1e9, TFLOP_per_second=peaks["matmul"] / 1e12)
    return peaks


def _gemms(report: Report, m: int, n: int, f: int, rounds: int, seconds: float, stopwatch) -> None:
    """Each way to linear_gelu's forward that serves the device, whatever `gemm_forms` says, which these numbers are
    to replace, against torch's GEMM alone."""
    title = f"linear_gelu by its forms ({m},{n},{f})"
    if report.seconds_left() < CASE_SECONDS:
        report.not_run(title, "out of time")
        return
    with report.guard(title):
        x, weight = torch.randn(m, n, device=report.device), n**-0.5 * torch.randn(f, n, device=report.device)
        x, weight = x.to(DTYPE), weight.to(DTYPE)
        bias = torch.zeros(f, dtype=DTYPE, device=report.device)
        serving = [c.backend for c in backends.candidates() if c.op == "linear_gelu" and _serves(c, report.device)]
        forms = {name: op for name, op in FWD.items() if name in serving}
        forms |= {"cuda, separate": SEPARATE_FWD} if "cuda" in serving else {}
        arguments = x, weight, bias, "gelu", None, 0.0, False
        calls = {name: partial(op, *arguments) for name, op in forms.items()}
        calls["GEMM"] = partial(torch.nn.functional.linear, *arguments[:3])
        exact = torch.nn.functional.gelu(calls["GEMM"]().float())
        for name, op in forms.items():
            # Of numbers up to 6, rounded twice.
            error = (op(*arguments)[0].float() - exact).abs().max().item()
            if not error < 2**-4:
                report.failed(f"{title}, {name}", f"is off by {error}")
                del calls[name]
        taken = measure.interleave(calls, rounds=rounds, min_seconds=seconds, stopwatch=stopwatch)
        alone = taken["GEMM"].quantiles.median
        for name, timing in taken.items():
            median = timing.quantiles.median
            report.measured(
                f"{title}, {name}",
                cell=title,
                contestant=name,
                ms={key: 1e3 * value for key, value in asdict(timing.quantiles).items()},
                TFLOP_per_second=2 * m * n * f / median / 1e12,
                of_gemm=alone / median,
            )


def _cases(m: int, n: int, f: int, device: str) -> Iterator[OpTiming]:
    def numbers(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, device=device)).to(DTYPE).requires_grad_()

    x, residual, weight, bias = numbers(m, n), numbers(m, n), numbers(n), numbers(n)
    w_in, b_in, w_out = numbers(f, n, scale=n**-0.5), numbers(f), numbers(n, f, scale=f**-0.5)
    word, position, types = numbers(30522, n), numbers(512, n), numbers(2, n)
    ids = torch.randint(30522, (m // 16, 16), device=device)
    kinds = ids % 2
    square, thrice = [numbers(n, n, scale=n**-0.5) for _ in range(3)], [numbers(n) for _ in range(3)]
    row, e = m * n * x.element_size(), x.element_size()

    def add_layer_norm(backend: str, dropout_p: float = 0.0):
        return ops.add_layer_norm(x, residual, weight, bias, dropout_p=dropout_p, backend=backend)

    def embed_layer_norm(backend: str):
        return ops.embed_layer_norm(ids, kinds, None, word, position, types, weight, bias, backend=backend)

    def linear_gelu(backend: str):
        return ops.linear_gelu(x, w_in, b_in, backend=backend)

    def feed_forward(backend: str):
        return ops.feed_forward(x, w_in, b_in, w_out, bias, backend=backend)

    def qkv_projection(backend: str):
        return ops.qkv_projection(x, square, thrice, backend=backend)

    norm = (x, residual, weight, bias)
    tables = (word, position, types, weight, bias)
    forms = (
        ("", add_layer_norm, norm, 3 * row, 0),
        (" with dropout", partial(add_layer_norm, dropout_p=0.1), norm, 3 * row, 0),
        ("", embed_layer_norm, tables, 2 * row, 0),
        ("", linear_gelu, (x, w_in, b_in), row + (n + m) * f * e, 2 * m * n * f),
        ("", feed_forward, (x, w_in, b_in, w_out, bias), 2 * row + 2 * (n + m) * f * e, 4 * m * n * f),
        ("", qkv_projection, (x, *square, *thrice), 4 * row + 3 * n * n * e, 6 * m * n * n),
    )
    for note, call, leaves, size, flops in forms:
        op = (call.func if isinstance(call, partial) else call).__name__
        yield OpTiming(f"{op}{note} forward ({m},{n})", op, torch.no_grad()(call), size, flops)
        # Backward reads as much again and a gradient, and writes gradients as large as the inputs; two GEMMs for one.
        step = _with_backward(call, leaves)
        yield OpTiming(f"{op}{note} forward and backward ({m},{n})", op, step, 3 * size, 3 * flops)


def _attention_cases(m: int, lengths: tuple[int, ...], n: int, device: str) -> Iterator[OpTiming]:
    """m tokens in sequences of each length, and packed: 40 tokens each, but every 16th 320."""
    heads = max(1, n // 64)
    packed = torch.randn(m, 3, heads, n // heads, device=device).to(DTYPE)
    # Leaves of their own, strided as views of one projection: no gradient has to be put together.
    leaves = tuple(view.detach().requires_grad_() for view in packed.unbind(1))

    def attention(backend: str, length: int, dropout_p: float = 0.0):
        q, k, v = (leaf.view(-1, length, *leaf.shape[1:]).transpose(1, 2) for leaf in leaves)
        return ops.attention(q, k, v, dropout_p=dropout_p, backend=backend)

    def varlen_attention(backend: str, ends: Tensor, longest: int):
        return ops.varlen_attention(*leaves, ends, ends, longest, longest, backend=backend)

    # q, k, v read and out written; and q, k, v, out and dout read and three gradients written.
    size = m * n * packed.element_size()
    for length in (length for length in lengths if length <= m):
        for note, dropout_p in (("", 0.0), (" with dropout", 0.1)):
            call = partial(attention, length=length, dropout_p=dropout_p)
            title = f"({m // length},{length})"
            flops = 4 * m * length * n
            yield OpTiming(f"attention{note} forward {title}", "attention", torch.no_grad()(call), 4 * size, flops)
            title, step = f"attention{note} forward and backward {title}", _with_backward(call, leaves)
            yield OpTiming(title, "attention", step, 12 * size, 7 * flops // 2)
    counts = []
    while sum(counts) < m:
        counts.append(min(320 if len(counts) % 16 == 15 else 40, m - sum(counts)))
    ends = torch.tensor([0, *counts], device=device).cumsum(0).int()
    call, flops = partial(varlen_attention, ends=ends, longest=max(counts)), 4 * n * sum(c * c for c in counts)
    title = f"({len(counts)} sequences, {m} tokens)"
    yield OpTiming(f"varlen_attention forward {title}", "varlen_attention", torch.no_grad()(call), 4 * size, flops)
    title, step = f"varlen_attention forward and backward {title}", _with_backward(call, leaves)
    yield OpTiming(title, "varlen_attention", step, 12 * size, 7 * flops // 2)


def _with_backward(call: Callable[[str], object], leaves: tuple[Tensor, ...]) -> Callable[[str], object]:
    def step(backend: str) -> object:
        outputs = call(backend)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return torch.autograd.grad(outputs, leaves, [out.detach() for out in outputs])

    return step
