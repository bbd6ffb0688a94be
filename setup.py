"""Builds bertfast and, where it can, its native extension `bertfast._C`.

BERTFAST_BUILD chooses:
    auto (default)  the CUDA and C++ kernels, or what the machine allows of them; says what it skipped and why. A build
                    that fails to compile falls back to the next smaller one, in the end to pure Python
    cpu             the C++ kernels; failing is an error
    cuda            the CUDA and C++ kernels; failing is an error
    none            pure Python

TORCH_CUDA_ARCH_LIST, CUDA_HOME, CXX and MAX_JOBS are honoured. The extension needs the torch that is installed:
`pip install --no-build-isolation -e .`. `bertfast/_C.json` records what was built, or why nothing was.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
MODES = ("auto", "cpu", "cuda", "none")
MIN_TORCH = (2, 11)
TARGET_VERSION = f"-DTORCH_TARGET_VERSION=0x{MIN_TORCH[0]:02x}{MIN_TORCH[1]:02x}000000000000"
CUDA_ARCHS = "8.0;8.6;8.9;9.0a;10.0;12.0+PTX"
# The standard is said, because torch would say its own, another in every release, and kernels include nothing of torch.
NVCC_FLAGS = ["-O3", "-std=c++17", TARGET_VERSION, "-DUSE_CUDA"]


class CannotBuild(Exception):
    """The machine lacks something that a build needs."""


def say(message: str) -> None:
    print(f"bertfast: {message}", file=sys.stderr)


def sources(pattern: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").glob(pattern))


def cuda_archs(listed: str | None, detected: list[tuple[int, int]]) -> str:
    """TORCH_CUDA_ARCH_LIST to build for: the user's, else that of the visible GPUs, else all that are supported.

    9.0 becomes 9.0a, without which `wgmma` does not compile. torch fails on an empty list when no GPU is visible.
    """
    if listed == "native":
        listed = None
    archs = listed or ";".join(f"{major}.{minor}" for major, minor in sorted(set(detected))) or CUDA_ARCHS
    return re.sub(r"\b9\.0(?!\w)", "9.0a", archs.replace("Hopper", "9.0"))


def check_cpu() -> None:
    try:
        import torch
    except ImportError as error:
        raise CannotBuild(f"the build environment has no torch ({error})") from error
    running = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if running < MIN_TORCH:
        raise CannotBuild(f"torch {torch.__version__} is older than {MIN_TORCH[0]}.{MIN_TORCH[1]}")
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise CannotBuild(f"{sys.platform} on {platform.machine()} is not supported, only Linux on x86_64 and aarch64")
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        raise CannotBuild(f"there is no C++ compiler ({compiler})")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise CannotBuild("Python's headers (Python.h) are missing")


def toolkit_of(nvcc: str) -> str | None:
    """The CUDA toolkit that a compiler says it belongs to."""
    command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    found = re.search(r"^#\$ TOP=(.+)$", done.stderr, re.MULTILINE)
    return os.path.realpath(found[1].strip()) if found else None


def set_cuda_home() -> None:
    """Before torch does: it takes the folder above the nvcc on PATH, which is no toolkit where that is a script or a
    link in /usr/bin."""
    nvcc = shutil.which("nvcc")
    home = toolkit_of(nvcc) if nvcc and not (os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")) else None
    if home is not None:
        os.environ["CUDA_HOME"] = home


def check_cuda() -> None:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    if not sources("cuda/*.cu"):
        raise CannotBuild("csrc/cuda has no CUDA sources")
    if torch.version.cuda is None:
        raise CannotBuild(f"torch {torch.__version__} is built without CUDA")
    if CUDA_HOME is None or not Path(CUDA_HOME, "bin", "nvcc").exists():
        raise CannotBuild(f"there is no nvcc (CUDA_HOME is {CUDA_HOME})")


def make_extension(backend: str) -> Extension:
    from torch.utils import cpp_extension

    # Neither of the two -fno flags changes a result; they let the compiler vectorise selects and square roots. Under a
    # standard of C++ gcc does not fuse products with sums unless it is told to, which is half of a GEMM's speed.
    vectorise = ["-fopenmp-simd", "-fno-trapping-math", "-fno-math-errno", "-ffp-contract=fast"]
    # Error messages name source files, and not where they lay on the machine that built.
    host = ["-fvisibility=hidden", "-Wall", f"-ffile-prefix-map={ROOT}/="]
    cxx = ["-O3", *host, *vectorise, TARGET_VERSION]
    if backend == "cpu":
        return cpp_extension.CppExtension(
            "bertfast._C",
            ["csrc/bindings.cpp", *sources("cpu/*.cpp")],
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args={"cxx": cxx},
            extra_link_args=["-s"],
            depends=sources("**/*.h"),
        )
    import torch

    devices = range(torch.cuda.device_count())
    archs = cuda_archs(
        os.environ.get("TORCH_CUDA_ARCH_LIST"), [torch.cuda.get_device_capability(device) for device in devices]
    )
    os.environ["TORCH_CUDA_ARCH_LIST"] = archs
    return cpp_extension.CUDAExtension(
        "bertfast._C",
        ["csrc/bindings.cpp", *sources("cpu/*.cpp"), *sources("cuda/*.cpp"), *sources("cuda/*.cu")],
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args={
            "cxx": [*cxx, "-DUSE_CUDA"],
            "nvcc": [*NVCC_FLAGS, f"-Xcompiler={','.join(host)}", "--threads=2"],
        },
        extra_link_args=["-s"],
        depends=[*sources("**/*.h"), *sources("**/*.cuh")],
    )


def plan(mode: str) -> tuple[list[str], list[str]]:
    """The backends to try, largest first, and the reasons of those left out."""
    if mode not in MODES:
        raise SystemExit(f"BERTFAST_BUILD={mode} is unknown; expected one of {', '.join(MODES)}")
    if mode == "none":
        return [], ["BERTFAST_BUILD=none was set"]
    try:
        check_cpu()
    except CannotBuild as error:
        if mode != "auto":
            raise SystemExit(f"BERTFAST_BUILD={mode}: {error}") from error
        return [], [f"native kernels skipped: {error}"]
    if mode == "cpu":
        return ["cpu"], []
    set_cuda_home()
    try:
        check_cuda()
    except CannotBuild as error:
        if mode == "cuda":
            raise SystemExit(f"BERTFAST_BUILD={mode}: {error}") from error
        return ["cpu"], [f"CUDA kernels skipped: {error}"]
    return ["cuda", "cpu"] if mode == "auto" else ["cuda"], []


def write_record(folder: Path, library: Path | None, backend: str | None, reasons: list[str]) -> None:
    record = {"built": library is not None, "reason": "; ".join(reasons), "python": platform.python_version()}
    if library is not None:
        import torch

        content = library.read_bytes()
        record |= {
            "file": library.name,
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "machine": platform.machine(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda if backend == "cuda" else None,
            "archs": os.environ["TORCH_CUDA_ARCH_LIST"].split(";") if backend == "cuda" else [],
        }
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("_C.*"):
        if stale != library:
            stale.unlink()
    (folder / "_C.json").write_text(json.dumps(record, indent=1) + "\n")


def commands(mode: str, attempts: list[str], reasons: list[str]) -> dict[str, type[Command]]:
    class BuildPy(build_py):
        """Records why a pure-Python build has no extension."""

        def run(self):
            super().run()
            if not self.distribution.has_ext_modules():
                folder = ROOT / "bertfast" if self.editable_mode else Path(self.build_lib, "bertfast")
                write_record(folder, None, None, reasons)

    if not attempts:
        return {"build_py": BuildPy}

    from torch.utils.cpp_extension import BuildExtension

    class BuildExt(BuildExtension):
        """Tries each backend in turn and records what came of it."""

        def build_extensions(self):
            # An op's .cu and .cpp have one stem, and would have one object.
            names = self.compiler.object_filenames
            self.compiler.object_filenames = lambda sources, *args, **kwargs: [
                name for source in sources for name in names([re.sub(r"\.cu$", ".cuda.cu", source)], *args, **kwargs)
            ]
            super().build_extensions()

        def run(self):
            (extension,) = self.extensions
            library = Path(self.get_ext_fullpath(extension.name))
            for backend in attempts:
                vars(extension).update(vars(make_extension(backend)))
                try:
                    super().run()
                except Exception as error:
                    if mode != "auto":
                        raise
                    reasons.append(f"the build of the {backend} kernels failed ({error})")
                    say(reasons[-1])
                else:
                    write_record(library.parent, library, backend, reasons)
                    return
            # What is left is pure Python, which the wheel's tag has to say.
            self.distribution.ext_modules = []
            self.distribution.get_command_obj("bdist_wheel").root_is_pure = True
            write_record(library.parent, None, None, reasons)

    return {"build_py": BuildPy, "build_ext": BuildExt}


def main() -> None:
    mode = os.environ.get("BERTFAST_BUILD", "").strip().lower() or "auto"
    attempts, reasons = plan(mode)
    for reason in reasons:
        say(reason)
    if not attempts and mode == "auto":
        say("building pure Python; for the native kernels install with --no-build-isolation where torch is")
    setup(
        ext_modules=[make_extension(attempts[0])] if attempts else [],
        cmdclass=commands(mode, attempts, reasons),
    )


if __name__ == "__main__":
    main()
