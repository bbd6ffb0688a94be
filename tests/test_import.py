"""Importing bertfast does no work and needs no optional package."""

import json

import pytest

from helpers.project import block, copy_installation, run_python

# Everything that would ask for a device, start CUDA or compile raises, before bertfast is imported.
WALK = """
import importlib, json, os, pkgutil, sys, warnings
import torch, torch.utils.cpp_extension

def refuse(*args, **kwargs):
    raise AssertionError("work at import")

for name in "is_available device_count get_device_capability get_device_properties current_device _lazy_init".split():
    setattr(torch.cuda, name, refuse)
torch.utils.cpp_extension.load = torch.compile = torch.randint = refuse
environment, threads, grad = dict(os.environ), torch.get_num_threads(), torch.is_grad_enabled()

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import bertfast
    first = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    names = [m.name for m in pkgutil.walk_packages(bertfast.__path__, "bertfast.")]
    # Files of tests are for pytest, which is there then.
    for name in (name for name in names if ".test_" not in name):
        # What is made of Triton is imported by the first launch only.
        if not name.startswith("bertfast.kernels.") or name == "bertfast.kernels.tiles":
            importlib.import_module(name)

assert dict(os.environ) == environment and torch.get_num_threads() == threads and torch.is_grad_enabled() == grad
loaded = [name for name in {optional} if sys.modules.get(name)]
print(json.dumps(dict(names=names, warnings=first, loaded=loaded, state=bertfast._extension.STATUS.state)))
"""
OPTIONAL = (
    "triton",
    "transformers",
    "sentence_transformers",
    "peft",
    "matplotlib",
    "onnxruntime",
    "openvino",
    "ctranslate2",
    "liger_kernel",
    "pytest",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    copy_installation(site)
    return site


def walk(*path, cwd):
    done = run_python("-c", WALK.replace("{optional}", repr(OPTIONAL)), cwd=cwd, path=path)
    return json.loads(done.stdout.splitlines()[-1])


def test_every_module_imports_without_extension_and_optional_packages(site, tmp_path):
    report = walk(block(tmp_path / "blocked", *OPTIONAL), site, cwd=tmp_path)
    expected = {"bertfast.ops.layer_norm", "bertfast.models.bert", "bertfast.nn", "bertfast.cli", "bertfast.kernels"}
    assert expected <= set(report["names"])
    assert report["state"] == "not_built"
    assert report["warnings"] == []


def test_the_core_imports_no_optional_package(site, tmp_path):
    code = f"import sys, bertfast; print([name for name in {OPTIONAL} if name in sys.modules])"
    stock = f"import sys, torch; print([name for name in {OPTIONAL} if name in sys.modules])"
    with_bertfast = run_python("-c", code, cwd=tmp_path, path=(site,)).stdout
    assert with_bertfast == run_python("-c", stock, cwd=tmp_path).stdout


@pytest.mark.parametrize("blocked", ["triton", "transformers"])
def test_every_module_imports_with_one_package_missing(blocked, site, tmp_path):
    report = walk(block(tmp_path / "blocked", blocked), site, cwd=tmp_path)
    assert blocked not in report["loaded"]


def test_every_module_imports_with_everything_installed(site, tmp_path):
    assert walk(site, cwd=tmp_path)["names"]
