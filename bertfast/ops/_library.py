"""Private registered ops: `bertfast::<op>_{fwd,bwd}_<backend>`, schemas here in Python, kernels from anywhere.

`bertfast._C` only implements names that are defined here, so a missing extension removes no name and a traced graph
means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bertfast import _extension

LIBRARY = torch.library.Library("bertfast", "DEF")


def define(name: str, signature: str, fake: Callable, backends: tuple[str, ...]) -> dict[str, Callable]:
    """Defines `bertfast::<name>_<backend>` for each backend with one signature and fake; returns the overloads."""
    overloads = {}
    for backend in backends:
        op = f"{name}_{backend}"
        LIBRARY.define(f"{op}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"bertfast::{op}", fake, lib=LIBRARY)
        overloads[backend] = getattr(torch.ops.bertfast, op).default
    return overloads


def extension_unavailable() -> str | None:
    """Why kernels of `bertfast._C` cannot run, or None."""
    status = _extension.STATUS
    return None if status.state == "loaded" else status.reason
