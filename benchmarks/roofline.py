"""The floor: FLOPs that an op or a model cannot do without, bytes it has to move, and what this machine does at best.

A floor counts real tokens only, every input read once, every output written once, and nothing in between: it is that of
one kernel that keeps all the rest on the chip. A multiply-add is two FLOPs; only matrix products are counted.

Per BERT-base layer that is T (14,155,776 + 3,072 S) FLOPs for T tokens in rows of S, and 14.2 MB of weights in 16 bit.
Backward does each product's work twice, and attention's five products for two: its scores are computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bertfast import prepacked
from bertfast.benchmarks import measure

ID_BYTES = 8
Shape = tuple[int, int, int]
# Large, square and as BERT has them: libraries have their best tiles for one or the other.
GEMMS: dict[str, Sequence[Shape]] = {
    "cuda": ((8192, 8192, 8192), (16384, 3072, 768), (16384, 4096, 4096)),
    "cpu": ((1024, 1024, 1024), (64, 3072, 768), (512, 3072, 768), (512, 768, 3072)),
}
FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
INFERENCE, TRAINING = "inference", "training"


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of a floor."""

    flops: int
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, count: int) -> Cost:
        return Cost(count * self.flops, count * self.bytes)


@dataclass(frozen=True)
class Sizes:
    """Hidden and feed-forward width of a model and its layers, BERT-base's by default."""

    n: int = 768
    f: int = 3072
    layers: int = 12


def by_pass(pass_: str, forward: Cost, backward: Cost) -> Cost:
    """The floor of a pass; of both, that of one after the other."""
    return {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[pass_]


def attention(pass_: str, lengths: Sequence[int], n: int, e: int, rows: int | None = None, mask_bytes: int = 0) -> Cost:
    """Attention of n = H D columns over keys of these lengths.

    Args:
        pass_: of `records.OP_PASSES`.
        lengths: real keys of each sequence.
        n: heads times their dimension.
        e: bytes of an element.
        rows: queries of each sequence, padding included; by default as many as keys.
        mask_bytes: read besides.
    """
    keys = sum(lengths)
    queries = keys if rows is None else rows * len(lengths)
    pairs = sum(length * (length if rows is None else rows) for length in lengths)
    forward = Cost(4 * n * pairs, 2 * (queries + keys) * n * e + mask_bytes)
    # Reads query, key, value, out and its gradient, writes three gradients; all rows of those of keys are written.
    backward = Cost(10 * n * pairs, (4 * queries + 2 * keys + 2 * queries) * n * e + mask_bytes)
    return by_pass(pass_, forward, backward)


def add_layer_norm(pass_: str, tokens: int, n: int, e: int) -> Cost:
    """Two inputs and an output; backward reads the output (or the sum) and a gradient, writes one for both."""
    row, parameters = tokens * n * e, 2 * n * e
    return by_pass(pass_, Cost(0, 3 * row + parameters), Cost(0, 3 * row + 2 * parameters))


def embed_layer_norm(pass_: str, tokens: int, length: int, n: int, e: int, tables: int) -> Cost:
    """Rows of the word table, `length` rows of positions, the ids. Backward writes gradients of whole tables.

    Args:
        pass_: of `records.OP_PASSES`.
        tokens, length: T, and the positions that occur.
        n, e: width, bytes of an element.
        tables: rows of all tables.
    """
    read = (tokens + length + 2) * n * e + 2 * ID_BYTES * tokens
    forward = Cost(0, read + tokens * n * e)
    return by_pass(pass_, forward, Cost(0, read + tokens * n * e + tables * n * e))


def linear(pass_: str, tokens: int, n: int, f: int, e: int) -> Cost:
    """x (T, n) weight^T (n, f) + bias, with an activation or without: its input in backward is either read or computed
    again, and neither is counted."""
    x, out, weight = tokens * n * e, tokens * f * e, (n + 1) * f * e
    forward = Cost(2 * tokens * n * f, x + out + weight)
    # Reads x, the weight and a gradient, writes gradients of x and weight.
    return by_pass(pass_, forward, Cost(4 * tokens * n * f, 2 * x + out + 2 * weight))


def feed_forward(pass_: str, tokens: int, n: int, f: int, e: int) -> Cost:
    """Both products; what lies between them stays on the chip."""
    x, weights = tokens * n * e, (2 * n * f + n + f) * e
    return by_pass(
        pass_,
        Cost(4 * tokens * n * f, 2 * x + weights),
        Cost(8 * tokens * n * f, 3 * x + 2 * weights),
    )


def qkv_projection(pass_: str, tokens: int, n: int, e: int) -> Cost:
    """Three products of one x."""
    return linear(pass_, tokens, n, 3 * n, e)


def layer_flops(lengths: Sequence[int], sizes: Sizes) -> int:
    """Forward, one layer."""
    n, f = sizes.n, sizes.f
    return sum(2 * length * (4 * n * n + 2 * n * f) + 4 * n * length * length for length in lengths)


def layer_weights(sizes: Sizes) -> int:
    """Elements of a layer's four GEMMs. Biases and LayerNorms, 0.2 % of a layer, are left out."""
    return 4 * sizes.n**2 + 2 * sizes.n * sizes.f


def model(pass_: str, lengths: Sequence[int], sizes: Sizes, e: int) -> Cost:
    """A model without its pooler: weights are read once (in training twice, and their gradients are written), tokens'
    embeddings are read and the last layer's output is written.

    Args:
        pass_: of `records.MODEL_PASSES`.
        lengths: real tokens of each row.
        sizes: of the model.
        e: bytes of a parameter; outputs are counted alike.
    """
    products = 2 * sum(lengths) * layer_weights(sizes)
    scores = layer_flops(lengths, sizes) - products
    weights, rows = sizes.layers * layer_weights(sizes) * e, 2 * sum(lengths) * sizes.n * e
    if pass_ == INFERENCE:
        return Cost(sizes.layers * (products + scores), weights + rows)
    return Cost(sizes.layers * (3 * products + 7 * scores // 2), 3 * weights + 2 * rows)


def layer_kernels(lengths: Sequence[int], sizes: Sizes, e: int) -> list[Cost]:
    """The seven kernels of a layer's forward, each with its own traffic: QKV GEMM, attention, out-projection, add-LN,
    FFN-in with GELU, FFN-out, add-LN. The sum of their floors is what separate kernels can reach."""
    tokens, n, f = sum(lengths), sizes.n, sizes.f
    norm = Cost(0, 3 * tokens * n * e)

    def gemm(columns_in: int, columns_out: int) -> Cost:
        moved = tokens * (columns_in + columns_out) + columns_in * columns_out
        return Cost(2 * tokens * columns_in * columns_out, moved * e)

    attended = attention(FORWARD, lengths, n, e)
    return [gemm(n, 3 * n), attended, gemm(n, n), norm, gemm(n, f), gemm(f, n), norm]


@dataclass(frozen=True)
class Ceilings:
    """What the machine does at best, measured.

    Attributes:
        bytes_per_second: of a copy, reading and writing.
        flops_per_second: of a large GEMM, by dtype.
    """

    bytes_per_second: float
    flops_per_second: dict[str, float]

    def floor_seconds(self, cost: Cost, dtype: str) -> float:
        """What a cost takes at least: memory and arithmetic at once, each at its ceiling."""
        return max(cost.bytes / self.bytes_per_second, cost.flops / self.flops_per_second[dtype])


def measure_ceilings(
    device: torch.device, dtypes: Sequence[str], *, copy_bytes: int | None = None, shapes: Sequence[Shape] | None = None
) -> Ceilings:
    """The fastest round of PyTorch's copy, and of its GEMM in the fastest of some shapes, on the CPU also by a weight
    that is reordered for oneDNN.

    Args:
        device: to measure.
        dtypes: of the GEMM.
        copy_bytes: what is copied, far beyond most caches: 1 GiB on a GPU, 256 MiB elsewhere.
        shapes: (m, n, k) of the GEMM; `GEMMS` of the device.
    """
    options = {"stopwatch": measure.cuda_stopwatch} if device.type == "cuda" else {}
    source = torch.randn((copy_bytes or (2**30 if device.type == "cuda" else 2**28)) // 4, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _fastest(partial(target.copy_, source), **options)
    del source, target
    flops = dict.fromkeys(dtypes, 0.0)
    for dtype, (m, n, k) in itertools.product(dtypes, shapes or GEMMS.get(device.type, GEMMS["cpu"])):
        a, b = (torch.randn(rows, k, device=device).to(getattr(torch, dtype)) for rows in (m, n))
        seconds = _fastest(partial(torch.nn.functional.linear, a, b), **options)
        weight = torch.nn.Parameter(b, requires_grad=False)
        if prepacked.linear(a, (weight,), (None,)) is not None:
            seconds = min(seconds, _fastest(partial(prepacked.linear, a, (weight,), (None,)), **options))
        flops[dtype] = max(flops[dtype], 2 * m * n * k / seconds)
    return Ceilings(bandwidth, flops)


def _fastest(call: Callable[[], object], **options: Any) -> float:
    return min(measure.interleave({"": call}, rounds=15, min_seconds=0.01, **options)[""].seconds)
