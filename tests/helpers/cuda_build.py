"""CUDA kernels' own sources and the emulator of tests/cuda_on_cpu, compiled by a C++ compiler."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import torch

from helpers.cpp_source import included
from helpers.project import ROOT, load_setup

KERNELS = ROOT / "csrc" / "cuda"
EMULATOR = ROOT / "tests" / "cuda_on_cpu"
BUILT = ROOT / "build" / "cuda_on_cpu"
KEPT_SECONDS = 3 * 24 * 3600

# In the order in which `#include "..."` looks for them, behind the folder of the file that includes.
INCLUDED = (ROOT / "csrc", KERNELS, EMULATOR)

FLAGS = ("-fPIC", "-fvisibility=hidden", "-DBERTFAST_CUDA_ON_CPU", "-ffp-contract=off", f"-ffile-prefix-map={ROOT}/=")
# As nvcc has it: integers wrap around, memory has no type. Seconds of -O1 are half of those of -O2.
KERNEL_FLAGS = ("-x", "c++", "-std=c++17", "-O1", "-fwrapv", "-fno-strict-aliasing")
HOST_FLAGS = ("-std=c++20", "-O1")
EMULATOR_FLAGS = ("-std=c++17", "-O3")


class CannotBuild(RuntimeError):
    """This machine lacks something that the emulation needs, or a source does not compile."""


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(command[0]) is None:
        raise CannotBuild(f"CUDA kernels on the CPU need a C++ compiler, there is no {command[0]} (CXX names another)")
    return command


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


@functools.cache
def _accepts(*flags: str) -> bool:
    return _run([*_compiler(), *flags, "-x", "c++", "-fsyntax-only", "/dev/null"]).returncode == 0


@functools.cache
def has_boost() -> bool:
    """Whether Boost.Context can be compiled and linked."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <boost/context/detail/fcontext.hpp>\nint main() {}\n")
        command = [*_compiler(), str(source), "-lboost_context", "-o", str(Path(folder, "probe"))]
        return _run(command).returncode == 0


@functools.cache
def _headers() -> list[Path]:
    """Folders of CUDA's headers: Triton's wheel has most, that of nvidia-cuda-cccl has <nv/target>."""
    folders = []
    triton = find_spec("triton")
    if triton:
        folders += [Path(place, "backends", "nvidia", "include") for place in triton.submodule_search_locations]
    nvidia = find_spec("nvidia")
    for place in nvidia.submodule_search_locations if nvidia else ():
        folders += sorted(Path(place).glob("*/include"))
    found = []
    for header, package in (("cuda_fp16.h", "triton"), ("nv/target", "nvidia-cuda-cccl")):
        folder = next((folder for folder in folders if (folder / header).is_file()), None)
        if folder is None:
            raise CannotBuild(f"CUDA kernels on the CPU need <{header}>: pip install {package}")
        found.append(folder)
    return list(dict.fromkeys(found))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _surroundings() -> str:
    """What objects depend on besides this project's files."""
    compiler = _run([*_compiler(), "--version"]).stdout
    packages = {name: _version(name) for name in ("torch", "triton", "nvidia-cuda-cccl")}
    return f"{_compiler()} {compiler} {packages} {_headers()}"


def _flags(source: Path, extra: Sequence[str]) -> list[str]:
    flags = [*FLAGS, *extra]
    if not has_boost():
        flags.append("-DBERTFAST_UCONTEXT")
    system = _headers()
    if source.parent == EMULATOR:
        flags += EMULATOR_FLAGS
    elif source.suffix == ".cpp":
        flags += [*HOST_FLAGS, load_setup().TARGET_VERSION]
        system = [Path(torch.__file__).parent / "include", *system]
    else:
        flags += KERNEL_FLAGS
        # Indices into arrays of a thread are checked; tests/cuda_on_cpu/bounds.cpp says what is wrong. To gcc's plain
        # `bounds` the last array of a struct has any length.
        bounds = "bounds-strict" if _accepts("-fsanitize=bounds-strict") else "bounds"
        flags += [f"-fsanitize={bounds}", f"-fno-sanitize-recover={bounds}"]
        # Locals that nothing was written to.
        if _accepts("-ftrivial-auto-var-init=pattern"):
            flags.append("-ftrivial-auto-var-init=pattern")
    return flags + [flag for folder in system for flag in ("-isystem", str(folder))]


def _digest(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else str(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:24]


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Processes that want the same file wait for the first, which makes it."""
    folder = BUILT / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(target: Path, command: Callable[[Path], list[str]]) -> Path:
    """`target`, made by `command` if it is not there; it is there only when it is complete."""
    if not target.exists():
        with _locked(target.name):
            if not target.exists():
                part = target.with_suffix(f".{os.getpid()}.part")
                done = _run(command(part))
                if done.returncode != 0:
                    part.unlink(missing_ok=True)
                    raise CannotBuild(f"{shlex.join(done.args)}\n{done.stderr}")
                part.replace(target)
    with suppress(FileNotFoundError):
        os.utime(target)
    return target


def _object(source: Path, folders: Sequence[Path], extra: Sequence[str]) -> Path:
    flags = _flags(source, extra)
    # Without their folders: what is equal in csrc/cuda and in a copy of it is built once, also where it is found in
    # both.
    contents = sorted({(path.name, path.read_bytes()) for path in included(source, folders)})
    key = _digest(_surroundings(), flags, *contents)
    includes = [flag for folder in folders for flag in ("-I", str(folder))]

    def command(part: Path) -> list[str]:
        return [*_compiler(), *flags, *includes, "-c", str(source), "-o", str(part)]

    return _make(BUILT / f"{source.stem}-{key}.o", command)


def _forget_old() -> None:
    for path in [*BUILT.iterdir(), *(BUILT / "locks").iterdir()]:
        with suppress(OSError):  # another process forgets as well
            if time.time() - path.stat().st_mtime < KEPT_SECONDS or path.name == "locks":
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def build(
    sources: Iterable[Path],
    name: str,
    flags: Sequence[str] = (),
    *,
    folders: Sequence[Path] = INCLUDED,
    linked: Sequence[str] = (),
) -> Path:
    """The shared library of `sources` and the emulator, from build/cuda_on_cpu where it was built before.

    Raises:
        CannotBuild: without a compiler or headers, or where a source does not compile.
    """
    _compiler()
    BUILT.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        every = [*sources, *sorted(EMULATOR.glob("*.cpp"))]
        objects = list(pool.map(lambda source: _object(source, folders, flags), every))
    boost = ["-lboost_context"] if has_boost() else []

    def command(part: Path) -> list[str]:
        return [*_compiler(), "-shared", *map(str, objects), *linked, *boost, "-o", str(part)]

    library = _make(BUILT / f"{name}-{_digest(objects, linked, boost)}.so", command)
    _forget_old()
    return library


def _overlaid(replaced: Mapping[str, Path]) -> Path:
    """A folder that is csrc/cuda but for the files that are replaced."""
    files = {path.name: path for path in sorted(KERNELS.iterdir())}
    unknown = set(replaced) - set(files)
    if unknown:
        raise ValueError(f"csrc/cuda has no {', '.join(sorted(unknown))}")
    files |= replaced
    folder = BUILT / f"sources-{_digest(*((name, path.read_bytes()) for name, path in files.items()))}"
    if not folder.is_dir():
        BUILT.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=BUILT))
        for name, path in files.items():
            shutil.copy(path, part / name)
        try:
            part.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(part)
    return folder


def with_torch() -> tuple[str, ...]:
    """What libraries that register ops are linked with."""
    folder = Path(torch.__file__).parent / "lib"
    return f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltorch", "-ltorch_cpu", "-lc10"


def build_package(replaced: Mapping[str, Path] | None = None, unchanged: Callable[[Path], bool] | None = None) -> Path:
    """The library of csrc/cuda; `replaced` has files to take instead of some of its own, by name. Kernels' sources that
    are `unchanged` are built without them, and come last where others define the same inline function."""
    kernels = _overlaid(replaced) if replaced else KERNELS
    units = sorted(kernels.glob("*.cu"))
    if unchanged is not None:
        units = [source for source in units if not unchanged(source)]
        units += sorted(source for source in KERNELS.glob("*.cu") if unchanged(source))
    sources = [*sorted(kernels.glob("*.cpp")), *units]
    return build(sources, "bertfast", folders=(ROOT / "csrc", kernels, EMULATOR), linked=with_torch())
