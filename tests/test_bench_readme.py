"""The README's numbers: what is written from a result file, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertfast.benchmarks import readme

RUN = {
    "kind": "run",
    "schema": 1,
    "started": "2026-01-02T03:04:05+00:00",
    "command": ["/somewhere/bertfast", "bench", "--results", "r.jsonl"],
    "machine": {
        "cpu": "Some CPU",
        "cores": 2,
        "torch_threads": 2,
        "gpus": [],
        "torch": "2.13.0",
        "python": "3.11.7",
        "system": "Linux x86_64",
        "commit": "abc1234",
    },
    "ceilings": {},
}
MACHINE = "Some CPU, 2 cores, 2 torch threads, torch 2.13.0, Python 3.11.7, Linux x86_64, commit abc1234"


def row(contestant="bertfast", median=0.00123, speedup=True, **more) -> dict:
    names = {"subject": "attention", "pass": "forward", "batch": 8, "length": 128, "fill": "half"}
    names |= {"dtype": "float32", "device": "cpu", "contestant": contestant} | more
    key = "{subject}/{pass}/{batch}x{length}/{fill}/{dtype}/{device}/{contestant}".format(**names)
    zeros = "first_call_seconds error flops bytes flops_per_second bytes_per_second floor_seconds"
    measured = dict.fromkeys(zeros.split(), 0) | {"peak_bytes": None, "seconds": [median], "of_floor": 0.437}
    measured |= {"median": median, "p10": median, "p90": median}
    measured["speedup"] = {"over": "eager", "median": 1.5, "p10": 1.444, "p90": 1.6} if speedup else None
    return {"kind": "row", "key": key, **names, **measured}


def file_of(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_section(tmp_path):
    rows = [row("eager", 0.0019, speedup=False), row(), row("sdpa", 0.0015), row("compile", 0.0001, batch=9)]
    assert readme.section(file_of(tmp_path / "r.jsonl", RUN, *rows)) == (
        f"Measured on {MACHINE}\n"
        "with `bertfast bench --results r.jsonl`:\n"
        "\n"
        "| subject | pass | B x S | fill | dtype | ms | baseline | its ms | times as fast (10-90 %) "
        "| fastest other, ms | of the floor |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| `attention` | forward | 8 x 128 | half | float32 | 1.23 | eager | 1.90 | 1.50 (1.44-1.60) "
        "| sdpa, 1.50 | 44 % |"
    )


def test_what_differs_between_rows_is_a_column(tmp_path):
    rows = [row(), row("bertfast cpu"), row("bertfast triton", device="cuda")]
    lines = readme.section(file_of(tmp_path / "r.jsonl", RUN, RUN, *rows)).splitlines()
    assert "| dtype | device | contestant | ms |" in lines[3]
    assert "| float32 | cuda | bertfast triton | 1.23 |" in lines[-1]
    assert len(lines) == 3 + 2 + 3


def test_numbers_that_are_not_there(tmp_path):
    last = readme.section(file_of(tmp_path / "r.jsonl", RUN, row(speedup=False))).splitlines()[-1]
    assert last.endswith("| 1.23 | - | - | - | - | 44 % |")


def test_no_text_breaks_the_table_or_the_page(tmp_path):
    last = readme.section(file_of(tmp_path / "r.jsonl", RUN, row(subject="a|b\n<!-- c -->"))).splitlines()[-1]
    assert last.startswith(r"| `a\|b &lt;!-- c -->` | forward |")


def test_it_goes_between_the_markers_and_stays(tmp_path):
    results, page = file_of(tmp_path / "r.jsonl", RUN, row()), tmp_path / "README.md"
    page.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    for _ in range(2):
        readme.main([str(results), str(page)])
        wanted = f"before\n{readme.BEGIN}\n{readme.section(results)}\n{readme.END}\nafter\n"
        assert page.read_text() == wanted


def test_alone_it_is_printed(tmp_path, capsys):
    results = file_of(tmp_path / "r.jsonl", RUN, row())
    readme.main([str(results)])
    assert capsys.readouterr().out == readme.section(results) + "\n"


@pytest.mark.parametrize("text", ["", readme.BEGIN, readme.END + readme.BEGIN, 2 * (readme.BEGIN + readme.END)])
def test_markers_must_be_one_pair(tmp_path, text):
    with pytest.raises(ValueError, match="expected one"):
        readme.replaced(text, "x")
    page = tmp_path / "README.md"
    page.write_text(text)
    with pytest.raises(SystemExit, match="expected one"):
        readme.main([str(file_of(tmp_path / "r.jsonl", RUN, row())), str(page)])
    assert page.read_text() == text


def test_wrong_files(tmp_path):
    with pytest.raises(SystemExit, match="usage"):
        readme.main([])
    with pytest.raises(SystemExit, match="No such file"):
        readme.main([str(tmp_path / "none.jsonl")])
    with pytest.raises(ValueError, match="no row of bertfast's"):
        readme.section(file_of(tmp_path / "r.jsonl", RUN, row("eager")))
