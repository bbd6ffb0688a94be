"""The project as files: copies of its tree and of an installation, and Python subprocesses that use them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
MADE = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".benchmarks", "*.so", "_C.json"
)


def load_setup() -> ModuleType:
    """setup.py as a module: what it would do and with what, without doing it."""
    spec = importlib.util.spec_from_file_location("bertfast_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_tree(target: Path) -> Path:
    """What a fresh clone has: the tree without anything that was built."""
    return Path(shutil.copytree(ROOT, target, ignore=MADE))


def copy_installation(site: Path, *, native: bool = False) -> Path:
    """`site` as a pure-Python wheel would fill it (with `native`, and this tree's own extension); returns bertfast."""
    package = Path(shutil.copytree(ROOT / "bertfast", site / "bertfast", ignore=MADE))
    for name in ("kernels", "benchmarks"):
        shutil.copytree(ROOT / name, package / name, ignore=MADE)
    if native:
        for built in (ROOT / "bertfast").glob("_C.*"):
            shutil.copy(built, package)
    return package


def block(folder: Path, *modules: str) -> Path:
    """A folder for PYTHONPATH in which importing any of `modules` fails as if it were not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    for module in modules:
        (folder / f"{module}.py").write_text(f"raise ModuleNotFoundError({f'No module named {module}'!r})\n")
    return folder


# Of the environment, what would reach into a subprocess; pytest-benchmark asks pytest-xdist's whether it is a worker.
DROPPED = ("BERTFAST_", "PYTHON", "PYTEST_", "TRITON_")


def run_python(
    *arguments: str, cwd: Path, path: tuple[Path, ...] = (), check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """This Python in a subprocess with `path` before its packages; with `check`, failing fails the test."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, path)), **environment}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert not check or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
