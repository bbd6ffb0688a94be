"""Kernels run on CPU tensors in tests: those in Triton interpreted (`TRITON_INTERPRET=0` leaves them out), those in
CUDA C++ emulated, as backend `cuda`."""

import importlib.util
import inspect
import os
import re
import zlib
from collections import defaultdict

import pytest

# Before anything imports Triton, whose own functions are interpreted or compiled from then on.
os.environ.setdefault("TRITON_INTERPRET", "1")


def _mend_interpreter() -> None:
    """Every call of a device function, `tl.sum` and `tl.zeros` among them, looks through all of `triton.language` for
    functions to replace: 2 ms, ten times the rest of the call. Inside a running kernel most are replaced already. And
    what such a call replaces stays replaced when the kernel has ended, so that nothing can be compiled any more: here
    it ends with the kernel."""
    import triton.language as tl
    from triton.runtime import interpreter

    # A fifth of the time, for overflows that no test's tensors are large enough for.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    replace = interpreter._patch_lang
    running = interpreter._LangPatchScope()

    def replace_once(fn):
        nonlocal running
        if not running._changes:
            running = replace(fn)
            return running
        modules = [m for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)]
        if any(tl.core.is_builtin(module.load) for module in modules):
            running._changes.extend(replace(fn)._changes)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replace_once


if os.environ["TRITON_INTERPRET"] != "0" and importlib.util.find_spec("triton"):
    _mend_interpreter()


def pytest_configure(config):
    from helpers import cuda_on_cpu

    cuda_on_cpu.enable()


def pytest_addoption(parser):
    parser.addoption("--every-dtype", action="store_true", help="also run what `dtypes_in_turn` leaves out")


def pytest_collection_modifyitems(config, items):
    """`dtypes_in_turn`: interpreted, a case takes half a second. Of cases that differ in the dtype alone, one is run,
    of each dtype in turn, where a function has more than a dozen."""
    if config.getoption("--every-dtype"):
        return
    functions = defaultdict(lambda: defaultdict(list))
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.get_closest_marker("dtypes_in_turn") and params.get("backend") == "triton" and "dtype" in params:
            functions[item.path, item.originalname][re.sub(r"\bdtype\d+\b", "", item.name)].append(item)
    left_out = set()
    for cases in functions.values():
        if sum(map(len, cases.values())) > 12:
            for turn, same in enumerate(cases.values()):
                left_out.update(item for i, item in enumerate(same) if i != turn % len(same))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def order_of_threads(request):
    """Each test has the threads of emulated kernels run in an order of its own, the same every time; should it fail,
    the report says which."""
    from helpers import cuda_on_cpu

    seed = zlib.crc32(request.node.name.encode())
    cuda_on_cpu.set_usual_seed(seed)
    request.node.add_report_section("setup", "order of threads in emulated kernels", f"cuda_on_cpu.seed({seed})")


@pytest.fixture
def fresh_dynamo():
    """Nothing is compiled yet, and nothing stays compiled."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def packed_runs(monkeypatch):
    """How many encoders ran packed, see `PackedRuns`."""
    from helpers.swap import PackedRuns

    return PackedRuns(monkeypatch)


@pytest.fixture
def fused_shapes(monkeypatch):
    """Shapes of hidden states that fused layers of torch.nn see."""
    from bertfast.swap import torch_nn

    shapes = []
    forward = torch_nn.layer_forward

    def spied(layer, x, layout):
        shapes.append(tuple(x.shape))
        return forward(layer, x, layout)

    monkeypatch.setattr(torch_nn, "layer_forward", spied)
    return shapes
