"""What wheels and the source distribution hold, and what the build does where something is missing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from build import ProjectBuilder

import bertfast
from helpers.project import ROOT, block, copy_tree, load_setup, run_python


@pytest.fixture(scope="module")
def setup_py():
    return load_setup()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return copy_tree(tmp_path_factory.mktemp("clone") / "bertfast")


def pip_wheel(tree: Path, out: Path, path: tuple[Path, ...] = (), **environment: str) -> subprocess.CompletedProcess:
    return run_python(
        *("-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", str(out), str(tree)),
        cwd=out,
        path=path,
        check=False,
        **environment,
    )


def build_wheel(tree: Path, out: Path, path: tuple[Path, ...] = (), **environment: str) -> Path:
    done = pip_wheel(tree, out, path, **environment)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def record_in(wheel: Path) -> dict:
    with zipfile.ZipFile(wheel) as archive:
        return json.loads(archive.read("bertfast/_C.json"))


def modules_in(tree: Path) -> set[str]:
    """The installed path of every module in the tree: a package that pyproject.toml forgets shows here."""
    places = {"bertfast": "bertfast", "kernels": "bertfast/kernels", "benchmarks": "bertfast/benchmarks"}
    return {
        f"{installed}/{path.relative_to(tree / folder).as_posix()}"
        for folder, installed in places.items()
        for path in (tree / folder).rglob("*.py")
    }


def check_pure_wheel(wheel: Path, tree: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(n).decode() for n in names if n.endswith(".dist-info/METADATA"))
        (scripts,) = (archive.read(n).decode() for n in names if n.endswith(".dist-info/entry_points.txt"))
    assert {name.split("/")[0] for name in names} == {"bertfast", f"bertfast-{bertfast.__version__}.dist-info"}
    data = {f"bertfast/benchmarks/data/{path.name}" for path in (tree / "benchmarks" / "data").glob("*.txt")}
    package = {name for name in names if name.startswith("bertfast/")}
    assert package == modules_in(tree) | data | {"bertfast/py.typed", "bertfast/_C.json"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    assert "bertfast = bertfast.cli:main" in scripts


def test_pure_wheel(tree, tmp_path):
    wheel = build_wheel(tree, tmp_path, BERTFAST_BUILD="none")
    check_pure_wheel(wheel, tree)
    record = record_in(wheel)
    assert record["built"] is False and record["reason"] == "BERTFAST_BUILD=none was set"


def test_a_build_without_torch_is_pure_python_and_says_why(tree, tmp_path):
    wheel = build_wheel(tree, tmp_path, (block(tmp_path / "blocked", "torch"),))
    check_pure_wheel(wheel, tree)
    assert record_in(wheel)["reason"].startswith("native kernels skipped: the build environment has no torch (")


def test_build_requirements_do_not_bring_torch():
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in ProjectBuilder(ROOT).build_system_requires}
    assert names == {"setuptools"}


def test_source_distribution_builds_again(tree, tmp_path):
    blocked = (block(tmp_path / "blocked", "torch"),)
    arguments = ("-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(tree))
    run_python(*arguments, cwd=tmp_path, path=blocked)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "Makefile", "constraints.txt", "csrc/bindings.cpp", "csrc/check.h", "csrc/cpu/philox.h"}
    assert wanted | {"kernels/__init__.py", "tests/test_packaging.py", "benchmarks/__init__.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc", "_C.json"))]
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    (tmp_path / "out").mkdir()
    check_pure_wheel(build_wheel(unpacked, tmp_path / "out", blocked), tree)


@pytest.mark.slow
def test_native_wheel(setup_py, tree, tmp_path):
    try:
        setup_py.check_cpu()
    except setup_py.CannotBuild as error:
        pytest.skip(f"this machine cannot build the extension: {error}")
    wheel = build_wheel(tree, tmp_path, BERTFAST_BUILD="cpu")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{python}-{python}-linux_" in wheel.name
    record = record_in(wheel)
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f"bertfast/{record['file']}")
        assert len([name for name in archive.namelist() if name.endswith(".so")]) == 1
    assert record["built"] and record["reason"] == ""
    assert record["size"] == len(content)
    assert record["sha256"] == hashlib.sha256(content).hexdigest()
    assert record["torch"] == str(torch.__version__)
    assert str(tree).encode() not in content, "the build machine's paths are in the library"

    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "from bertfast import _extension as e; print(e.STATUS.state, e.verify_hash(), e.__file__)"
    done = run_python("-c", code, cwd=tmp_path, path=(tmp_path / "site",))
    assert done.stdout.split() == ["loaded", "True", str(tmp_path / "site" / "bertfast" / "_extension.py")]


def broken_compiler(folder: Path) -> str:
    """A compiler that answers who it is and fails to compile."""
    compiler = folder / "c++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-c*) exit 1;; esac\nexec g++ "$@"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return str(compiler)


def test_a_build_that_fails_to_compile_falls_back_to_pure_python(tree, tmp_path):
    wheel = build_wheel(tree, tmp_path, CXX=broken_compiler(tmp_path))
    check_pure_wheel(wheel, tree)
    assert "the build of the cpu kernels failed" in record_in(wheel)["reason"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"BERTFAST_BUILD": "gpu"}, "BERTFAST_BUILD=gpu is unknown; expected one of auto, cpu, cuda, none"),
        ({"BERTFAST_BUILD": "cpu", "CXX": "no-such-compiler"}, "there is no C++ compiler (no-such-compiler)"),
        ({"BERTFAST_BUILD": "cuda", "CXX": "no-such-compiler"}, "BERTFAST_BUILD=cuda: there is no C++ compiler"),
    ],
)
def test_a_forced_build_fails_with_the_reason(environment, message, tree, tmp_path):
    done = pip_wheel(tree, tmp_path, **environment)
    assert done.returncode != 0
    assert message in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_a_forced_build_without_torch_fails(tree, tmp_path):
    done = pip_wheel(tree, tmp_path, (block(tmp_path / "blocked", "torch"),), BERTFAST_BUILD="cpu")
    assert done.returncode != 0
    assert "BERTFAST_BUILD=cpu: the build environment has no torch" in done.stderr


@pytest.mark.slow
def test_a_forced_build_that_does_not_compile_fails(tree, tmp_path):
    done = pip_wheel(tree, tmp_path, BERTFAST_BUILD="cpu", CXX=broken_compiler(tmp_path))
    assert done.returncode != 0
    assert not list(tmp_path.glob("*.whl"))


def test_cuda_is_left_out_with_the_reason(setup_py, monkeypatch, tmp_path):
    from torch.utils import cpp_extension

    def reason():
        with pytest.raises(setup_py.CannotBuild) as caught:
            setup_py.check_cuda()
        return str(caught.value)

    monkeypatch.setattr(setup_py, "sources", lambda pattern: [])
    assert reason() == "csrc/cuda has no CUDA sources"
    monkeypatch.setattr(setup_py, "sources", lambda pattern: ["csrc/cuda/op.cu"])
    monkeypatch.setattr(torch.version, "cuda", None)
    assert reason() == f"torch {torch.__version__} is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for home in (None, str(tmp_path)):
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", home)
        assert reason() == f"there is no nvcc (CUDA_HOME is {home})"


@pytest.mark.parametrize(
    ("listed", "detected", "archs"),
    [
        (None, [], "8.0;8.6;8.9;9.0a;10.0;12.0+PTX"),
        ("native", [], "8.0;8.6;8.9;9.0a;10.0;12.0+PTX"),
        (None, [(9, 0), (8, 0), (9, 0)], "8.0;9.0a"),
        ("8.0", [(9, 0)], "8.0"),
        ("8.6 9.0+PTX", [], "8.6 9.0a+PTX"),
        ("9.0a;9.0", [], "9.0a;9.0a"),
        ("Ampere;Hopper", [], "Ampere;9.0a"),
    ],
)
def test_cuda_architectures(listed, detected, archs, setup_py):
    assert setup_py.cuda_archs(listed, detected) == archs


@pytest.fixture
def cuda_extension(setup_py, monkeypatch):
    """What the build would hand to nvcc for two visible GPUs, none of which is needed."""
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: [(8, 0), (9, 0)][device])
    monkeypatch.setattr(cpp_extension, "CUDAExtension", lambda name, sources, **options: options)
    return setup_py.make_extension("cuda")


@pytest.fixture
def path_with_nvcc(setup_py, monkeypatch, tmp_path):
    """Puts a script on PATH that passes calls on to the nvcc of a toolkit elsewhere, as far as --dryrun goes."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, "")
    script = tmp_path / "nvcc"
    script.write_text(f"#!/bin/sh\necho '#$ _SPACE_= ' >&2\necho '#$ TOP={tmp_path}/cuda/bin/..' >&2\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return script


def test_the_cuda_toolkit_is_the_one_that_nvcc_names(setup_py, path_with_nvcc):
    (path_with_nvcc.parent / "cuda" / "bin").mkdir(parents=True)
    setup_py.set_cuda_home()
    assert os.environ["CUDA_HOME"] == str(path_with_nvcc.parent / "cuda")


def test_the_cuda_toolkit_that_was_set_stays(setup_py, path_with_nvcc, monkeypatch):
    monkeypatch.setenv("CUDA_PATH", "/somewhere")
    setup_py.set_cuda_home()
    assert os.environ["CUDA_HOME"] == ""


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 1\n", None])
def test_the_cuda_toolkit_is_left_to_torch_where_nvcc_does_not_tell(setup_py, path_with_nvcc, script):
    path_with_nvcc.write_text(script) if script else path_with_nvcc.unlink()
    setup_py.set_cuda_home()
    assert os.environ["CUDA_HOME"] == ""


def test_files_of_one_stem_have_objects_of_their_own(setup_py, monkeypatch):
    from setuptools import Distribution
    from setuptools._distutils.ccompiler import new_compiler
    from torch.utils.cpp_extension import BuildExtension

    monkeypatch.setattr(
        BuildExtension, "build_extensions", lambda command: command.compiler.src_extensions.append(".cu")
    )
    command = setup_py.commands("cuda", ["cuda"], [])["build_ext"](Distribution())
    command.compiler = new_compiler()
    command.build_extensions()
    files = ["csrc/cpu/op.cpp", "csrc/cuda/op.cpp", "csrc/cuda/op.cu"]
    objects = command.compiler.object_filenames(files, output_dir="temp")
    assert objects == ["temp/csrc/cpu/op.o", "temp/csrc/cuda/op.o", "temp/csrc/cuda/op.cuda.o"]


def test_both_compilers_target_the_stable_abi(cuda_extension):
    for flags in cuda_extension["extra_compile_args"].values():
        assert "-DTORCH_TARGET_VERSION=0x020b000000000000" in flags
        assert "-DUSE_CUDA" in flags
        assert not [flag for flag in flags if flag.startswith(("-march", "--use_fast_math", "-ffast-math"))]
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0a"
    host = [flag for flag in cuda_extension["extra_compile_args"]["nvcc"] if flag.startswith("-Xcompiler=")]
    assert host == [f"-Xcompiler=-fvisibility=hidden,-Wall,-ffile-prefix-map={ROOT}/="]


def test_the_version_is_the_same_everywhere():
    from importlib.metadata import version

    assert bertfast.__version__ == version("bertfast")
