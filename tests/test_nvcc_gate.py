"""The nvcc gate's logic: what it reads out of ptxas' log and machine code, and that it notices what it is there for.

The gate itself is a step of its own, `make nvcc-gate`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nvcc_gate
import pytest

from helpers import nvcc
from helpers.compiled import FOLDER, REGISTER_MARGIN, read_table, regressions, write_table
from helpers.cpp_source import included
from helpers.nvcc import Counts, Row, complaints, readable, rows_of, worse
from helpers.project import ROOT, load_setup, run_python

ROW = Row(
    file="op",
    kernel="op_fwd_kernel<T=bf16, kVector=true>",
    arch="90a",
    registers=64,
    stack=0,
    spill_stores=0,
    spill_loads=0,
    shared=1024,
    loads=6,
    wide_loads=4,
    stores=3,
    wide_stores=2,
    hmma=64,
    ldsm=32,
    ldgsts=8,
    mufu=34,
    issued=650,
)
TABLES = sorted(FOLDER.glob("nvcc-*.csv"))

MANGLED = "_ZN8bertfast37_GLOBAL__N__2a6285b0_5_op_cu_85635a2e9op_kernelI13__nv_bfloat16Lb1EEEvPKT_PS2_i"
PLAIN = "_ZN8bertfast11copy_kernelEPf"
LOG = f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{MANGLED}' for 'sm_90a'
ptxas info    : Function properties for {MANGLED}
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 2048 bytes smem
ptxas info    : Compile time = 3.392 ms
ptxas info    : Compiling entry function '{PLAIN}' for 'sm_90a'
ptxas info    : Function properties for {PLAIN}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
"""
SASS = f"""
	code for sm_90a
		Function : {PLAIN}
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E R4, desc[UR4][R2.64] ;
        /*0020*/                   STS.128 [R4], R8 ;
        /*0030*/                   STG.E.U16 desc[UR4][R2.64], R5 ;
		..........
		Function : {MANGLED}
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0010*/             @UP0  LDG.E.64 R4, desc[UR4][R2.64] ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;
        /*0030*/              @P1  STG.E.ENL2.256 desc[UR4][R2.64], R5, R6 ;
        /*0040*/                   BRA 0x40;
		..........
"""
COUNTS = {PLAIN: Counts(1, 0, 1, 0), MANGLED: Counts(3, 2, 1, 1)}
PARAMETERS = {"op_kernel": ["T", "kVector"]}


def test_counts():
    assert nvcc.counts_of(SASS) == COUNTS


def counts_of(*instructions: str) -> Counts:
    """Of a function of these, the first at 0x00, the second at 0x10 and so on."""
    lines = [f"        /*{16 * i:04x}*/  {line:>40} ;  /* 0x7fea */\n" for i, line in enumerate(instructions)]
    return nvcc.counts_of(f"\t\tFunction : f\n{''.join(lines)}\t\t..........\n")["f"]


HMMA, LDSM = "HMMA.16816.F32.BF16 R8, R4, R6, R8", "LDSM.16.MT88.4 R4, [R2+0x40]"
LDGSTS, MUFU = "LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64], P1", "MUFU.EX2 R3, R3"
ADD = "FADD R3, R3, R7"


@pytest.mark.parametrize(
    ("code", "main_loop"),
    [
        pytest.param(
            [ADD, LDSM, f"@P1 {LDGSTS}", f"@!UP0 {MUFU}", HMMA, HMMA, "HFMA2.MMA R3, R4, R4, R3", "@P0 BRA 0x10", HMMA],
            dict(hmma=2, ldsm=1, ldgsts=1, mufu=1, issued=7),
            id="one",
        ),
        pytest.param([LDSM, HMMA, "@!P0 BRA 0x0", "EXIT"], dict(hmma=1, ldsm=1, issued=3), id="from the start on"),
        pytest.param([LDSM, HMMA, "BRA.U !UP0, 0x0", "EXIT"], dict(hmma=1, ldsm=1, issued=3), id="uniform"),
        pytest.param([LDSM, HMMA, "@P0 BRA !P2, 0x0", "EXIT"], dict(hmma=1, ldsm=1, issued=3), id="two predicates"),
        pytest.param(
            [ADD, LDGSTS, LDSM, HMMA, "@P0 BRA 0x20", ADD, "@P1 BRA 0x10", "EXIT"],
            dict(hmma=1, ldsm=1, issued=3),
            id="the innermost",
        ),
        pytest.param(
            [ADD, LDGSTS, LDSM, HMMA, "@P0 BRA 0x20", HMMA, "@P1 BRA 0x10", "EXIT"],
            dict(hmma=2, ldsm=1, ldgsts=1, issued=6),
            id="products around the innermost",
        ),
        pytest.param(
            [ADD, MUFU, "@P0 BRA 0x10", LDSM, HMMA, "@P0 BRA 0x30", MUFU, LDSM, "@P1 BRA 0x60", "EXIT"],
            dict(hmma=1, ldsm=1, issued=3),
            id="beside loops without products",
        ),
        pytest.param([LDSM, "@P0 BRA 0x30", HMMA, ADD, "EXIT", "BRA 0x50"], {}, id="a branch ahead"),
        pytest.param([LDSM, HMMA, MUFU, "@P0 BRA 0x20", "EXIT"], {}, id="products in no loop"),
        pytest.param(
            [ADD, LDSM, "@P0 BRA 0x40", LDGSTS, HMMA, "@P1 BRA 0x10", "EXIT"],
            dict(hmma=1, ldsm=1, ldgsts=1, issued=4),
            id="a branch ahead in it",
        ),
        pytest.param(
            [ADD, HMMA, "@P0 BRA 0x50", LDSM, "BRA 0x80", MUFU, ADD, ADD, HMMA, "@P1 BRA 0x10", "EXIT"],
            dict(hmma=2, ldsm=1, issued=6),
            id="the shorter of two ways",
        ),
        pytest.param(
            [ADD, LDSM, "@P0 BRA 0x50", HMMA, "BRA 0x60", HMMA, MUFU, "@P1 BRA 0x10", "EXIT"],
            dict(hmma=2, ldsm=1, mufu=1, issued=7),
            id="products in two alternatives",
        ),
        pytest.param(
            [ADD, LDSM, "@P2 BRA 0x10", HMMA, MUFU, "@P1 BRA 0x10", "EXIT"],
            dict(hmma=1, ldsm=1, mufu=1, issued=5),
            id="an early way back",
        ),
        pytest.param(
            [ADD, LDSM, HMMA, "@P1 BRA 0x60", MUFU, "EXIT", LDGSTS, "BRA 0x10"],
            dict(hmma=1, ldsm=1, ldgsts=1, issued=5),
            id="the end of the function in the midst",
        ),
        pytest.param(
            [ADD, LDSM, HMMA, "@P0 CALL.REL.NOINC 0x50", "BRA 0x10", HMMA, "@P1 BRA 0x0", "EXIT"],
            dict(hmma=2, ldsm=1, issued=6),
            id="around one that is left by a call",
        ),
        pytest.param(
            [ADD, LDSM, "CALL.REL.NOINC 0x60", HMMA, "@P0 BRA 0x10", "EXIT", MUFU, "RET.REL.NODEC R4 0x0", "BRA 0x30"],
            dict(hmma=1, ldsm=1, issued=4),
            id="a call",
        ),
        pytest.param(
            [ADD, LDSM, "CALL.ABS.NOINC R2", HMMA, "@P0 BRA 0x10", "EXIT"],
            dict(hmma=1, ldsm=1, issued=4),
            id="a call of another function",
        ),
        pytest.param(
            [ADD, "BRA 0x40", HMMA, LDSM, "@P0 BRA 0x60", MUFU, HMMA, "@P1 BRA 0x20", "EXIT"],
            dict(hmma=2, ldsm=1, issued=5),
            id="entered at its end",
        ),
        pytest.param(
            [ADD, "@P0 BRA 0x80", LDSM, HMMA, "@P1 BRA 0x20", HMMA, ADD, "EXIT", MUFU, "BRA 0x20"],
            dict(hmma=1, ldsm=1, issued=3),
            id="back from code apart",
        ),
        pytest.param(
            [ADD, LDSM, "@P0 BRA 0x70", HMMA, "@P1 BRA 0x10", HMMA, "EXIT", MUFU, "BRA 0x30"],
            dict(hmma=1, ldsm=1, issued=4),
            id="code apart that belongs to it",
        ),
        pytest.param(
            [ADD, LDSM, "BRA.DIV UR4, 0x70", HMMA, "@P1 BRA 0x10", HMMA, "EXIT", MUFU, "BRA 0x30"],
            dict(hmma=1, ldsm=1, issued=4),
            id="the copy for diverged warps",
        ),
        pytest.param(
            [HMMA, LDSM, "BRX R4 -0x40", HMMA, "BRA 0x60", MUFU, LDGSTS, "@P1 BRA 0x10", "EXIT"],
            dict(hmma=1, ldsm=1, ldgsts=1, issued=6),
            id="a table of targets",
        ),
        pytest.param(
            ["BRX R4 -0x40", ADD, LDSM, HMMA, "@P1 BRA 0x20", "EXIT", MUFU, "BRA 0x20"],
            dict(hmma=1, ldsm=1, issued=3),
            id="behind a table of targets",
        ),
        pytest.param(
            [ADD, LDSM, "BRXU UR4 -0x40", HMMA, "BRA.DIV ~URZ, 0x80", MUFU, "@P1 BRA 0x10", "EXIT", ADD, "BRA 0x50"],
            dict(hmma=1, ldsm=1, mufu=1, issued=6),
            id="a table of targets and a copy for diverged warps",
        ),
    ],
)
def test_the_main_loop(code, main_loop):
    found = counts_of(*code)
    assert found._replace(loads=0, wide_loads=0) == Counts(**main_loop)


def test_a_branch_without_an_address():
    with pytest.raises(ValueError, match=r"a branch without an address: BRA `\(\.L_x_1\)"):
        counts_of(LDSM, HMMA, "@P0 BRA `(.L_x_1)")


def test_rows():
    rows, errors = rows_of("op", "90a", LOG, COUNTS, PARAMETERS)
    assert errors == []
    assert rows == [
        Row("op", "copy_kernel", "90a", 10, 0, 0, 0, 0, *COUNTS[PLAIN]),
        Row("op", "op_kernel<T=bf16, kVector=true>", "90a", 40, 8, 12, 16, 2048, *COUNTS[MANGLED]),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "ptxas warning : Stack size for entry function 'f' cannot be statically determined",
        'op.cu(3): warning #177-D: variable "unused" was declared but never referenced',
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to f",
    ],
)
def test_warnings(line):
    _, errors = rows_of("op", "90a", f"{line}\n{LOG}", COUNTS, PARAMETERS)
    assert errors == [f"op.cu, sm_90a: {line}"]


def test_a_function_that_is_not_inlined():
    called = "ptxas info    : Function properties for _Z4helpf\n"
    called += "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    _, errors = rows_of("op", "90a", LOG + called, COUNTS, PARAMETERS)
    assert errors == ["op.cu, sm_90a: help(float) is called and not inlined"]


def test_the_machine_code_must_have_the_kernels_of_the_log():
    _, errors = rows_of("op", "90a", LOG, {MANGLED: COUNTS[MANGLED], "_Z5otherv": Counts()}, PARAMETERS)
    assert errors == ["op.cu, sm_90a: ptxas tells of 2 kernels, the machine code has 2 functions"]
    _, errors = rows_of("op", "90a", "", {}, PARAMETERS)
    assert errors == ["op.cu, sm_90a: ptxas tells of 0 kernels, the machine code has 0 functions"]


@pytest.mark.parametrize(
    ("signature", "parameters", "name"),
    [
        ("void bertfast::(anonymous namespace)::f<float, (int)4, true>(float const*)", {}, "f<fp32, 4, true>"),
        ("void a::f<__half, true>(__half*)", {"f": ["T", "kVector"]}, "f<T=fp16, kVector=true>"),
        ("void a::f<a::Row<a::Any, (int)32>, false>(a::Args)", {"f": ["R", "kX"]}, "f<R=Row<Any, 32>, kX=false>"),
        ("void a::f<(a::Form)2>(int)", {"f": ["kForm"]}, "f<kForm=(Form)2>"),
        ("void a::f<float>(int)", {"f": ["T", "U"]}, "f<fp32>"),
        ("a::plain(float*)", {}, "plain"),
        ("extern_c", {}, "extern_c"),
    ],
)
def test_readable_names(signature, parameters, name):
    assert readable(signature, parameters) == name


def test_parameters_of_kernels():
    source = """
template <class T, int kTeam = 32, bool kVector>  // of values, (all)
__global__ void __launch_bounds__(Row<T, kTeam>::kBlock) fwd_kernel(const Forward<T> args) {}
template <class T>
constexpr int kPacket = 8;
template <typename T, template <class> class Form>
__global__ __launch_bounds__(limit(2), 3) void bwd_kernel(T* x);
/* template <class Old> */
__global__ void plain_kernel(float* x) {}
"""
    assert nvcc.parameters_of_kernels(source) == {"fwd_kernel": ["T", "kTeam", "kVector"], "bwd_kernel": ["T", "Form"]}


def test_included_files(tmp_path):
    files = {
        "cuda/op.cu": '#include "near.cuh"\n#include "top.h"\n#include <cuda_fp16.h>\n',
        "cuda/near.cuh": '  #  include "cuda/far.cuh"\n#include "op.h"\n',
        "cuda/far.cuh": '#include "near.cuh"\n// #include "no.h"\n',
        "cuda/op.h": "",
        "top.h": "",
        "no.h": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    found = included(tmp_path / "cuda" / "op.cu", [tmp_path])
    assert {path.relative_to(tmp_path).as_posix() for path in found} == files.keys() - {"no.h"}


def test_a_sound_row():
    assert complaints(ROW) == []
    assert complaints(ROW._replace(kernel="op_fwd_kernel<T=bf16, kVector=false>", wide_loads=0, wide_stores=0)) == []
    assert complaints(ROW._replace(hmma=0, ldsm=0, ldgsts=0, mufu=0, issued=0)) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (dict(stack=8), "8 bytes of stack"),
        (dict(stack=8, spill_stores=8, spill_loads=12), "8 bytes of spills stored, 12 loaded"),
        (dict(wide_loads=0), "none of 6 loads has 128 bits"),
        (dict(wide_stores=0), "none of 3 stores has 128 bits"),
        (dict(ldsm=0), "no LDSM in the main loop, which has 64 HMMA"),
        (dict(ldgsts=0), "no LDGSTS in the main loop, which has 64 HMMA"),
    ],
)
def test_complaints(change, what):
    assert complaints(ROW._replace(**change)) == [what]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (dict(registers=ROW.registers + REGISTER_MARGIN + 1), "73 registers, were 64"),
        (dict(stack=4), "4 bytes of stack, were 0"),
        (dict(shared=1025), "1025 bytes of shared memory, were 1024"),
        (dict(wide_loads=3), "3 wide loads, were 4"),
        (dict(wide_stores=1), "1 wide stores, were 2"),
        (dict(ldsm=33), "33 LDSM in the main loop, were 32"),
        (dict(ldgsts=7), "7 LDGSTS in the main loop, were 8"),
        (dict(mufu=35), "35 MUFU in the main loop, were 34"),
        (dict(issued=674), "674 instructions issued in the main loop, were 650"),
        (dict(arch="80"), "one more variant than the table has"),
        (dict(kernel="op_fwd_kernel<T=fp16, kVector=true>"), "one more variant than the table has"),
    ],
)
def test_regressions(change, what):
    found = regressions([ROW._replace(**change)], [ROW], worse)
    assert any(line.endswith(what) for line in found), found


def test_improvements_are_no_regressions():
    better = ROW._replace(registers=ROW.registers + REGISTER_MARGIN, shared=0, wide_loads=5, loads=99)
    assert regressions([better], [ROW], worse) == []
    better = ROW._replace(ldsm=31, ldgsts=9, mufu=33, issued=673)
    assert regressions([better], [ROW], worse) == []
    for hmma in (63, 65):
        another_loop = ROW._replace(hmma=hmma, ldsm=99, ldgsts=1, mufu=99, issued=999)
        assert regressions([another_loop], [ROW], worse) == []
    gone = "op_fwd_kernel<T=bf16, kVector=true>, sm_90a: in the table, but no longer compiled"
    assert regressions([], [ROW], worse) == [gone]


def test_tables_are_read_as_written(tmp_path):
    path = tmp_path / "nvcc-0.0.csv"
    rows = [ROW, ROW._replace(arch="80")]
    write_table(path, rows)
    assert read_table(path, Row) == rows


def test_architectures_are_those_of_the_build():
    assert nvcc_gate.archs_of(load_setup().CUDA_ARCHS) == ["80", "86", "89", "90a", "100", "120"]


def test_there_is_a_committed_table():
    assert TABLES


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_the_committed_table(path):
    rows = read_table(path, Row)
    assert [(str(row), complaints(row)) for row in rows if complaints(row)] == []
    assert {row.file for row in rows} == {source.stem for source in nvcc_gate.KERNELS.glob("*.cu")}
    variants = {(row.file, row.kernel): set() for row in rows}
    for row in rows:
        variants[row.file, row.kernel].add(row.arch)
    assert set(map(frozenset, variants.values())) == {frozenset(nvcc_gate.archs_of(load_setup().CUDA_ARCHS))}


def test_without_nvcc(tmp_path):
    gate = str(ROOT / "tests" / "nvcc_gate.py")
    done = run_python(gate, cwd=tmp_path, check=False, CUDA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "error: there is no nvcc, neither in CUDA_HOME nor on PATH\n"


def stand_in(folder: Path, name: str, lines: str) -> Path:
    program = folder / name
    program.write_text(f"#!{sys.executable}\nimport sys\n{lines}")
    program.chmod(0o755)
    return program


@pytest.fixture
def gate(tmp_path, monkeypatch, capsys):
    """The gate over one kernel that stand-ins compile, as (exit code, what it printed)."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "op.cu").write_text("template <class T, bool kVector>\n__global__ void op_kernel(T* x) {}\n")
    log = tmp_path / "log"
    log.write_text(re.sub("8 bytes stack.*", "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", LOG))
    calls = tmp_path / "calls"
    compiler = stand_in(
        tmp_path,
        "nvcc",
        f"open({str(calls)!r}, 'a').write('called ')\n"
        f"open(sys.argv[sys.argv.index('-o') + 1], 'w')\nlog = open({str(log)!r}).read()\n"
        "print(log, file=sys.stderr)\nsys.exit('error: ' in log)\n",
    )
    cuobjdump = stand_in(tmp_path, "cuobjdump", f"print({SASS!r})\n")
    tools = nvcc_gate.Tools(str(compiler), "0.0.1", cuobjdump, [])
    for name, value in {
        "KERNELS": folder,
        "TEST_KERNELS": tmp_path / "none",
        "INCLUDES": (),
        "CACHE": tmp_path / "cache",
        "find_tools": lambda flags: tools,
    }.items():
        monkeypatch.setattr(nvcc_gate, name, value)
    monkeypatch.setattr(nvcc, "FOLDER", tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["nvcc_gate.py", *arguments])
        return nvcc_gate.main(), capsys.readouterr().out

    run.log, run.calls, run.table = log, calls, tmp_path / "nvcc-0.0.csv"
    return run


def test_the_gate_writes_and_holds_to_its_table(gate):
    code, printed = gate()
    assert code == 1 and "--write makes it" in printed
    assert gate("--write")[0] == 0
    assert len(read_table(gate.table, Row)) == 2 * 6
    assert gate.calls.read_text().split() == ["called"] * 6
    assert gate()[0] == 0

    gate.table.write_text(gate.table.read_text().replace("90a,40,", "90a,20,"))
    code, printed = gate()
    assert code == 1
    assert "error: op_kernel<T=bf16, kVector=true>, sm_90a: 40 registers, were 20\n" in printed
    assert gate("--archs", "80")[0] == 0

    gate.table.write_text(gate.table.read_text().replace("copy_kernel", "another_kernel"))
    code, printed = gate("--files", "op")
    assert code == 1 and "another_kernel" not in printed
    code, printed = gate()
    assert "error: another_kernel, sm_90a: in the table, but no longer compiled\n" in printed
    assert "error: copy_kernel, sm_90a: one more variant than the table has\n" in printed


def test_the_gate_compiles_what_has_changed_only(gate):
    gate("--archs", "80")
    gate("--archs", "80")
    assert gate.calls.read_text().split() == ["called"]
    source = nvcc_gate.KERNELS / "op.cu"
    source.write_text(source.read_text() + "// changed\n")
    gate("--archs", "80")
    assert gate.calls.read_text().split() == ["called"] * 2


def test_the_gate_writes_no_table_with_errors(gate):
    gate.log.write_text(LOG)
    code, printed = gate("--write")
    assert code == 1 and not gate.table.exists()
    assert "error: op_kernel<T=bf16, kVector=true>, sm_80: 12 bytes of spills stored, 16 loaded\n" in printed


def test_a_kernel_that_does_not_compile(gate):
    gate.log.write_text("op.cu(1): error: identifier is undefined\n")
    code, printed = gate("--archs", "80")
    assert code == 1
    assert "error: op.cu, sm_80: does not compile\nop.cu(1): error: identifier is undefined\n" in printed
    gate("--archs", "80")
    assert gate.calls.read_text().split() == ["called"] * 2


def test_the_emulators_kernels_have_to_compile_no_more(gate, monkeypatch):
    monkeypatch.setattr(nvcc_gate, "TEST_KERNELS", nvcc_gate.KERNELS)
    monkeypatch.setattr(nvcc_gate, "KERNELS", nvcc_gate.CACHE)
    gate.log.write_text(LOG)
    code, printed = gate()
    assert code == 0 and "0 kernels of 1 files" in printed
    assert gate.calls.read_text().split() == ["called"] * 2
    gate.log.write_text("op.cu(1): error: identifier is undefined\n")
    nvcc_gate.TEST_KERNELS.joinpath("op.cu").write_text("changed")
    assert gate()[0] == 1
