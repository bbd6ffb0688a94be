"""The benchmark of the CPU backend: every part's lines, targets, exit code."""

from __future__ import annotations

import json
from functools import partial

import pytest

from bertfast import BertConfig
from bertfast.benchmarks import bench_cpu_peers, bench_model, cpu_parts, peers
from bertfast.benchmarks.bench_cpu_peers import TARGETS, Target, main
from bertfast.benchmarks.cpu_parts import KERNELS, OURS, PARTS, PRODUCTS, Line
from bertfast.ops import quantized_linear

TINY = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 600}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    model = bench_model.Model("bert-base", partial(BertConfig, **TINY))
    monkeypatch.setitem(bench_model.MODELS, "bert-base", model)
    monkeypatch.setattr(cpu_parts, "SHAPES", {"1x128": (1, 9, "dense"), "32 mixed": (3, 9, "mixed")})
    monkeypatch.setattr(cpu_parts, "SEQUENCES", (1, 2))
    monkeypatch.setattr(cpu_parts, "LONG", (64, 128))
    monkeypatch.setattr(peers, "taking_part", lambda cell: [])
    bench_model._models.cache_clear()
    yield
    bench_model._models.cache_clear()


def lines_of(tmp_path, *arguments):
    path = tmp_path / "lines.jsonl"
    code = main([*arguments, "--rounds", "1", "--json", str(path)])
    return code, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("part", "contestants", "shapes"),
    [
        ("float32", {OURS, "sdpa", PRODUCTS}, {"1x128", "32 mixed"}),
        ("bfloat16", {OURS, "sdpa", PRODUCTS}, {"1x128", "32 mixed"}),
        pytest.param(
            "int8",
            {OURS},
            {"1x128", "32 mixed"},
            marks=pytest.mark.skipif(quantized_linear.unavailable() is not None, reason="no int8"),
        ),
        ("host", {OURS, KERNELS}, {"1x16"}),
        ("tokens", {OURS}, {"1x128", "2x128"}),
        ("memory", {OURS}, {"1x64", "1x128"}),
    ],
)
def test_every_part_has_its_lines(part, contestants, shapes, tmp_path, capsys):
    _, lines = lines_of(tmp_path, "--parts", part)
    assert {line["contestant"] for line in lines} == contestants and {line["shape"] for line in lines} == shapes
    assert all(line["value"] > 0 and line["machine"]["torch"] for line in lines)
    assert all(line["ratio"] > 0 for line in lines if line["contestant"] != OURS)
    shown = capsys.readouterr().out
    assert all(target.part in shown for target in TARGETS if target.part == part)
    if part == "int8":
        assert all(float(line["note"].split()[-1]) > 0.98 for line in lines)


def test_a_contestant_that_is_wrong_has_no_line(tmp_path, capsys, monkeypatch):
    entrant = bench_model.Model._entrant

    def wrong(self, cell, name, replayed):
        found = entrant(self, cell, name, replayed)
        return (
            found if name != "sdpa" else type(found)(lambda batch: {"last_hidden_state": batch.cotangent[batch.real]})
        )

    monkeypatch.setattr(bench_model.Model, "_entrant", wrong)
    _, lines = lines_of(tmp_path, "--parts", "float32")
    assert {line["contestant"] for line in lines} == {OURS, PRODUCTS}
    assert "sdpa: wrong result" in capsys.readouterr().err


def test_targets():
    target = Target("float32", ("a", "b", "c"), "x", least=1.5)
    lines = [
        Line("float32", "a", "x", 1.0, "ms", 1.5),
        Line("float32", "b", "x", 1.0, "ms", 1.4),
        Line("int8", "c", "x", 1.0, "ms", 2.0),
    ]
    assert target.holds(lines) == {"a": True, "b": False, "c": None}
    most = Target("memory", ("a",), "x", most=2.0)
    assert most.holds([Line("memory", "a", "x", 1.0, "ms", 2.1)]) == {"a": False}
    assert {target.part for target in TARGETS} == set(PARTS)


@pytest.mark.parametrize("ratio", [0.5, 2.0, None])
def test_the_exit_code_says_whether_targets_are_reached(ratio, monkeypatch, capsys):
    monkeypatch.setattr(bench_cpu_peers, "measured", lambda *_: [Line("host", "1x16", KERNELS, 1.0, "ms", ratio)])
    assert main(["--parts", "host"]) == (ratio != 2.0)
    assert {0.5: "MISSED", 2.0: "reached", None: "NOT MEASURED"}[ratio] in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--parts", "float16"]])
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert "argument --" in capsys.readouterr().err
