"""The README's table of what each backend serves, from the declarations that the choice of a backend goes by.

python -m bertfast.benchmarks.support              prints it
python -m bertfast.benchmarks.support README.md    puts it between the file's markers
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

from bertfast import ops
from bertfast.activations import ACTIVATIONS
from bertfast.backends import BACKENDS, Capability, candidates
from bertfast.benchmarks import markers
from bertfast.ops.attention import ENABLE_GQA, VALUE_HEAD_DIM

BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"
COLUMNS = ("op", "backend", "device", "dtypes", "gradients", "dropout", "limits")
FEATURES = {
    "feed_forward": frozenset({*ACTIVATIONS, "callable activation"}),
    "attention": frozenset({ENABLE_GQA, VALUE_HEAD_DIM}),
    "varlen_attention": frozenset({VALUE_HEAD_DIM}),
}
DTYPES = ("float16", "bfloat16", "float32", "float64")


def matrix(capabilities: Sequence[Capability]) -> str:
    """A Markdown table, one row for each (op, backend)."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, capabilities)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(capability: Capability) -> tuple[str, ...]:
    dtypes = None if capability.dtypes is None else {str(dtype).removeprefix("torch.") for dtype in capability.dtypes}
    limits = []
    if capability.auto_dtypes is not None:
        automatic = {str(dtype).removeprefix("torch.") for dtype in capability.auto_dtypes}
        limits.append(f"{', '.join(sorted((dtypes or set(DTYPES)) - automatic))} only when named")
    if capability.min_compute is not None:
        limits.append("compute capability {}.{} and up".format(*capability.min_compute))
    if capability.max_head_dim is not None:
        limits.append(f"head dim up to {capability.max_head_dim}")
    if capability.max_width is not None:
        limits.append(f"width up to {capability.max_width}")
    missing = [f"no {kind} mask" for kind in ("bool", "float") if kind not in capability.masks]
    if capability.features is not None:
        limits.append(_features(FEATURES.get(capability.op, frozenset()), capability.features))
    drops = "dropout_p" in inspect.signature(getattr(ops, capability.op)).parameters
    return (
        f"`{capability.op}`",
        f"`{capability.backend}`",
        "any" if capability.devices is None else ", ".join(sorted(capability.devices)),
        ", ".join(dtype for dtype in DTYPES if dtypes is None or dtype in dtypes),
        "yes" if capability.backward else "no",
        "" if not drops else "yes" if capability.dropout else "no",
        "; ".join([*limits, *missing]),
    )


def _features(known: frozenset[str], served: frozenset[str]) -> str:
    """Whichever list is shorter: what is served of what the op knows, or what is not."""
    missing = known - served
    if not (missing or served):
        return "plain calls only"
    if missing and (not served or len(missing) < len(served)):
        return f"no {', '.join(sorted(missing))}"
    return f"only {', '.join(sorted(served))}"


def section() -> str:
    """What belongs between the markers."""
    registered = candidates()
    present = {capability.backend for capability in registered}
    absent = [f"`{backend}`" for backend in BACKENDS if backend not in present]
    lines = [matrix(registered)]
    if absent:
        lines += ["", f"No op has a kernel on {' or '.join(absent)} in this version."]
    return "\n".join(lines)


def replaced(text: str) -> str:
    """`text` with what is between the markers up to date.

    Raises:
        ValueError: there is not one pair of them.
    """
    return markers.replaced(text, BEGIN, END, section())


def main(arguments: Sequence[str]) -> None:
    for name in arguments:
        path = Path(name)
        path.write_text(replaced(path.read_text(encoding="utf-8")), encoding="utf-8")
    if not arguments:
        print(section())


if __name__ == "__main__":
    main(sys.argv[1:])
