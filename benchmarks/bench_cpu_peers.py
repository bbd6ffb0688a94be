"""BERT-base on a CPU next to what people would run instead, held to targets: other libraries, and our own products.

    python -m bertfast.benchmarks.bench_cpu_peers                           everything but torch.compile
    python -m bertfast.benchmarks.bench_cpu_peers --parts bfloat16 --compiled
    python -m bertfast.benchmarks.bench_cpu_peers --json results.jsonl      a line for each cell, with the machine

Parts:
    float32, bfloat16: inference on one sentence, on two dense batches and on one of mixed lengths, as `bertfast bench`
        measures it, and `products`: the GEMMs of all layers alone, on real tokens, by reordered weights.
    int8: `bertfast.quantize` next to dynamically quantised models of other libraries; cosines with fp32 are shown.
    host: one sentence of 16 tokens; what is not kernels is Python, dispatch and checks of reordered weights.
    tokens: 1 to 64 sequences, whose time must grow no faster than their number.
    memory: sequences of 512 to 4096 tokens, whose peak must grow no faster than their length.

All of a cell take turns, after their results have been compared with float64; a ratio is that of one round, the median
over rounds counts. The exit code is 1 where a target is missed or nothing could be measured for it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bertfast.benchmarks import measure
from bertfast.benchmarks.cpu_parts import KERNELS, LONG, OURS, PARTS, PRODUCTS, SEQUENCES, Line, measured
from bertfast.benchmarks.timer import Timer

DENSE = ("1x128", "8x128")
# Of a doubling of tokens, in time and in memory: 2 and what noise may add.
MOST_GROWTH = 2.2


@dataclass(frozen=True)
class Target:
    """A bound on the ratio of lines."""

    part: str
    shapes: Sequence[str]
    contestant: str
    least: float = 0.0
    most: float = float("inf")

    def holds(self, lines: Sequence[Line]) -> dict[str, bool | None]:
        """By shape; None where nothing was measured."""
        found = {
            line.shape: line.ratio for line in lines if (line.part, line.contestant) == (self.part, self.contestant)
        }
        return {
            shape: None if found.get(shape) is None else self.least <= found[shape] <= self.most
            for shape in self.shapes
        }

    def __str__(self) -> str:
        bound = f"at least {self.least}" if self.least else f"at most {self.most}"
        return f"{self.part} {self.contestant}: {bound}"


TARGETS = [
    *itertools.chain.from_iterable(
        (
            Target(dtype, DENSE, "openvino", 1.08),
            Target(dtype, ("8x512",), "openvino", 1.2),
            Target(dtype, ("32 mixed",), "openvino", 4.0),
            Target(dtype, (*DENSE, "8x512"), "sdpa", 1.4),
            Target(dtype, DENSE, PRODUCTS, share),
        )
        for dtype, share in (("float32", 0.90), ("bfloat16", 0.85))
    ),
    Target("int8", (*DENSE, "8x512"), "onnxruntime", 1.0),
    Target("int8", ("32 mixed",), "onnxruntime", 3.0),
    Target("host", ("1x16",), KERNELS, 0.90),
    Target("tokens", tuple(f"{count}x128" for count in SEQUENCES[1:]), OURS, most=MOST_GROWTH),
    Target("memory", tuple(f"1x{length}" for length in LONG[1:]), OURS, most=MOST_GROWTH),
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (all)")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile of stock's model, for minutes each")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is timed (7)")
    parser.add_argument("--json", type=Path, help="append a line for each contestant to this file")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"argument --rounds: expected at least 1, got {options.rounds}")
    facts = measure.machine()
    print(measure.machine_line(facts))
    lines = []
    for line in measured(options.parts, options.compiled, Timer(rounds=options.rounds)):
        lines.append(line)
        ratio = "" if line.ratio is None else f"{line.ratio:6.2f}"
        start = f"{line.part:<9} {line.shape:<9} {line.contestant:<12}"
        print(f"{start} {line.value:9.2f} {line.unit:<3} {ratio:>7}  {line.note}".rstrip())
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**vars(line), "machine": facts}) + "\n")
    missed = 0
    for target in TARGETS:
        if target.part in options.parts:
            for shape, holds in target.holds(lines).items():
                missed += not holds
                print(f"{ {True: 'reached', False: 'MISSED', None: 'NOT MEASURED'}[holds]:<12} {target}, {shape}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
