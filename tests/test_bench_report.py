"""The page and the plots of results: complete, self-contained, escaped."""

from __future__ import annotations

import base64
import html.parser
import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bertfast.benchmarks import plots, records, report, wording
from helpers.project import ROOT, block, run_python

# A tag, an attribute's end, and a formula that is none.
NASTY = '"><script>alert("x")</script> & $\\frac{$'
MACHINE = {
    "cpu": "Some CPU",
    "cores": 2,
    "torch_threads": 2,
    "gpus": [],
    "torch": "2.13.0",
    "python": "3.11.7",
    "system": "Linux x86_64",
    "card": None,
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    "commit": "abc1234",
}
RUN = {
    "kind": "run",
    "schema": 1,
    "started": "2026-01-02T03:04:05+00:00",
    "command": ["/somewhere/bertfast", "bench", "--ops", "a b"],
    "machine": MACHINE,
    "ceilings": {"bytes_per_second": 2e10, "flops_per_second": {"float32": 1.5e11}},
}


def cell(contestant="bertfast", subject="attention", batch=1, length=16, **more) -> dict:
    names = {"subject": subject, "pass": "forward", "batch": batch, "length": length, "fill": "dense"}
    names |= {"dtype": "float32", "device": "cpu", "contestant": contestant} | more
    key = "{subject}/{pass}/{batch}x{length}/{fill}/{dtype}/{device}/{contestant}".format(**names)
    return {"key": key, **names}


def row(contestant="bertfast", subject="attention", batch=1, length=16, *, speedup=True, **more) -> dict:
    median = 1e-4 * batch * length
    over = {"over": "eager", "median": 2.345, "p10": 2.211, "p90": 2.489} if speedup else None
    return {
        "kind": "row",
        **cell(contestant, subject, batch, length),
        "seconds": [median] * 3,
        "median": median,
        "p10": 0.9 * median,
        "p90": 1.2 * median,
        "speedup": over,
        "first_call_seconds": 0.75,
        "peak_bytes": None,
        "error": 0.314,
        "flops": 10**7 * batch * length,
        "bytes": 10**5 * batch * length,
        "flops_per_second": 1e11,
        "bytes_per_second": 1e9,
        "floor_seconds": 0.4 * median,
        "of_floor": 0.41,
        **more,
    }


def file_of(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Page(html.parser.HTMLParser):
    """Elements with their attributes, cells of tables, and whether every tag was closed."""

    VOID = frozenset({"meta", "img"})

    def __init__(self, path: Path):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1][-1] += data

    def of(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return "".join(self.texts)


def pixels(png: bytes) -> np.ndarray:
    """[height, width, 4] of an 8-bit RGBA PNG: checks the signature, each chunk's sum and what is unpacked."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, kinds = 8, []
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + body)
        kinds.append(kind)
        at += 12 + size
    assert kinds[-1] == b"IEND"
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))


SWEEP = [
    row(name, "attention", batch, length, speedup=name != "eager")
    for batch in (1, 8)
    for length in (16, 128)
    for name in ("eager", "bertfast")
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    skipped = {"kind": "skipped", **cell("compile"), "reason": f"no compiler: {NASTY}"}
    # A run in the middle: a resumed one, on the same machine.
    path = file_of(folder / "a<b>.jsonl", RUN, *SWEEP, RUN, skipped)
    page = report.write([path], folder / "out")
    return page, Page(page)


def test_the_page_has_what_was_measured(written):
    path, page = written
    assert path.name == report.PAGE
    table = next(cells for cells in page.cells if cells[0] == "pass")
    assert {"median ms", "p10-p90 ms", "times as fast (p10-p90)", "of the floor", "error / tolerance"} <= set(table)
    rows = {(c[1], c[2], c[6]): dict(zip(table, c, strict=True)) for c in page.cells if len(c) == len(table)}
    assert {key for key in rows if key[2] == "bertfast"} == {(b, s, "bertfast") for b in "18" for s in ("16", "128")}
    shown = rows["8", "128", "bertfast"]
    assert (shown["median ms"], shown["p10-p90 ms"]) == ("102", "92.2-123")
    assert (shown["times as fast (p10-p90)"], shown["as"]) == ("2.35 (2.21-2.49)", "eager")
    assert (shown["of the floor"], shown["error / tolerance"], shown["first call ms"]) == ("41 %", "0.314", "750")
    assert (shown["GFLOP/s"], shown["GB/s"], shown["peak MiB"]) == ("100", "1.00", "-")
    assert rows["1", "16", "eager"]["times as fast (p10-p90)"] == "-"


def test_the_page_has_machine_command_and_what_was_skipped(written):
    _, page = written
    assert page.text.count("Machine: Some CPU, 2 cores, 2 torch threads, torch 2.13.0, Python 3.11.7, Linux") == 1
    assert "transformers 5.24.0, commit abc1234" in page.text
    assert page.text.count("bertfast bench --ops 'a b'") == 1 and "/somewhere" not in page.text
    skipped = [cells for cells in page.cells if cells[0] == cell("compile")["key"]]
    assert skipped == [[cell("compile")["key"], f"no compiler: {NASTY}"]]


def test_the_page_is_one_file_and_loads_nothing(written):
    path, page = written
    images = page.of("img")
    assert images and all(image["src"].startswith("data:image/png;base64,") for image in images)
    harmless = "html head meta title style body h1 h2 h3 p strong code figure img div table thead tbody tr th td"
    assert {tag for tag, _ in page.elements} <= {*harmless.split()}
    attributes = {name for _, attributes in page.elements for name in attributes}
    assert attributes <= {"lang", "charset", "http-equiv", "content", "alt", "src", "class"}
    (style,) = (text for text in page.texts if "font:" in text)
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in page.of("meta")[1]["content"]
    assert "://" not in path.read_text(encoding="utf-8")


def test_texts_of_results_are_escaped(tmp_path):
    machine = dict.fromkeys(MACHINE, NASTY) | {"gpus": [NASTY], "versions": {NASTY: NASTY}}
    run = {**RUN, "started": NASTY, "command": [NASTY, NASTY], "machine": machine}
    names = {"pass": NASTY, "fill": NASTY, "dtype": NASTY, "device": NASTY}
    rows = [row(NASTY, NASTY, length=length, **names) for length in (7, 9)]
    rows = [{**one, "speedup": {**one["speedup"], "over": NASTY}} for one in rows]
    skipped = {"kind": "skipped", **cell(NASTY, NASTY, **names), "reason": NASTY}
    (tmp_path / "out").mkdir()
    page = report.write([file_of(tmp_path / "a<b>.jsonl", run, *rows, skipped)], tmp_path / "out")
    assert "<script" not in page.read_text(encoding="utf-8").lower()
    read = Page(page)
    assert not read.of("script") and "a<b>.jsonl" in read.texts
    assert len(read.of("img")) == 2 and all(NASTY in image["alt"] and "src" in image for image in read.of("img"))
    # In the machine, the command, the start, a heading, two rows and what was skipped.
    assert read.text.count(NASTY) > 20
    assert {file.parent for file in tmp_path.rglob("*.png")} == {tmp_path / "out"}


def test_the_figures_on_the_page_are_the_files(written):
    path, page = written
    files = {file.name: file.read_bytes() for file in path.parent.glob("*.png")}
    stem = "attention-forward-float32-cpu-dense-over"
    assert set(files) == {f"{stem}-length.png", f"{stem}-batch.png", "roofline-float32-cpu.png"}
    embedded = [base64.b64decode(image["src"].partition(",")[2]) for image in page.of("img")]
    assert sorted(embedded) == sorted(files.values())


def test_figures_show_the_contestants(written):
    path, _ = written
    looks = plots.styles(["eager", "bertfast"])
    for file in path.parent.glob("attention*.png"):
        image = pixels(file.read_bytes())
        assert image.shape[0] > 300 and image.shape[1] > 400
        for name in ("eager", "bertfast"):
            rgb = [int(looks[name].color[i : i + 2], 16) for i in (1, 3, 5)]
            assert (image[..., :3] == rgb).all(-1).sum() > 100, f"{name} in {file.name}"


def results_of(*lines: dict, tmp_path: Path) -> records.Results:
    return wording.load(file_of(tmp_path / "r.jsonl", *lines))


def test_a_sweep_has_the_medians_and_units(tmp_path):
    results = results_of(RUN, *SWEEP, tmp_path=tmp_path)
    looks = plots.styles(row.contestant for row in results.rows)
    figure = plots._sweep("t", plots._panels(results.rows, "length", "batch"), "length", "batch", looks)
    latency, other, gain, _ = figure.axes
    assert (latency.get_title(), other.get_title()) == ("B = 1", "B = 8")
    assert latency.get_ylabel() == "latency (ms)" and gain.get_ylabel() == "times as fast as eager"
    assert gain.get_xlabel() == "length S (tokens)"
    ours, eager = latency.containers
    np.testing.assert_allclose(ours.lines[0].get_xydata(), [[16, 1.6], [128, 12.8]])
    (bars,) = ours.lines[2]
    np.testing.assert_allclose(bars.get_segments()[0], [[16, 1.44], [16, 1.92]])
    for line in (ours, eager):
        look = looks[line.get_label()]
        drawn = line.lines[0]
        assert (drawn.get_color(), drawn.get_marker(), drawn.get_linestyle()) == (
            look.color,
            look.marker,
            look.linestyle,
        )
    (only,) = gain.containers
    np.testing.assert_allclose(only.lines[0].get_xydata(), [[16, 2.345], [128, 2.345]])


def test_the_roofline_has_the_measured_ceilings(tmp_path):
    results = results_of(RUN, *SWEEP, tmp_path=tmp_path)
    looks = plots.styles(row.subject for row in results.rows)
    (axes,) = plots._roofline("t", results.runs, results.rows, "float32", looks).axes
    copy, gemm = axes.lines
    assert copy.get_label() == "copy: 20.0 GB/s" and gemm.get_label() == "GEMM: 150 GFLOP/s"
    np.testing.assert_allclose(copy.get_ydata() / copy.get_xdata(), 2e10)
    np.testing.assert_allclose(gemm.get_ydata(), 1.5e11)
    assert copy.get_xdata()[-1] == gemm.get_xdata()[0] == 7.5
    points = np.concatenate([collection.get_offsets() for collection in axes.collections])
    np.testing.assert_allclose(points[: len(results.rows)], [[100, 1e11]] * len(results.rows))
    filled = [len(collection.get_facecolors()) == 1 for collection in axes.collections[: len(results.rows)]]
    assert filled == [row.contestant == "bertfast" for row in results.rows]
    assert axes.get_xlabel() == "FLOPs per byte" and "FLOP/s" in axes.yaxis.get_major_formatter().unit


def test_without_ceilings_there_are_points_only(tmp_path):
    results = results_of({**RUN, "ceilings": {}}, *SWEEP, tmp_path=tmp_path)
    assert plots.ceilings(results.runs, "float32") == (None, None)
    (plot,) = plots.rooflines(results.runs, results.rows)
    assert len(pixels(plot.png))


def test_one_cell_is_no_sweep(tmp_path):
    results = results_of(RUN, row(), row(fill="half"), tmp_path=tmp_path)
    assert list(plots.sweeps(results.rows)) == []


def test_colours_differ_for_every_kind_of_colour_vision():
    # Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
    seen = {
        "all cones": np.eye(3),
        "no long": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "no middle": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
        "no short": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
    }
    usual = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2")  # matplotlib's

    def nearest(colours, matrix) -> float:
        labs = [_lab(np.asarray(matrix) @ _linear(colour)) for colour in colours]
        return min(np.linalg.norm(a - b) for i, a in enumerate(labs) for b in labs[:i])

    assert all(nearest((*plots.COLOURS, "#FFFFFF"), matrix) > 15 for matrix in seen.values())
    assert nearest(usual, seen["all cones"]) > 15 > nearest(usual, seen["no middle"])


def _linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _lab(linear: np.ndarray) -> np.ndarray:
    """CIE L*a*b*, D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ linear.clip(0, 1) / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_many_contestants_have_looks_of_their_own():
    looks = plots.styles([*(f"peer {i}" for i in range(39)), "bertfast"])
    assert len({(look.color, look.marker, look.linestyle) for look in looks.values()}) == 40
    assert looks["bertfast"] == plots.styles(["bertfast", "eager"])["bertfast"]


def test_files_do_not_share_figures(tmp_path):
    other = {**RUN, "machine": {**MACHINE, "cpu": "Another CPU"}}
    paths = [file_of(tmp_path / "a.jsonl", RUN, row()), file_of(tmp_path / "b.jsonl", other, row())]
    page = Page(report.write(paths, tmp_path / "out"))
    assert [name for name in page.texts if name.endswith(".jsonl")] == ["a.jsonl", "b.jsonl"]
    assert "Another CPU" in page.text and "differ in machine" not in page.text
    assert {path.name[:2] for path in (tmp_path / "out").glob("*.png")} == {"1-", "2-"}


def test_runs_of_a_file_that_differ_are_told(tmp_path):
    other = {**RUN, "machine": {**MACHINE, "cpu": "Another CPU"}}
    page = Page(report.write([file_of(tmp_path / "a.jsonl", RUN, other, row())], tmp_path))
    assert "differ in machine, versions or commit" in page.text


def test_what_was_skipped_alone_makes_a_page(tmp_path):
    skipped = {"kind": "skipped", **cell(), "reason": "no GPU here"}
    page = Page(report.write([file_of(tmp_path / "a.jsonl", RUN, skipped)], tmp_path / "deep" / "out"))
    assert "no GPU here" in page.text and not page.of("img")


@pytest.mark.parametrize("content", [None, "", "{}\n", "[1, 2]\n", "\udcff"])
def test_what_is_no_result_file_is_one_line(tmp_path, content):
    path = tmp_path / "r.jsonl"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"r\.jsonl") as raised:
        report.write([path], tmp_path / "out")
    assert "\n" not in str(raised.value) and not (tmp_path / "out").exists()


def test_without_matplotlib_there_is_one_line(tmp_path):
    path = file_of(tmp_path / "r.jsonl", RUN, row())
    arguments = ("-m", "bertfast.benchmarks.report", str(tmp_path / "out"), str(path))
    without = block(tmp_path / "without", "matplotlib")
    done = run_python(*arguments, cwd=ROOT, path=(without,), check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "pip install 'bertfast[plot]'" in done.stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.012345, "0.0123"),
        (9.876, "9.88"),
        (123.4, "123"),
        (1234.5, "1234"),
        (0, "0"),
        (None, "-"),
        (float("nan"), "-"),
    ],
)
def test_digits(value, text):
    assert wording.digits(value) == text


@pytest.mark.parametrize(
    ("values", "limits"),
    [([0.02, 3], (0.01, 10)), ([1.1, 8], (1, 10)), ([1, 1], (1, 10)), ([0, 20], (10, 100)), ([], (1, 10))],
)
def test_logarithmic_axes_end_at_decades(values, limits):
    assert plots._decades(values) == pytest.approx(limits)
