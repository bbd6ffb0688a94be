"""Loads the native extension `bertfast._C` and says how that went.

The build writes `_C.json` beside the library. Its size is compared before loading, because a truncated library kills
the process inside dlopen; so is what the library was built for. Whatever is wrong, importing bertfast succeeds.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
import sysconfig
import warnings
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal

import torch

from bertfast.errors import warn_caller

MIN_TORCH = (2, 11)
REINSTALL = "reinstall with --no-build-isolation in an environment that has torch and a C++ compiler"

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class ExtensionStatus:
    """What became of `bertfast._C`.

    Attributes:
        state: "loaded", "not_built" (a pure-Python installation) or "broken" (built, but it cannot be used here).
        reason: What happened, for people; of a loaded extension, which kernels its build left out and why.
        info: The build's record `_C.json` and, once loaded, `build_info()`.
    """

    state: Literal["loaded", "not_built", "broken"]
    reason: str = ""
    info: dict[str, Any] = field(default_factory=dict)


class _Broken(Exception):
    """The extension was built and cannot be used."""


def _running() -> str:
    return f"running: Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"


def _built_for(record: dict[str, Any]) -> str:
    if "torch" not in record:
        return "built for: unknown"
    cuda = f" with CUDA {record['cuda']}" if record.get("cuda") else ""
    return f"built for: Python {record.get('python')}, torch {record['torch']}{cuda}, {record.get('machine')}"


def _pure_python(why: str) -> str:
    return f"pure Python; {REINSTALL} ({why})"


def _read_record(folder: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((folder / "_C.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _Broken(f"{folder / '_C.json'} cannot be read ({error})") from error
    if not isinstance(record, dict):
        raise _Broken(f"{folder / '_C.json'} is no build record")
    return record


def _check(library: Path, record: dict[str, Any]) -> None:
    if not library.is_file():
        raise _Broken(f"{library} is missing")
    size = library.stat().st_size
    if size != record.get("size"):
        raise _Broken(f"{library} has {size} bytes and not the {record.get('size')} that were built")
    if not any(library.name == f"_C{suffix}" for suffix in EXTENSION_SUFFIXES):
        raise _Broken(f"{library} is not for this Python ({sysconfig.get_config_var('SOABI')})")
    if record.get("machine") != platform.machine():
        raise _Broken(f"{library} is for another machine")
    if tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) < MIN_TORCH:
        raise _Broken(f"{library} needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer")


def _import(library: Path) -> dict[str, Any]:
    spec = spec_from_file_location("bertfast._C", library, loader=ExtensionFileLoader("bertfast._C", str(library)))
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        info = module.build_info()
    except Exception as error:
        raise _Broken(f"{library} does not load ({type(error).__name__}: {error})") from error
    sys.modules["bertfast._C"] = module
    return info


def load(folder: Path = _FOLDER) -> ExtensionStatus:
    """Loads the extension in `folder`; warns once (RuntimeWarning) when it is there and broken; never raises."""
    record: dict[str, Any] = {}
    try:
        found = _read_record(folder)
        if found is None:
            stray = sorted(folder.glob("_C.*"))
            if stray:
                raise _Broken(f"{stray[0]} has no build record {folder / '_C.json'} beside it")
            return ExtensionStatus("not_built", _pure_python(f"nothing was built in {folder}"))
        record = found
        if not record.get("built"):
            return ExtensionStatus("not_built", _pure_python(record.get("reason") or "nothing was built"), record)
        library = folder / str(record.get("file"))
        _check(library, record)
        return ExtensionStatus("loaded", record.get("reason", ""), {**record, "build_info": _import(library)})
    except _Broken as error:
        reason = f"{error}; {_built_for(record)}; {_running()}; {REINSTALL}"
        warnings.warn(f"bertfast runs without its native extension: {reason}", RuntimeWarning, stacklevel=3)
        return ExtensionStatus("broken", reason, record)


STATUS = load()


def verify_hash() -> bool:
    """Whether the loaded library's content is what the build recorded (sha256)."""
    if STATUS.state != "loaded":
        return False
    content = (_FOLDER / STATUS.info["file"]).read_bytes()
    return hashlib.sha256(content).hexdigest() == STATUS.info.get("sha256")


_warned = False


def warn_pure_python() -> None:
    """Says once per process that the first use on the CPU is served without the native kernels."""
    global _warned
    if _warned or STATUS.state != "not_built":
        return
    _warned = True
    warn_caller(f"bertfast runs in {STATUS.reason}", RuntimeWarning)
