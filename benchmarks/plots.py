"""Figures of results, as PNG: latency and speed-up over lengths and batches, and the roofline.

matplotlib is the extra `plot`; it is imported when something is drawn, without pyplot and without a display.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bertfast.benchmarks.records import Row, Run
from bertfast.benchmarks.wording import digits, ours

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's, which differ for every kind of colour vision, without the yellow that is lost on white. Markers and
# dashes repeat after another number each, so that no two of many contestants look the same, on grey paper either.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
DPI = 90


@dataclass(frozen=True)
class Plot:
    """A drawn figure; `name` is fit for a file."""

    name: str
    caption: str
    png: bytes


@dataclass(frozen=True)
class Style:
    color: str
    marker: str
    linestyle: str | tuple


def require() -> None:
    """Looks for matplotlib.

    Raises:
        ValueError: it is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError("plots need matplotlib, which is not installed: pip install 'bertfast[plot]'") from None


def styles(names: Iterable[str]) -> dict[str, Style]:
    """One look for each name, the same in every figure that is given the same names; bertfast's come first."""
    ordered = sorted(set(names), key=lambda name: (not ours(name), name))
    return {
        name: Style(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], DASHES[i % len(DASHES)])
        for i, name in enumerate(ordered)
    }


def groups(rows: Sequence[Row]) -> dict[tuple[str, str, str, str, str], list[Row]]:
    """Rows that belong in one figure: those of a subject, pass, dtype, device and fill."""
    found: dict[tuple[str, str, str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.subject, row.pass_, row.dtype, row.device, row.fill), []).append(row)
    return found


def sweeps(rows: Sequence[Row]) -> Iterator[Plot]:
    """For each of `groups`, a figure over the length and one over the batch, where two of these were measured."""
    looks = styles(row.contestant for row in rows)
    for names, members in groups(rows).items():
        for axis, fixed in (("length", "batch"), ("batch", "length")):
            panels = _panels(members, axis, fixed)
            if panels:
                title = f"{', '.join(names)}: over the {axis}"
                figure = _sweep(title, panels, axis, fixed, looks)
                yield Plot(_file_name(*names, "over", axis), title, _png(figure))


def _panels(rows: Sequence[Row], axis: str, fixed: str) -> dict[int, list[Row]]:
    panels = {}
    for value in sorted({getattr(row, fixed) for row in rows}):
        panel = sorted((row for row in rows if getattr(row, fixed) == value), key=lambda row: getattr(row, axis))
        if len({getattr(row, axis) for row in panel}) > 1:
            panels[value] = panel
    return panels


def _sweep(title: str, panels: dict[int, list[Row]], axis: str, fixed: str, looks: dict[str, Style]) -> Figure:
    rows = [row for panel in panels.values() for row in panel]
    compared = [row for row in rows if row.speedup is not None]
    overs = sorted({str(row.speedup["over"]) for row in compared})
    height = 2 if compared else 1
    figure = _figure(1.4 + 3.1 * max(2, len(panels)), 0.9 + 2.5 * height)
    axes = figure.subplots(height, len(panels), sharex="col", sharey="row", squeeze=False)
    figure.suptitle(_plain(title), fontsize=11)
    letter = {"batch": "B", "length": "S"}
    for column, (value, panel) in enumerate(panels.items()):
        latency = axes[0][column]
        latency.set_title(f"{letter[fixed]} = {value}", fontsize=10)
        latency.set_yscale("log")
        _lines(latency, panel, axis, looks, lambda row: (1e3 * row.median, 1e3 * row.p10, 1e3 * row.p90))
        if compared:
            gain = axes[1][column]
            gain.axhline(1.0, color="#777777", linewidth=1)
            _lines(
                gain,
                [row for row in panel if row.speedup is not None],
                axis,
                looks,
                lambda row: (row.speedup["median"], row.speedup["p10"], row.speedup["p90"]),
            )
        bottom = axes[-1][column]
        ticks = sorted({getattr(row, axis) for row in panel})
        bottom.set_xscale("log", base=2)
        bottom.set_xticks(ticks, [str(tick) for tick in ticks])
        bottom.minorticks_off()
        bottom.set_xlabel("length S (tokens)" if axis == "length" else "batch B (rows)")
    axes[0][0].set_ylabel("latency (ms)")
    axes[0][0].yaxis.set_major_formatter("{x:g}")
    axes[0][0].set_ylim(_decades([1e3 * value for row in rows for value in (row.p10, row.p90)]))
    if compared:
        axes[1][0].set_ylabel(_plain(f"times as fast as {' or '.join(overs)}"))
        axes[1][0].set_ylim(bottom=0)
    _legend(figure, [axes[0][column] for column in range(len(panels))])
    return figure


def _lines(axes, rows: Sequence[Row], axis: str, looks: dict[str, Style], values) -> None:
    """A line for each contestant: medians, with bars from the 10th to the 90th percentile."""
    for name in sorted({row.contestant for row in rows}, key=list(looks).index):
        mine = [row for row in rows if row.contestant == name]
        points = [values(row) for row in mine]
        axes.errorbar(
            [getattr(row, axis) for row in mine],
            [median for median, _, _ in points],
            yerr=[[max(0.0, m - low) for m, low, _ in points], [max(0.0, high - m) for m, _, high in points]],
            label=_plain(name),
            color=looks[name].color,
            marker=looks[name].marker,
            linestyle=looks[name].linestyle,
            markersize=5,
            linewidth=1.5,
            capsize=2,
        )
    axes.grid(True, color="#DDDDDD", linewidth=0.6)


def rooflines(runs: Sequence[Run], rows: Sequence[Row]) -> Iterator[Plot]:
    """For each dtype and device, what was reached under the ceilings that were measured with it."""
    looks = styles(row.subject for row in rows)
    for device, dtype in sorted({(row.device, row.dtype) for row in rows}):
        members = [row for row in rows if (row.device, row.dtype) == (device, dtype)]
        points = [row for row in members if row.flops > 0 and row.bytes > 0 and row.flops_per_second > 0]
        if points:
            title = f"roofline: {dtype}, {device}"
            yield Plot(_file_name("roofline", dtype, device), title, _png(_roofline(title, runs, points, dtype, looks)))


def _roofline(title: str, runs: Sequence[Run], rows: Sequence[Row], dtype: str, looks: dict[str, Style]) -> Figure:
    from matplotlib.ticker import EngFormatter, NullFormatter

    figure = _figure(8.5, 5.0)
    axes = figure.subplots()
    axes.set_title(_plain(title), fontsize=11)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for row in rows:
        look, filled = looks[row.subject], ours(row.contestant)
        axes.scatter(
            row.flops / row.bytes,
            row.flops_per_second,
            s=36,
            marker=look.marker,
            facecolors=look.color if filled else "none",
            edgecolors=look.color,
            zorder=3 if filled else 2,
        )
    copy, gemm = ceilings(runs, dtype)
    intensities = [row.flops / row.bytes for row in rows]
    left, right = min(intensities) / 2, max(intensities) * 2
    if copy and gemm:
        left, right = min(left, gemm / copy / 4), max(right, gemm / copy * 4)
    if copy:
        end = gemm / copy if gemm else right
        label = f"copy: {digits(copy / 1e9)} GB/s"
        axes.plot([left, end], [copy * left, copy * end], color="#444444", linestyle="--", label=label)
    if gemm:
        start = gemm / copy if copy else left
        label = f"GEMM: {digits(gemm / 1e9)} GFLOP/s"
        axes.plot([start, right], [gemm, gemm], color="#444444", linestyle="-", label=label)
    for name in sorted({row.subject for row in rows}, key=list(looks).index):
        axes.scatter([], [], s=36, color=looks[name].color, marker=looks[name].marker, label=_plain(name))
    axes.set_xlabel("FLOPs per byte")
    axes.set_ylabel("speed (filled: bertfast; open: others)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(EngFormatter(unit="FLOP/s"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(_decades([row.flops_per_second for row in rows] + [gemm] * bool(gemm)))
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    _legend(figure, [axes])
    return figure


def ceilings(runs: Sequence[Run], dtype: str) -> tuple[float | None, float | None]:
    """Measured bytes per second of a copy and FLOP/s of a GEMM of this dtype, of the last run that knows each."""
    copy = gemm = None
    for run in runs:
        copy = run.ceilings.get("bytes_per_second") or copy
        gemm = (run.ceilings.get("flops_per_second") or {}).get(dtype) or gemm
    return copy, gemm


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Limits of a logarithmic axis that has a labelled tick at both ends."""
    logs = [math.log10(value) for value in values if value > 0] or [0.0]
    low, high = min(logs), max(logs)
    return 10.0 ** math.floor(low), 10.0 ** max(math.ceil(high), math.floor(low) + 1)


def _legend(figure: Figure, axes: Sequence) -> None:
    """One for all axes, below them."""
    handles = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = max(1, int(figure.get_figwidth() // 2.2))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )


def _png(figure: Figure) -> bytes:
    # With a palette it is a third of the size, which counts on a page of two hundred figures.
    from PIL import Image  # matplotlib needs it too

    figure.canvas.draw()
    image = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def _plain(text: str) -> str:
    """Not read as a formula."""
    return text.replace("$", r"\$")


def _file_name(*parts: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", "-".join(parts)).strip("-") + ".png"
