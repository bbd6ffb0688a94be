"""The compile gate: that the kernels pass it, and that it notices what it is there to notice."""

import json
import os
import re
import subprocess
import sys

import pytest

from helpers import compiled
from helpers.compiled import FOLDER, REGISTER_MARGIN, Facts, Row, complaints, read_table, regressions, write_table
from helpers.project import ROOT, copy_installation, copy_tree, run_python

ROW = Row(
    kernel="some_kernel",
    call="some call",
    target=90,
    warps=4,
    stages=3,
    registers=64,
    stack=0,
    shared=1024,
    loads=6,
    wide_loads=4,
    bulk_loads=2,
    stores=3,
    wide_stores=2,
    matrix="",
)
TABLES = sorted(FOLDER.glob("triton-*.csv"))
MEMORY_BOUND = Facts(half=True, dots=0, rows=16, aligned=True, tf32=False)
GEMM = Facts(half=True, dots=1, rows=128, aligned=True, tf32=False)


def test_the_gate():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests" / "compile_gate.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_table_is_of_its_sources_until_they_change(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "SOURCES", tmp_path / "sources.json")
    compiled.note_sources("3.9.0")
    compiled.note_sources("3.8.1")
    assert compiled.is_written_from("3.9.1") and compiled.is_written_from("3.8.0")
    assert not compiled.is_written_from("3.6.0")
    monkeypatch.setattr(compiled, "ROOT", copy_tree(tmp_path / "copy"))
    assert compiled.is_written_from("3.9.0")
    kernel = tmp_path / "copy" / "kernels" / "gemm.py"
    kernel.write_text(kernel.read_text() + "# changed\n")
    assert not compiled.is_written_from("3.9.0")


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_no_committed_table_has_spills_in_half_precision(path):
    """Samples do not see every row. The gate allows 8 bytes, and those in kernels with matrix products alone."""
    half = [row for row in read_table(path) if re.search(r"\b(bf16|fp16)\b", row.call)]
    assert half
    assert [str(row) for row in half if row.stack > (compiled.SPARED if row.matrix else 0)] == []


def test_a_table_that_is_not_there_is_an_error(tmp_path):
    missing = tmp_path / "triton-9.9.csv"
    assert compiled.compare([ROW], missing, True) == compiled.compare([ROW], missing, False) != []
    compiled.write_table(missing, [ROW])
    assert compiled.compare([ROW], missing, True) == []
    assert compiled.compare([ROW._replace(kernel="another_kernel")], missing, False) == []
    assert len(compiled.compare([ROW._replace(kernel="another_kernel")], missing, True)) == 2


def test_every_table_notes_its_sources():
    assert {path.stem for path in TABLES} == json.loads(compiled.SOURCES.read_text()).keys()


def test_a_sound_row():
    assert complaints(ROW, MEMORY_BOUND) == []
    assert complaints(ROW._replace(matrix="wgmma"), GEMM) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (dict(shared=227 * 1024 + 1), "shared memory"),
        (dict(stack=8), "spilled registers in half precision"),
        (dict(wide_loads=0), "none of 6 loads has 128 bits"),
        (dict(wide_stores=0), "none of 3 stores has 128 bits"),
    ],
)
def test_complaints_about_memory_bound_kernels(change, what):
    (found,) = complaints(ROW._replace(**change), MEMORY_BOUND)
    assert what in found


def test_a_descriptor_that_is_not_used():
    descriptors = GEMM._replace(descriptors=True)
    assert complaints(ROW._replace(matrix="wgmma"), descriptors) == []
    (found,) = complaints(ROW._replace(matrix="wgmma", bulk_loads=0), descriptors)
    assert found == "loads by tensor descriptor are no bulk copies"


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_attention_of_long_sequences_loads_by_descriptor_where_the_card_can(table):
    calls = {"attention 512 x 64 bf16 inference", "varlen_attention 512 x 64 bf16 inference"}
    rows = [row for row in read_table(table) if row.kernel == "attention_fwd_kernel" and row.call in calls]
    assert sorted((row.call, row.target) for row in rows if row.bulk_loads) == sorted(
        (call, target) for call in calls for target in (90, 100)
    )


def test_what_is_allowed():
    assert complaints(ROW._replace(stack=8), MEMORY_BOUND._replace(half=False)) == []
    assert complaints(ROW._replace(wide_loads=0, wide_stores=0), MEMORY_BOUND._replace(aligned=False)) == []


def test_a_register_set_aside_for_one_more_program_is_no_spill():
    assert complaints(ROW._replace(matrix="wgmma", registers=128, stack=8), GEMM) == []
    for change in (dict(stack=12), dict(stack=8, registers=255)):
        (found,) = complaints(ROW._replace(matrix="wgmma", **change), GEMM)
        assert "spilled registers in half precision" in found


@pytest.mark.parametrize(
    ("target", "rows", "matrix"),
    [
        (80, 128, "mma"),
        (90, 128, "wgmma"),
        (90, 64, "wgmma"),
        (90, 32, "mma"),
        (100, 128, "tcgen05"),
        (100, 16, "mma"),
        (120, 128, "mma"),
    ],
)
def test_matrix_instructions(target, rows, matrix):
    facts = GEMM._replace(rows=rows)
    assert complaints(ROW._replace(target=target, shared=0, matrix=matrix), facts) == []
    for other in {"", "mma", "wgmma", "tcgen05", "mma+wgmma"} - {matrix}:
        (found,) = complaints(ROW._replace(target=target, shared=0, matrix=other), facts)
        assert f"{matrix} was meant" in found


def test_tf32_only_where_allowed():
    facts, tf32 = GEMM._replace(half=False), ROW._replace(matrix="wgmma.tf32")
    assert complaints(ROW, facts) == []
    assert complaints(tf32, facts._replace(tf32=True)) == []
    assert complaints(tf32, facts) == ["tf32 was not allowed"]
    assert complaints(ROW, facts._replace(tf32=True)) == ["tf32 was allowed, none is used"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (dict(registers=ROW.registers + REGISTER_MARGIN + 1), "73 registers, were 64"),
        (dict(stack=4), "4 bytes of stack, were 0"),
        (dict(shared=1025), "1025 bytes of shared memory, were 1024"),
        (dict(wide_loads=3), "3 wide loads, were 4"),
        (dict(bulk_loads=1), "1 bulk loads, were 2"),
        (dict(wide_stores=1), "1 wide stores, were 2"),
        (dict(matrix=""), "no wgmma any more"),
        (dict(call="some call #2"), "one more variant than the table has"),
        (dict(target=80), "one more variant than the table has"),
    ],
)
def test_regressions(change, what):
    before = ROW._replace(matrix="wgmma")
    assert any(line.endswith(what) for line in regressions([before._replace(**change)], [before]))


def test_improvements_are_no_regressions():
    better = ROW._replace(registers=ROW.registers + REGISTER_MARGIN, shared=0, wide_loads=5, loads=99)
    assert regressions([better], [ROW]) == []
    assert regressions([ROW], [ROW]) == []


def test_a_table_that_lists_too_much_is_out_of_date():
    assert regressions([], [ROW]) == ["some_kernel, sm_90, some call: in the table, but no longer compiled"]


def test_tables_are_read_as_written(tmp_path):
    path = tmp_path / "triton-0.0.csv"
    rows = [ROW, ROW._replace(target=100, call="another, with a comma", matrix="tcgen05")]
    write_table(path, rows)
    assert read_table(path) == rows


def test_the_tables_name_the_same_variants():
    keys = {path.name: {row.key for row in read_table(path)} for path in TABLES}
    assert len(keys) >= 3
    assert len(set(map(frozenset, keys.values()))) == 1


FAULTS = {
    "few warps for wide rows": (
        "tiles.py",
        "return RowTile(block_m, block_n, num_warps)",
        "return RowTile(block_m, block_n, max(num_warps // 4, 1))",
        "8192 fp16",
        r"bytes of spilled registers in half precision",
    ),
    "unaligned rows": (
        "layer_norm.py",
        '@triton.jit(do_not_specialize=["M", "last_dropped"])',
        '@triton.jit(do_not_specialize=["M", "last_dropped", "stride_x_m", "stride_residual_m", "stride_dout_m"])',
        "768 bf16 training",
        r"wide loads, were",
    ),
    "a specialised row count": (
        "layer_norm.py",
        '@triton.jit(do_not_specialize=["M", "last_dropped"])',
        '@triton.jit(do_not_specialize=["last_dropped"])',
        "768 bf16 training",
        r"variants for 199 row counts",
    ),
    "more shared memory": (
        "tiles.py",
        "return ColumnTile(2048 // block_n, block_n, 4)",
        "return ColumnTile(2048 // block_n, block_n, 16)",
        "768 bf16 training",
        r"bytes of shared memory, were",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(tmp_path, fault):
    name, old, new, calls, message = FAULTS[fault]
    kernels = copy_installation(tmp_path) / "kernels" / name
    source = kernels.read_text()
    assert old in source
    kernels.write_text(source.replace(old, new))
    gate = str(ROOT / "tests" / "compile_gate.py")
    done = run_python(gate, "--targets", "80", "--calls", calls, cwd=tmp_path, path=(tmp_path,), check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(rf"^error: .*{message}", done.stdout, re.MULTILINE), done.stdout + done.stderr


@pytest.mark.slow
def test_a_kernel_that_nothing_launches_is_noticed(tmp_path):
    kernels = copy_installation(tmp_path) / "kernels" / "column_sum.py"
    kernels.write_text(
        kernels.read_text() + "\n\n@triton.jit\ndef forgotten_kernel(x_ptr):\n    tl.store(x_ptr, 0.0)\n"
    )
    code = "import compile_gate as g; print(g.defined_kernels() - {'column_sum_kernel'})"
    done = run_python("-c", code, cwd=ROOT / "tests", path=(tmp_path,))
    assert "forgotten_kernel" in done.stdout and "column_sum_kernel" not in done.stdout
