"""The mutant runner: what it breaks, what it leaves alone, and the committed results."""

import ast
import re
import types
from contextlib import nullcontext
from pathlib import Path

import mutants
import pytest

from helpers import cpp_mutants, cuda_build, cuda_on_cpu, triton_mutants
from helpers.cpp_source import Source, included
from helpers.mutant import NO_MUTANT, DoesNotCompile, Mutant
from helpers.mutant_runner import Kind, Runner

KINDS = {"triton": mutants.TRITON, "cuda": mutants.CUDA}
TRITON_FILES = sorted((mutants.ROOT / "kernels").glob("*.py"))
# The emulator stands for intrinsics.cuh.
CUDA_FILES = sorted(
    {*(mutants.ROOT / "csrc" / "cuda").glob("*.cu*")} - {*mutants.ROOT.glob("csrc/cuda/intrinsics.cuh")}
)


def broken(tmp_path, body, before="@triton.jit\ndef f(x, m, N):\n    "):
    path = tmp_path / "toy.py"
    path.write_text(before + body + "\n")
    return [m.name.removeprefix(f"toy.f: {body} -> ") for m in triton_mutants.mutants_of(path, "toy")]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("m = x < N", ["m = (x <= N)"]),
        ("m = x * N", ["m = (x)", "m = (N)"]),
        ("m = x + 2", ["m = (x - 2)", "m = x + 3"]),
        ("m = x & N", ["m = (x)", "m = (N)"]),
        ("m = -x", ["m = (x)"]),
        ("m += x", ["m = x", "m -= x"]),
        ("m = 0.5", ["m = 0.505"]),
        ("m = tl.maximum(x, N)", ["m = tl.minimum(x, N)"]),
        ("m = tl.where(m, x, 0.0)", ["m = (x)", "m = (0.0)", "m = tl.where(m, x, 1.0)"]),
        ("m = tl.load(x, mask=m, other=0.0)", ["m = tl.load(x)", 'm = tl.load(x, mask=m, other=float("nan"))']),
        ("tl.store(x, m, mask=m)", ["pass", "tl.store(x, m)"]),
        ("m = tl.sum(x, axis=1) / N", ["m = (tl.sum(x, axis=1))", "m = tl.max(x, axis=1) / N"]),
        ("m = dot(x, x, m, P)", ["m = dot(x, x, m * 0.0, P)"]),
        ("m = tl.arange(0, 16)", []),
        ("m = x.to(tl.int64)", []),
        ("m = tl.zeros((16, 8), tl.float32)", []),
        ("tl.static_assert(N > 4)", []),
    ],
)
def test_what_is_broken(tmp_path, body, expected):
    assert broken(tmp_path, body) == expected


def test_functions_that_are_not_kernels_are_left_alone(tmp_path):
    assert broken(tmp_path, "m = x < N", before="def f(x, m, N):\n    ") == []


def test_what_runs_interpreted_or_compiled_only_is_left_alone(tmp_path):
    assert broken(tmp_path, "if INTERPRETED:\n        return x + 1\n    return x - 1") == []


def cpp_toy(tmp_path, source):
    path = tmp_path / "toy.cu"
    path.write_text(source)
    return cpp_mutants.mutants_of(path, "cuda/toy")


def cpp_broken(tmp_path, body, before="__global__ void f(float* x, int n) {\n  "):
    return [m.name.removeprefix(f"cuda/toy.f: {body} -> ") for m in cpp_toy(tmp_path, f"{before}{body}\n}}\n")]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("bool m = a < n;", ["bool m = a <= n;"]),
        ("bool m = a != n;", ["bool m = a == n;"]),
        ("int m = a + b * c;", ["int m = a - b * c;", "int m = a + (b);", "int m = a + (c);"]),
        ("int m = a * b / c;", ["int m = (a) / c;", "int m = (b) / c;", "int m = (a * b);"]),
        ("int m = a % (b + c) - d;", ["int m = (a) - d;", "int m = a % (b - c) - d;", "int m = a % (b + c) + d;"]),
        ("int m = a | b << c;", ["int m = (a);", "int m = (b << c);", "int m = a | b >> c;"]),
        ("bool m = a && b || c;", ["bool m = (a || b) || c;", "bool m = (a && b && c);"]),
        ("bool m = !a;", ["bool m = a;"]),
        ("float m = f(-a, b);", ["float m = f(a, b);"]),
        ("int m = 7;", ["int m = 8;"]),
        ("auto m = 0xFFu;", ["auto m = 0x100u;"]),
        ("float m = 0.5f;", ["float m = 0.505f;"]),
        ("float m = 0.0f;", ["float m = 1.0f;"]),
        ("float m = 1e-05f;", ["float m = 1.01e-05f;"]),
        ("float m = fmaxf(a, b);", ["float m = fminf(a, b);"]),
        ("float m = expf(a);", ["float m = exp2f(a);"]),
        ("m(sqrtf(a) - b);", [";", "m((a) - b);", "m(sqrtf(a) + b);"]),
        ("m(fmaf(a, b[i], c));", [";", "m(fmaf(a, b[i], -(c)));", "m(((a) + (c)));", "m(((b[i]) + (c)));"]),
        ("int m = a ? b : c ? d : e;", ["int m = a ? (c ? d : e) : b;", "int m = a ? b : c ? (e) : d;"]),
        ("x[i] += y;", ["x[i] = y;", "x[i] -= y;"]),
        ("m >>= n;", ["m = n;"]),
        ("x[i] = y;", [";"]),
        ("*x = y;", [";"]),
        ("p.x->y[i].z = y;", [";"]),
        ("sync_threads();", [";"]),
        ("wait<0>();", [";"]),
        ("switch (m) { case kA: wait(); }", ["switch (m) { case kA: ; }"]),
        ("p.a = m ? b : c(d);", [";", "p.a = m ? (c(d)) : b;"]),
        ("p.template store<4>(i, y);", [";"]),
        ("if (m) sync();", ["if (false) sync();", "if (true) sync();", "if (m) ;"]),
        ("f(p, [&](int k) { return x[k] + y; });", [";", "f(p, [&](int k) { return x[k] - y; });"]),
        ("float m[4] = {a, b};", []),
        ("float m[4][8];", []),
        ("float m[4][8], n[N - 1];", []),
        ("float m[4] = {}, n[4][8];", []),
        ("m(x[4], y[N - 1]);", [";", "m(x[5], y[N - 1]);", "m(x[4], y[N + 1]);", "m(x[4], y[N - 2]);"]),
        ("memcpy(m + 1, &n, 16);", [";", "memcpy(m - 1, &n, 16);", "memcpy(m + 2, &n, 16);"]),
        ("const T* m[2];", []),
        ("auto m = static_cast<T<2>>(a);", []),
        ("auto&& m = *a;", []),
        ("const float& m = a->b;", []),
        ("Packet<T, N - 1> m(a);", []),
        ("constexpr int m = sizeof(T[2]);", []),
        ('static_assert(N % 4 == 0, "why");', []),
        ("if constexpr (N > 1) return;", []),
        ("for (auto m : x) ++n;", []),
        ('// x = y + 1;', []),
        ('/* x = y + 1; */ const char* m = "a + b";', []),
        ("#pragma unroll 4", []),
    ],
)  # fmt: skip
def test_what_is_broken_in_cpp(tmp_path, body, expected):
    assert cpp_broken(tmp_path, body) == expected


@pytest.mark.parametrize(
    ("declaration", "function"),
    [
        ("__device__ int f(int a) {", "f"),
        ("template <class T, int N = (1 + 2)>\n__global__ void __launch_bounds__(N * 32, 1) f(const T* a) {", "f"),
        ("__host__ __device__ __forceinline__ T f() const {", "f"),
        ("namespace a {\nnamespace {\n__device__ int f() {", "f"),
        (
            "template <>\nstruct S<float> : P {\n int n[2] = {1, 2};\n public:\n  __device__ int f() const {",
            "S<float>::f",
        ),
        ("class S {\n  __device__ float operator[](int i) const {", "S::operator[]"),
        ("class S {\n  __device__ float operator()(int i) const {", "S::operator()"),
        ("struct S {\n  __device__ explicit operator bool() const {", "S::operator bool"),
        ("struct S {\n  __device__ S(int a) : a_(a), b_{a} {", "S::S"),
        ("int f(int a) {", None),
        ("struct S {\n  __host__ explicit S(int a) : b(a) {", None),
        ("constexpr int x[] = {1 + 2};\n__device__ int f(int a);\nstatic int g() {", None),
    ],
)
def test_device_functions_are_broken_and_no_others(tmp_path, declaration, function):
    closing = {"{": "}", "struct": "};", "class": "};"}
    opened = re.findall(r"^ *(?:template <>\n)?(struct|class|namespace)", declaration, re.MULTILINE)
    source = f"{declaration}\n  return p + q;\n}}\n" + "".join(closing.get(word, "}") + "\n" for word in opened[::-1])
    found = cpp_toy(tmp_path, source + "int host() { return p + q; }\n")
    assert [m.name for m in found] == ([f"cuda/toy.{function}: return p + q; -> return p - q;"] if function else [])


def test_initialisers_of_members_are_broken(tmp_path):
    (found,) = cpp_toy(tmp_path, "struct S {\n  __device__ S(int a = 1) : a_(a + b) {}\n};\n")
    assert found.name.endswith("-> __device__ S(int a = 1) : a_(a - b) {}")


def test_a_digest_is_that_of_code_and_not_of_comments_or_lines(tmp_path):
    def digest(body):
        return cpp_toy(tmp_path, f"__device__ int f() {{ {body} }}\n")[0].digest

    assert digest("return a + b;") == digest("// why\n  return a +\n  b;\n") != digest("return a + c;")


def test_functions_of_one_name_share_a_digest(tmp_path):
    def digests(second):
        source = f"__device__ int f(int a) {{ return a + b; }}\n__device__ int f(long a) {{ return {second}; }}\n"
        return {m.digest for m in cpp_toy(tmp_path, source)}

    assert len(digests("a + b")) == len(digests("a + c")) == 1 and digests("a + b") != digests("a + c")


@pytest.mark.parametrize("compiles", [True, False])
def test_cuda_mutants_are_built_apart_from_what_is_built(tmp_path, monkeypatch, compiles):
    built, folder, loaded = tmp_path / "built", tmp_path / "mutant", []
    for made in (built, folder):
        made.mkdir()
    (built / "rows.o").write_text("object")
    monkeypatch.setattr(cuda_build, "BUILT", built)

    def library(replaced, unchanged):
        assert unchanged(Path("op_bf16.cu")) and not unchanged(Path("op.cu"))
        loaded.append({name: path.read_text() for name, path in replaced.items()})
        (cuda_build.BUILT / "library.so").write_text("library")
        if not compiles:
            raise cuda_build.CannotBuild("no program")

    monkeypatch.setattr(cuda_on_cpu, "library", library)
    mutant = Mutant("cuda/rows", "f", "a -> b", "changed", "digest", Path("rows.cuh"))
    with nullcontext() if compiles else pytest.raises(DoesNotCompile, match="a -> b"):
        cpp_mutants.install(mutant, folder)
    assert loaded == [{"rows.cuh": "changed"}] and {path.name for path in built.iterdir()} == {"rows.o"}
    assert (cuda_build.BUILT / "rows.o").read_text() == "object" and cuda_build.BUILT.parent == folder


@pytest.mark.parametrize(("file", "first"), [("cuda/products", "attention_fp16"), ("cuda/rows", None)])
def test_of_several_units_one_is_built_and_tested_first(tmp_path, monkeypatch, file, first):
    loaded = []
    units = [path.stem for path in CUDA_FILES if path.suffix == ".cu"]

    def library(replaced, unchanged):
        loaded.append([unit for unit in units if not unchanged(Path(f"{unit}.cu"))])

    monkeypatch.setattr(cuda_on_cpu, "library", library)
    monkeypatch.setattr(cuda_build, "BUILT", tmp_path / "built")
    folder = tmp_path / "mutant"
    folder.mkdir()
    mutant = Mutant(file, "f", "a -> b", "changed", "digest", Path("any.cuh"))
    assert cpp_mutants.install_part(mutant, folder) == (first is not None)
    assert loaded == ([[first]] if first else [])


def test_first_units_are_those_of_their_files():
    for file, unit in cpp_mutants.FIRST_UNIT.items():
        header = f"{file.removeprefix('cuda/')}.cuh"
        assert header in {path.name for path in included(cuda_build.KERNELS / f"{unit}.cu", cuda_build.INCLUDED)}


@pytest.mark.parametrize("works", [True, False])
def test_no_mutant_is_run_where_the_kernels_as_they_are_are_caught(tmp_path, monkeypatch, works):
    def install(mutant, folder):
        if not works:
            raise DoesNotCompile(mutant.name)

    path, recorded = tmp_path / "toy.cuh", []
    path.write_text("source")
    kind = Kind(
        tests={"toy": ()},
        paths=lambda file: [path],
        mutants_of=lambda *of: [],
        counts=lambda test: True,
        budget=1.0,
        install=install,
    )
    monkeypatch.setattr(Runner, "measure", lambda self, tests: {})
    mutant = Mutant("toy", "f", "a -> b", "changed", "digest", path)
    runner = Runner([mutant], lambda file: kind, tmp_path, 1, lambda *result: recorded.append(result))
    session = types.SimpleNamespace(testsfailed=0, items=[], Failed=pytest.Session.Failed)
    with nullcontext() if works else pytest.raises(pytest.Session.Failed, match="toy as it is, .*: does not compile"):
        runner.pytest_runtestloop(session)
    assert recorded == ([(mutant, "survived")] if works else [])


def test_every_kernel_file_has_its_tests():
    kernels = {path.stem for path in TRITON_FILES if triton_mutants.jit_functions(ast.parse(path.read_text()))}
    cuda = {f"cuda/{path.stem}" for path in CUDA_FILES if cpp_mutants.mutants_of(path, "")}
    assert (kernels, cuda) == (mutants.TRITON_TESTS.keys(), mutants.CUDA_TESTS.keys())
    for files in mutants.TESTS.values():
        assert all((mutants.ROOT / "tests" / file).exists() for file in files)


@pytest.mark.parametrize("file", mutants.TESTS)
def test_mutants_have_names_of_their_own(file):
    found = mutants.all_mutants([file])
    assert found and len({mutant.name for mutant in found}) == len(found)
    for mutant in found:
        assert mutant.source != mutant.path.read_text()


@pytest.mark.parametrize("file", mutants.TRITON_TESTS)
def test_mutants_are_python(file):
    for mutant in mutants.all_mutants([file]):
        function = mutant.source[mutant.source.index(f"def {mutant.function}(") :]
        ast.parse(re.split(r"\n(?=[^\s)])", function, maxsplit=1)[0])


@pytest.mark.parametrize("file", mutants.CUDA_TESTS)
def test_mutants_differ_in_one_device_function(file):
    for mutant in mutants.all_mutants([file]):
        before, after = Source(mutant.path.read_text()), Source(mutant.source)
        functions = list(zip(before.device_functions(), after.device_functions(), strict=True))
        assert all(a.name == b.name for a, b in functions)
        changed = [
            a.name for a, b in functions if before.piece(a.declaration, a.end) != after.piece(b.declaration, b.end)
        ]
        assert changed == [mutant.function]


def test_what_does_not_compile_does_not_count():
    made = [Mutant("f", "g", f"f.g: {i}", "", "d", Path("f.cu")) for i in range(22)]
    verdicts = {m.name: "caught: t" for m in made[:19]} | {m.name: NO_MUTANT for m in made[20:]}
    results = {"f": {"g": {"digest": "d", "mutants": {**verdicts, made[19].name: "survived"}}}}
    assert mutants.complaints(made, results, {made[19].name: "why"}) == []
    results["f"]["g"]["mutants"][made[0].name] = NO_MUTANT
    assert mutants.complaints(made, results, {made[19].name: "why"}) == ["18 of 19 mutants are caught, needs 95%"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_committed_results(kind):
    """Of functions that have not changed since; the whole is `python tests/mutants.py --check`."""
    results = mutants.load(mutants.RESULTS)
    known = [m for m in mutants.all_mutants(sorted(kind.tests)) if mutants.verdict_of(m, results)]
    names = {mutant.name for mutant in known}
    reasons = {name: why for name, why in mutants.load(mutants.SURVIVORS).items() if name in names}
    assert mutants.complaints(known, results, reasons) == []


def test_results_name_tests_that_exist():
    verdicts = [
        verdict
        for functions in mutants.load(mutants.RESULTS).values()
        for function in functions.values()
        for verdict in function["mutants"].values()
    ]
    named = {verdict.removeprefix("caught: ").partition("[")[0] for verdict in verdicts if "::" in verdict}
    assert named
    for test in sorted(named):
        file, *_, function = test.split("::")
        assert f"def {function}(" in Path(__file__).with_name(file).read_text(), f"{file} has no {function}"
