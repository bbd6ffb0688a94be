"""Looks at a build of the whole package with its CUDA kernels, where no GPU has to be.

    python tests/cuda_build_check.py     with the Python of an environment in which that build is installed

`make test-cuda-build` makes both and runs this. It checks that the package imports and loads its extension; that the
extension holds machine code for every architecture; that `bertfast info` says so; that every private op of `cuda` has
its kernel and its fake and every op its capability, with the right reasons; and that the extension of the working tree,
built with another torch, loads with this one and computes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import bertfast
from bertfast import _extension, backends, ops
from helpers.project import ROOT, copy_installation, load_setup, run_python

GPU = torch.cuda.is_available()
NO_GPU = "built, no GPU here"
TOO_OLD, ON_CPU = "compute capability is 7.5, needs 8.0", "device is cpu, takes cuda"
SETUP = load_setup()


def check(holds: object, what: str) -> None:
    if not holds:
        raise SystemExit(f"error: {what}")


def archs() -> list[str]:
    return SETUP.cuda_archs(os.environ.get("TORCH_CUDA_ARCH_LIST"), []).split(";")


def library() -> Path:
    return Path(bertfast.__file__).with_name(_extension.STATUS.info["file"])


def extension() -> str:
    package, status = Path(bertfast.__file__), _extension.STATUS
    check(package.is_relative_to(sys.prefix), f"bertfast is {package}, not an installation in {sys.prefix}")
    check(status.state == "loaded", f"the extension is {status.state}: {status.reason}")
    check(not status.reason, f"the build left something out: {status.reason}")
    check(_extension.verify_hash(), "the extension is not what its record says")
    check(status.info["archs"] == archs(), f"built for {status.info['archs']}, expected {archs()}")
    check(status.info["build_info"]["backends"] == ("cpu", "cuda"), f"build_info() says {status.info['build_info']}")
    check(b"cuda-tree/csrc" not in library().read_bytes(), "paths of the tree that was built are in the library")
    return f"torch {torch.__version__}, {library().stat().st_size / 2**20:.1f} MiB"


def machine_code() -> str:
    folder = Path(importlib.util.find_spec("triton").submodule_search_locations[0], "backends", "nvidia", "bin")
    found = {}
    for kind in ("elf", "ptx"):
        done = subprocess.run(
            [folder / "cuobjdump", f"-l{kind}", library()], capture_output=True, text=True, check=True
        )
        found[kind] = re.findall(rf"\.sm_(\w+)\.{'cubin' if kind == 'elf' else 'ptx'}\b", done.stdout)
    wanted = {arch.partition("+")[0].replace(".", "") for arch in archs()}
    ptx = {arch.partition("+")[0].replace(".", "") for arch in archs() if arch.endswith("+PTX")}
    sources = len(SETUP.sources("cuda/*.cu"))
    check(set(found["elf"]) == wanted, f"machine code for {sorted(set(found['elf']))}, expected {sorted(wanted)}")
    check(set(found["ptx"]) == ptx, f"PTX for {sorted(set(found['ptx']))}, expected {sorted(ptx)}")
    for arch in wanted:
        check(
            found["elf"].count(arch) == sources, f"{found['elf'].count(arch)} of {sources} files are in for sm_{arch}"
        )
    return f"{sources} files for each of {', '.join(sorted(wanted, key=lambda arch: int(arch.rstrip('a'))))}"


def info() -> str:
    with tempfile.TemporaryDirectory() as folder:
        told = json.loads(run_python("-m", "bertfast", "info", "--json", cwd=Path(folder)).stdout)
        shown = run_python("-m", "bertfast", "info", cwd=Path(folder)).stdout
    states = {row["op"]: row["unavailable"] for row in told["backends"] if row["backend"] == "cuda"}
    check(states, "no op has the backend cuda")
    for op, state in states.items():
        check(state == (None if GPU else NO_GPU), f"info says of {op} on cuda: {state}")
        check(GPU or re.search(rf"^{op} +cuda +{NO_GPU} *$", shown, re.MULTILINE), f"info does not show {op} on cuda")
    check("cuda" not in told["advice"], f"info advises to build what is built: {told['advice'].get('cuda')}")
    return f"{len(states)} ops"


def private_ops() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name for name in names if re.fullmatch(r"bertfast::\w+_cuda", name))


def kernels() -> str:
    has, names = torch._C._dispatch_has_kernel_for_dispatch_key, private_ops()
    dangling = [line for line in torch._C._dispatch_find_dangling_impls() if "bertfast::" in line]
    check(not dangling, "kernels of ops that are not defined:\n" + "\n".join(dangling))
    check(names, "no private op of cuda is defined")
    check([name for name in names if name.partition("::")[2].endswith("fwd_cuda")], f"no forward among {names}")
    for name in names:
        check(has(name, "CUDA"), f"{name} has no kernel")
        check(has(name, "Meta"), f"{name} has no fake")
    return f"{len(names)} private ops"


def capabilities() -> str:
    known = {candidate.op: candidate for candidate in backends.candidates() if candidate.backend == "cuda"}
    for op in backends.OPS:
        private = [name for name in private_ops() if name.startswith(f"bertfast::{op}_")]
        check(op in known or not private, f"{op} has {', '.join(private)}, and no capability on cuda")
    for op, capability in known.items():

        def reasons(device: str, compute: tuple[int, int] | None, capability=capability, op=op) -> list[str]:
            call = backends.Call(op, device, compute, (torch.bfloat16,), grad=capability.backward)
            return capability.not_supported_reasons(call)

        check(reasons("cuda", (8, 0)) == [], f"{op} on an sm_80: {reasons('cuda', (8, 0))}")
        check(reasons("cuda", (9, 0)) == [], f"{op} on an sm_90: {reasons('cuda', (9, 0))}")
        check(reasons("cuda", (7, 5)) == [TOO_OLD], f"{op} on an sm_75: {reasons('cuda', (7, 5))}")
        check(reasons("cpu", None) == [ON_CPU], f"{op} on the CPU: {reasons('cpu', None)}")
    try:
        ones = torch.ones(8)
        ops.add_layer_norm(ones, ones, ones, ones, backend="cuda")
    except bertfast.BackendError as error:
        check(f"  cuda: {ON_CPU}" in str(error), f"the refusal says\n{error}")
    else:
        check(False, "add_layer_norm on cuda took tensors of the CPU")
    return f"{len(known)} ops"


OTHER_BINARY = """
import json, torch
from bertfast import _extension, ops
torch.manual_seed(0)
x, residual, weight, bias = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48), torch.randn(48)
out = ops.add_layer_norm(x, residual, weight, bias, 1e-12, backend="cpu")
expected = torch.nn.functional.layer_norm((x + residual).double(), (48,), weight.double(), bias.double(), 1e-12)
torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
status = _extension.STATUS
print(json.dumps({"state": status.state, "built": status.info["torch"], "file": _extension.__file__}))
"""


def other_torch() -> str:
    with tempfile.TemporaryDirectory() as folder:
        copy_installation(Path(folder), native=True)
        told = json.loads(run_python("-c", OTHER_BINARY, cwd=Path(folder), path=(Path(folder),)).stdout)
        check(told["file"].startswith(folder), f"{told['file']} was imported, not the copy")
    check(told["state"] == "loaded", f"the extension of {ROOT.name} is {told['state']}")
    minors = {version.rpartition(".")[0] for version in (told["built"], torch.__version__)}
    check(len(minors) == 2, f"the extension of {ROOT.name} was built with this very torch, {told['built']}")
    return f"built with torch {told['built']}, loaded with {torch.__version__}"


CHECKS: tuple[Callable[[], str], ...] = (extension, machine_code, info, kernels, capabilities, other_torch)


def main() -> None:
    for function in CHECKS:
        print(f"{function.__name__.replace('_', ' ')}: {function()}", flush=True)


if __name__ == "__main__":
    main()
