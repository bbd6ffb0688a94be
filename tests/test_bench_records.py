"""The format of benchmark results: what is written is read, and what an interrupted run leaves is a file."""

from __future__ import annotations

import dataclasses
import json

import pytest

from bertfast.benchmarks import records

CELL = {
    "subject": "attention",
    "pass_": "both",
    "batch": 8,
    "length": 128,
    "fill": "half",
    "dtype": "float32",
    "device": "cpu",
}
RUN = records.Run("2026-01-02T03:04:05+00:00", ["bench"], {"cpu": "one"}, {"bytes_per_second": 1e10}, timing="clock")


def row(contestant: str = "bertfast", median: float = 2.0) -> records.Row:
    return records.Row(
        **CELL,
        contestant=contestant,
        seconds=[median] * 3,
        median=median,
        p10=median,
        p90=median,
        speedup={"over": "eager", "median": 1.5, "p10": 1.4, "p90": 1.6},
        first_call_seconds=9.0,
        peak_bytes=None,
        error=0.5,
        flops=100,
        bytes=200,
        flops_per_second=50.0,
        bytes_per_second=100.0,
        floor_seconds=1.0,
        of_floor=0.5,
    )


SKIPPED = records.Skipped(**CELL, contestant="flash-attn", reason="not installed")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.jsonl"


def write(path, *written):
    with records.Writer(path) as writer:
        writer.write(*written)


def test_what_is_written_is_read(path):
    write(path, RUN, row(), SKIPPED)
    found = records.read(path)
    assert (found.runs, found.rows, found.skipped) == ([RUN], [row()], [SKIPPED])
    start = "attention/both/8x128/half/float32/cpu"
    assert found.keys == {f"{start}/bertfast", f"{start}/flash-attn"}


def test_lines_are_as_documented(path):
    write(path, RUN, row(), SKIPPED)
    run, measured, skipped = map(json.loads, path.read_text().splitlines())
    names = {"kind", "schema", "started", "command", "machine", "ceilings", "timing"}
    assert set(run) == names and (run["schema"], run["timing"]) == (1, "clock")
    identity = {"kind", "key", "subject", "pass", "batch", "length", "fill", "dtype", "device", "contestant"}
    assert set(skipped) == identity | {"reason", "excused"}
    numbers = "seconds median p10 p90 speedup first_call_seconds peak_bytes error flops bytes flops_per_second"
    assert set(measured) == identity | {*numbers.split(), "bytes_per_second", "floor_seconds", "of_floor"}
    assert (measured["kind"], measured["pass"], skipped["kind"]) == ("row", "both", "skipped")


def test_every_line_is_on_the_disk_at_once(path):
    with records.Writer(path) as writer:
        writer.write(RUN)
        assert records.read(path).runs == [RUN]
        writer.write(row())
        assert records.read(path).rows == [row()]


@pytest.mark.parametrize("cut", [1, 7, 200])
def test_an_interrupted_line_is_ignored_and_replaced(path, cut):
    write(path, RUN, row(), SKIPPED)
    path.write_bytes(path.read_bytes()[:-cut])
    assert records.read(path).rows == [row()] and records.read(path).skipped == []
    write(path, RUN, SKIPPED)
    found = records.read(path)
    assert (found.runs, found.rows, found.skipped) == ([RUN, RUN], [row()], [SKIPPED])


def test_a_broken_line_elsewhere_is_an_error_that_names_it(path):
    write(path, RUN, row())
    lines = path.read_text().splitlines(keepends=True)
    for broken, message in (
        ("{\n", "line 2"),
        ('{"kind": "row"}\n', "line 2: row without subject, pass"),
        ("3\n", "nei"),
    ):
        path.write_text(lines[0] + broken + lines[1])
        with pytest.raises(ValueError, match=message):
            records.read(path)


def test_another_schema_is_refused(path):
    write(path, RUN)
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(ValueError, match="line 1: schema is 2, this version reads 1"):
        records.read(path)


def test_a_run_of_before_it_said_how_it_timed(path):
    write(path, RUN)
    path.write_text(path.read_text().replace(', "timing": "clock"', ""))
    assert records.read(path).runs == [dataclasses.replace(RUN, timing=None)]


def test_the_later_result_of_a_contestant_counts(path):
    write(path, RUN, row(median=2.0), SKIPPED, row("eager"), RUN, row(median=3.0))
    found = records.read(path)
    assert [(r.contestant, r.median) for r in found.rows] == [("eager", 2.0), ("bertfast", 3.0)]
    # What was skipped and could be measured later is no longer skipped.
    write(path, row("flash-attn"))
    assert records.read(path).skipped == []


def test_numbers_that_are_none_are_not_written(path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(path, row(median=float("nan")))
