"""Private registered ops: `bertfast::<op>_{fwd,bwd}_<backend>`, schemas here in Python, kernels from anywhere.

`bertfast._C` and `bertfast.kernels` only implement names that are defined here, so a missing extension or Triton
removes no name and a traced graph means the same everywhere.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Callable

import torch

from bertfast import _extension

LIBRARY = torch.library.Library("bertfast", "DEF")

MIN_TRITON = (3, 6)
# Read once, as Triton does when its functions are defined: interpreted kernels run on CPU tensors.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
TRITON_DEVICES = frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"})


def define(
    name: str, signature: str, fake: Callable, backends: tuple[str, ...], launcher: str | None = None
) -> dict[str, Callable]:
    """Defines `bertfast::<name>_<backend>` for each backend with one signature and fake; returns the overloads.

    `launcher` is the module of `bertfast.kernels` whose function `name` implements the op on `triton`, imported with
    the first call.
    """
    overloads = {}
    for backend in backends:
        op = f"{name}_{backend}"
        LIBRARY.define(f"{op}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"bertfast::{op}", fake, lib=LIBRARY)
        if backend == "triton":
            for device in TRITON_DEVICES:
                LIBRARY.impl(op, _lazily(f"bertfast.kernels.{launcher}", name), device.upper())
        overloads[backend] = getattr(torch.ops.bertfast, op).default
    return overloads


def _lazily(module: str, name: str) -> Callable:
    function = None

    def run(*args):
        nonlocal function
        if function is None:
            function = getattr(importlib.import_module(module), name)
        return function(*args)

    return run


def extension_unavailable() -> str | None:
    """Why kernels of `bertfast._C` cannot run, or None."""
    status = _extension.STATUS
    return None if status.state == "loaded" else status.reason


def cuda_unavailable() -> str | None:
    """Why CUDA kernels of `bertfast._C` cannot run, or None. Does not ask for a GPU: a call knows its device."""
    status = _extension.STATUS
    if status.state != "loaded" or status.info.get("archs"):
        return extension_unavailable()
    return status.reason or "the extension was built without CUDA kernels"


def _triton_reason() -> str | None:
    if torch.version.hip is not None:
        return "the Triton kernels are written for NVIDIA GPUs, this torch is built for ROCm"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "Triton is not installed (pip install 'bertfast[triton]')"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_TRITON:
        return "Triton {} is installed, needs {}.{}".format(version, *MIN_TRITON)
    return None


# Looked up here, once: Dynamo would trace the look-up through a cached function.
_TRITON_REASON = _triton_reason()


def triton_unavailable() -> str | None:
    """Why kernels of `bertfast.kernels` cannot run, or None. Does not import Triton."""
    return _TRITON_REASON
