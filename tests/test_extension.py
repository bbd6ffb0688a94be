"""Loading bertfast._C: whatever is wrong with the file, the import succeeds and says what happened, once."""

import json
import platform
import shutil
import sysconfig
import warnings

import pytest
import torch

from bertfast import _extension
from helpers.project import copy_installation, run_python

NAME = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
native = pytest.mark.skipif(
    _extension.STATUS.state == "not_built", reason=f"no extension was built: {_extension.STATUS.reason}"
)


def make(folder, content=b"no library", **changes):
    """A library of `content` with the record that a build of it would write, changed by `changes`."""
    record = {
        "built": True,
        "reason": "",
        "file": NAME,
        "size": len(content),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": str(torch.__version__),
        **changes,
    }
    (folder / record["file"]).write_bytes(content)
    (folder / "_C.json").write_text(json.dumps(record))


def load_broken(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        status = _extension.load(folder)
    assert status.state == "broken"
    assert [w.category for w in caught] == [RuntimeWarning]
    assert status.reason in str(caught[0].message)
    assert f"torch {torch.__version__}" in status.reason and "--no-build-isolation" in status.reason
    return status.reason


def test_truncated(tmp_path):
    make(tmp_path, size=100_000, torch="2.12.0")
    reason = load_broken(tmp_path)
    assert str(tmp_path / NAME) in reason
    assert "10 bytes" in reason and "100000" in reason
    assert "built for: Python" in reason and "torch 2.12.0" in reason


def test_garbage_of_the_right_size(tmp_path):
    make(tmp_path, b"\x7fELF" + bytes(1000))
    assert f"{tmp_path / NAME} does not load (ImportError" in load_broken(tmp_path)


def test_another_python(tmp_path):
    make(tmp_path, file="_C.cpython-39-x86_64-linux-gnu.so", python="3.9.1")
    reason = load_broken(tmp_path)
    assert "is not for this Python" in reason and "built for: Python 3.9.1" in reason


def test_another_machine(tmp_path):
    make(tmp_path, machine="riscv64")
    assert "another machine" in load_broken(tmp_path)


def test_torch_older_than_the_stable_abi(tmp_path, monkeypatch):
    make(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert "needs torch 2.11 or newer" in load_broken(tmp_path)


def test_library_missing(tmp_path):
    make(tmp_path)
    (tmp_path / NAME).unlink()
    assert f"{tmp_path / NAME} is missing" in load_broken(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "\0"])
def test_unreadable_record(tmp_path, content):
    make(tmp_path)
    (tmp_path / "_C.json").write_text(content)
    assert str(tmp_path / "_C.json") in load_broken(tmp_path)


def test_record_missing(tmp_path):
    make(tmp_path)
    (tmp_path / "_C.json").unlink()
    assert f"{tmp_path / NAME} has no build record" in load_broken(tmp_path)


def test_nothing_built_is_not_broken(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _extension.load(tmp_path).state == "not_built"
        (tmp_path / "_C.json").write_text('{"built": false, "reason": "there is no C++ compiler"}')
        status = _extension.load(tmp_path)
    assert status.state == "not_built"
    assert "there is no C++ compiler" in status.reason and "--no-build-isolation" in status.reason


PURE_PYTHON = """
import torch, bertfast
x, ones = torch.ones(3, 8), torch.ones(8)
with bertfast.use_backend("torch"):
    bertfast.ops.add_layer_norm(x, x, ones, ones)
print("what was asked for needs no warning", flush=True)
for _ in range(2):
    bertfast.ops.add_layer_norm(x, x, ones, ones)
bertfast.ops.linear_gelu(x, torch.ones(8, 8))
"""


def test_pure_python_is_said_once_and_by_info(tmp_path):
    package = copy_installation(tmp_path)
    (package / "_C.json").write_text('{"built": false, "reason": "there is no C++ compiler"}')
    (tmp_path / "use.py").write_text(PURE_PYTHON)
    said = "pure Python; reinstall with --no-build-isolation"
    done = run_python("use.py", cwd=tmp_path, path=(tmp_path,))
    assert done.stderr.count("RuntimeWarning") == done.stderr.count(said) == 1
    assert "use.py:8: RuntimeWarning" in done.stderr and "(there is no C++ compiler)" in done.stderr
    info = run_python("-m", "bertfast", "info", cwd=tmp_path, path=(tmp_path,))
    assert said in " ".join(info.stdout.split())


@native
def test_loaded():
    assert _extension.STATUS.state == "loaded", _extension.STATUS.reason
    assert _extension.verify_hash()
    from bertfast import _C

    assert [name for name in vars(_C) if not name.startswith("__")] == ["build_info"]
    assert "cpu" in _C.build_info()["backends"]


USE = """
import torch, bertfast
from bertfast import _extension, ops
x = torch.randn(3, 8)
out = ops.add_layer_norm(x, x, torch.ones(8), torch.zeros(8))
torch.testing.assert_close(out, torch.nn.functional.layer_norm(x + x, (8,), eps=1e-12))
print(_extension.STATUS.state, _extension.verify_hash())
"""


@native
def test_a_truncated_library_does_not_kill_the_process(tmp_path):
    library = copy_installation(tmp_path, native=True) / NAME
    library.write_bytes(library.read_bytes()[:100_000])
    done = run_python("-c", USE, cwd=tmp_path, path=(tmp_path,))
    assert done.stdout.split() == ["broken", "False"]
    assert done.stderr.count("RuntimeWarning") == 1
    assert str(library) in done.stderr


@native
def test_verify_hash_sees_a_changed_byte(tmp_path):
    library = copy_installation(tmp_path, native=True) / NAME
    content = library.read_bytes()
    assert b"What this extension was compiled" in content
    library.write_bytes(content.replace(b"What this extension was compiled", b"That this extension was compiled"))
    done = run_python("-c", USE, cwd=tmp_path, path=(tmp_path,))
    assert done.stdout.split() == ["loaded", "False"]


@native
def test_the_extension_may_be_loaded_before_the_schemas(tmp_path):
    """`_C` only implements: which of the two comes first does not matter."""
    library = copy_installation(tmp_path, native=True) / NAME
    shutil.copy(library, tmp_path / NAME)
    code = f"""
import importlib.util, torch
spec = importlib.util.spec_from_file_location("_C", {str(tmp_path / NAME)!r})
spec.loader.exec_module(importlib.util.module_from_spec(spec))
lib = torch.library.Library("bertfast", "DEF")
lib.define("add_layer_norm_fwd_cpu(Tensor x, Tensor? residual, Tensor weight, Tensor bias, Tensor? x_bias,"
           " Tensor? seed, float eps, float dropout_p, bool need_sum) -> (Tensor, Tensor, Tensor, Tensor)")
x = torch.randn(3, 8)
out = torch.ops.bertfast.add_layer_norm_fwd_cpu(x, None, torch.ones(8), torch.zeros(8), None, None, 1e-5, 0.0, False)
torch.testing.assert_close(out[0], torch.nn.functional.layer_norm(x, (8,)))
print("ok")
"""
    assert run_python("-c", code, cwd=tmp_path).stdout.strip() == "ok"
