"""The README: its code runs, its commands exist, its table is what the backends declare."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import types

import pytest

from bertfast import backends
from bertfast.benchmarks import readme, support
from bertfast.cli import cli
from helpers.project import ROOT, run_python

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def code(language: str) -> list[str]:
    return [body for name, body in BLOCKS if name == language]


def test_every_block_is_of_a_kind_that_is_tested():
    assert {name for name, _ in BLOCKS} == {"python", "console"}
    assert len(code("python")) >= 4


def test_python_blocks_run_in_order(capsys, monkeypatch):
    # A reader's `cuda` has no emulator that serves the CPU.
    readers = {
        key: dataclasses.replace(capability, devices=frozenset({"cuda"})) if key[1] == "cuda" else capability
        for key, capability in backends._capabilities.items()
    }
    monkeypatch.setattr(backends, "_capabilities", readers)
    monkeypatch.setattr(backends, "_choices", {})
    module = types.ModuleType("readme")
    for number, block in enumerate(code("python"), 1):
        exec(compile(block, f"README.md, python block {number}", "exec"), module.__dict__)
    said = capsys.readouterr().out
    assert "classifier.weight" in said and "triton" in said


def commands(program: str) -> list[list[str]]:
    lines = [line for block in code("console") for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.split()[0] == program]


def test_bertfast_commands_parse():
    found = commands("bertfast")
    assert {arguments[0] for arguments in found} == set(cli.commands)
    for name, *arguments in found:
        cli.commands[name].make_context(name, arguments)


def test_other_commands_name_what_exists():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {arguments[0] for arguments in commands("make")} <= set(targets)
    for script, *_ in commands("python"):
        assert (ROOT / script).is_file()
    programs = {line.split()[0] for block in code("console") for line in block.splitlines()}
    assert programs == {"bertfast", "make", "python", "pip"}


def test_links_lead_somewhere():
    headings = {h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", README, re.MULTILINE)}
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target[1:] in headings if target.startswith("#") else (ROOT / target).exists(), target


def test_what_is_not_built_is_not_shown():
    import bertfast

    used = set(re.findall(r"\bbertfast\.(\w+)", "\n".join(code("python"))))
    assert all(hasattr(bertfast, name) for name in used)
    if not hasattr(bertfast, "accelerate"):
        assert "Swapping" in README.partition("## Not yet")[2]


def test_numbers_are_those_of_the_results_that_are_kept():
    results = ROOT / "benchmarks" / "results" / "cpu_2_cores.jsonl"
    kept = README.partition(readme.BEGIN)[2].partition(readme.END)[0].strip()
    assert kept == readme.section(results), f"run: python -m bertfast.benchmarks.readme {results.name} README.md"


def test_support_matrix_is_what_the_backends_declare():
    # In a process of its own: interpreted kernels, as here, serve the CPU.
    told = run_python("-m", "bertfast.benchmarks.support", cwd=ROOT).stdout.strip()
    section = README.partition(support.BEGIN)[2].partition(support.END)[0].strip()
    assert section == told, "run: python -m bertfast.benchmarks.support README.md"


def test_support_matrix_tells_every_limit():
    capability = backends.Capability(
        "attention",
        "triton",
        lambda: None,
        devices=frozenset({"cuda"}),
        dtypes=backends.FLOAT,
        auto_dtypes=backends.HALF,
        min_compute=(8, 0),
        max_head_dim=256,
        max_width=8192,
        masks=frozenset({"none", "bool"}),
        dropout=False,
        backward=False,
        features=frozenset({"gelu"}),
    )
    (row,) = support.matrix([capability]).splitlines()[2:]
    limits = "float32 only when named; compute capability 8.0 and up; head dim up to 256; width up to 8192"
    limits += "; only gelu; no float mask"
    assert row == f"| `attention` | `triton` | cuda | float16, bfloat16, float32 | no | no | {limits} |"


@pytest.mark.parametrize("text", ["", support.BEGIN, support.END + support.BEGIN, 2 * (support.BEGIN + support.END)])
def test_markers_must_be_one_pair(text):
    with pytest.raises(ValueError, match="expected one"):
        support.replaced(text)


ROWS = {
    "OpenVINO, fp32": ("float32", "openvino"),
    "OpenVINO, bf16": ("bfloat16", "openvino"),
    "ONNX Runtime, fp32": ("float32", "onnxruntime"),
    "ONNX Runtime, int8": ("int8", "onnxruntime"),
    "stock SDPA, fp32": ("float32", "sdpa"),
    "stock SDPA, bf16": ("bfloat16", "sdpa"),
    "share, fp32": ("float32", "products"),
    "share, bf16": ("bfloat16", "products"),
}


def test_the_table_of_peers_is_that_of_the_results():
    path = ROOT / "benchmarks" / "results" / "cpu_2_cores_peers.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    ratios = {(line["part"], line["shape"], line["contestant"]): line["ratio"] for line in lines}
    for name, (part, contestant) in ROWS.items():
        shown = re.search(rf"^\| {name} \|(.*)\|$", README, re.MULTILINE)[1].split("|")
        held = [ratios[part, shape, contestant] for shape in ("1x128", "8x128", "32 mixed", "8x512")]
        assert [text.strip() for text in shown] == [f"{ratio:.2f}" for ratio in held], name
    assert f"kernels take {ratios['host', '1x16', 'kernels']:.2f} of the time" in README
