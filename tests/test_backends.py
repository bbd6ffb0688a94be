"""Choosing a backend: order, reasons, pins, threads, and what compiled code does when a pin changes."""

import dataclasses
import importlib.metadata
import sys
import threading

import pytest
import torch

import bertfast
from bertfast import BackendError, backends, ops, use_backend
from bertfast.backends import AUTO_ORDER, BACKENDS, OPS, Call, Capability, candidates, choose
from bertfast.ops import _library
from helpers.recorder import Recorder

CALL = Call("add_layer_norm", "cpu", None, (torch.float32,), width=8)


def _implementation(*args):
    return None


@pytest.fixture
def registry(monkeypatch):
    """An empty registry; `add` registers."""
    monkeypatch.setattr(backends, "_capabilities", {})
    monkeypatch.setattr(backends, "_choices", {})

    def add(backend, op="add_layer_norm", **limits):
        capability = Capability(op, backend, _implementation, **limits)
        backends.register(capability)
        return capability

    return add


def chosen(call=CALL, backend=None):
    return choose(call, backend).backend


def test_the_automatic_order_is_that_of_the_device(registry):
    for backend in ("torch", "cpu", "cuda", "triton"):
        registry(backend)
    assert chosen() == "cpu"
    assert chosen(CALL._replace(device="cuda", compute=(9, 0))) == "triton"
    assert chosen(CALL._replace(device="xpu")) == chosen(CALL._replace(device="meta")) == "torch"
    assert AUTO_ORDER["cuda"] == ("triton", "cuda", "torch") and AUTO_ORDER["cpu"] == ("cpu", "torch")


def test_the_first_without_reasons_serves(registry):
    registry("triton", dtypes=frozenset({torch.float16}))
    registry("cuda", max_width=4)
    registry("torch")
    assert chosen(CALL._replace(device="cuda", compute=(8, 0))) == "torch"
    assert chosen(CALL._replace(device="cuda", compute=(8, 0), width=4)) == "cuda"
    assert chosen(CALL._replace(device="cuda", compute=(8, 0), dtypes=(torch.float16,))) == "triton"


LIMITS = [
    ({"unavailable": lambda: "was not built"}, {}, "was not built"),
    ({"devices": frozenset({"cuda"})}, {}, "device is cpu, takes cuda"),
    ({"dtypes": frozenset({torch.float16})}, {}, "dtype float32 is not one of float16"),
    ({"dtypes": backends.FLOAT}, {"dtypes": (torch.float32, torch.float64)}, "dtype float64 is not one of"),
    ({"min_compute": (8, 0)}, {"device": "cuda", "compute": (7, 5)}, "compute capability is 7.5, needs 8.0"),
    ({"min_compute": (8, 9)}, {"device": "cuda", "compute": (8, 6)}, "compute capability is 8.6, needs 8.9"),
    ({"max_head_dim": 256}, {"head_dim": 257}, "head dim is 257, at most 256"),
    ({"max_width": 7}, {}, "width is 8, at most 7"),
    ({"masks": frozenset({"none", "bool"})}, {"mask": "float"}, "mask is float, takes bool, none"),
    ({"dropout": False}, {"dropout": True}, "no dropout"),
    ({"backward": False}, {"grad": True}, "no backward"),
    ({"features": frozenset()}, {"features": ("enable_gqa",)}, "no enable_gqa"),
]


@pytest.mark.parametrize(("limit", "facts", "reason"), LIMITS, ids=[reason for *_, reason in LIMITS])
def test_each_limit_has_its_reason(limit, facts, reason):
    call = CALL._replace(**facts)
    limited = Capability("add_layer_norm", "cuda", _implementation, **limit)
    assert len(limited.not_supported_reasons(call)) == 1 and reason in limited.not_supported_reasons(call)[0]
    assert Capability("add_layer_norm", "cuda", _implementation).not_supported_reasons(call) == []


def test_limits_hold_at_their_ends():
    capability = Capability("attention", "cuda", _implementation, min_compute=(8, 0), max_head_dim=256, max_width=8)
    call = Call("attention", "cuda", (8, 0), (torch.float16,), head_dim=256, width=8)
    assert capability.not_supported_reasons(call) == []
    assert capability.not_supported_reasons(call._replace(compute=(9, 0), head_dim=1, width=None)) == []


def test_every_reason_is_given():
    limits = {
        name: value for limit, *_ in LIMITS for name, value in limit.items() if name not in ("devices", "min_compute")
    }
    call = CALL._replace(head_dim=300, mask="float", dropout=True, grad=True, features=("a", "b"), dtypes=(torch.int8,))
    reasons = Capability("add_layer_norm", "cuda", _implementation, **limits).not_supported_reasons(call)
    assert len(reasons) == 9


def test_the_error_lists_the_inputs_and_every_candidate(registry):
    registry("triton", unavailable=lambda: "Triton is not installed")
    registry("cpu", max_width=4, backward=False)
    registry("torch")
    call = Call("add_layer_norm", "cpu", None, (torch.float32, torch.bfloat16), True, True, 64, 8, "bool", ("extra",))
    with pytest.raises(BackendError) as raised:
        choose(call, "cpu")
    lines = str(raised.value).splitlines()
    assert lines[0] == (
        "no backend can serve add_layer_norm(device=cpu, dtypes=float32/bfloat16, head_dim=64, width=8, mask=bool, "
        "grad, dropout, extra); asked for: cpu"
    )
    assert lines[1:] == [
        "  triton: Triton is not installed",
        "  cuda: has no kernel for this op in this version",
        "  cpu: width is 8, at most 4; no backward",
        "  torch: can serve it, but was not asked",
    ]
    assert isinstance(raised.value, NotImplementedError)
    assert "sm_75" in str(CALL._replace(device="cuda", compute=(7, 5)))


def test_an_explicit_backend_never_falls_back(registry):
    registry("torch")
    with pytest.raises(BackendError, match="asked for: triton"):
        chosen(backend="triton")
    with use_backend("triton"), pytest.raises(BackendError, match="asked for: triton"):
        chosen()
    assert chosen() == "torch"


def test_pins_nest_and_lift(registry):
    registry("cpu")
    registry("torch")
    with use_backend("torch"):
        assert chosen() == "torch"
        with use_backend("cpu"):
            assert chosen() == "cpu"
            with use_backend("auto"):
                assert chosen() == "cpu"
            assert chosen(backend="torch") == "torch"
        assert chosen() == "torch"
        with use_backend("auto"):
            assert chosen() == "cpu"
        assert chosen(backend="auto") == "cpu"
    assert chosen() == "cpu"


def test_a_pin_is_lifted_by_an_exception():
    with pytest.raises(KeyError), use_backend("torch"):
        raise KeyError
    assert backends._pinned.order is None


def test_several_backends_are_tried_in_the_order_given(registry):
    registry("cpu", max_width=4)
    registry("torch")
    with use_backend("triton", "cpu", "torch"):
        assert chosen() == "torch"
        assert chosen(CALL._replace(width=4)) == "cpu"
    with use_backend("torch", "cpu"):
        assert chosen(CALL._replace(width=4)) == "torch"


@pytest.mark.parametrize("names", [(), ("tpu",), ("Torch",), ("auto", "torch"), ("torch", "xla"), ("",)])
def test_unknown_names(names):
    message = "backend must be 'auto' or any of triton, cuda, cpu, torch; got"
    with pytest.raises(ValueError, match=message), use_backend(*names):
        pass
    if len(names) == 1:
        with pytest.raises(ValueError, match="backend must be"):
            choose(CALL, names[0])


def test_registering(registry):
    registry("torch")
    with pytest.raises(ValueError, match="cannot register"):
        registry("torch")
    with pytest.raises(ValueError, match="cannot register"):
        registry("vulkan")
    with pytest.raises(ValueError, match="cannot register"):
        registry("torch", op="softmax")


def test_a_later_registration_is_seen(registry):
    registry("torch")
    assert chosen() == "torch"
    registry("cpu")
    assert chosen() == "cpu"


def test_pins_belong_to_their_thread():
    seen = []

    def look():
        seen.append(backends._pinned.order)
        with use_backend("torch"):
            seen.append(backends._pinned.order)

    with use_backend("cpu"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert backends._pinned.order == ("cpu",)
    assert seen == [None, ("torch",)]


def test_every_op_is_served_by_torch_on_any_device():
    served = {(c.op, c.backend): c for c in candidates()}
    for op in OPS:
        capability = served[op, "torch"]
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            call = Call(op, "xpu", None, (dtype,), True, True, 300, 100_000, "float", ("anything",))
            assert capability.not_supported_reasons(call) == []
    assert [(c.op, c.backend) for c in candidates()] == sorted(
        served, key=lambda pair: (OPS.index(pair[0]), BACKENDS.index(pair[1]))
    )


def test_describe_names_what_a_choice_may_depend_on():
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    call = backends.describe("attention", (x, None, x.float()), grad=True, dropout_p=0.1, head_dim=3, mask="bool")
    assert call.device == "cpu" and call.compute is None and set(call.dtypes) == {torch.bfloat16, torch.float32}
    assert (call.grad, call.dropout, call.head_dim, call.width, call.mask) == (True, True, 3, None, "bool")
    assert hash(call) == hash(call._replace())


needs_cpu = pytest.mark.skipif(
    any(c.backend == "cpu" and c.unavailable_reason() for c in candidates()), reason="the native extension is not built"
)


def _layer_norm(x):
    ones = torch.ones(x.shape[-1])
    return ops.add_layer_norm(x, x, ones, ones)


@needs_cpu
def test_ops_run_what_was_chosen():
    x = torch.randn(2, 8)
    with Recorder() as record:
        _layer_norm(x)
        with use_backend("torch"):
            _layer_norm(x)
        _layer_norm(x.double().float())
    assert record.names == ["add_layer_norm_fwd_cpu"] * 2
    with Recorder() as record:
        ops.add_layer_norm(x.double(), None, torch.ones(8).double(), torch.ones(8).double())
    assert record.names == [], "fp64 falls through to torch"


@needs_cpu
def test_backward_uses_the_backend_of_forward():
    x = torch.randn(2, 8, requires_grad=True)
    out = _layer_norm(x)
    with use_backend("torch"), Recorder() as record:
        out.sum().backward()
    assert record.names == ["add_layer_norm_bwd_cpu"]
    with use_backend("torch"):
        out = _layer_norm(x)
    with Recorder() as record:
        out.sum().backward()
    assert record.names == []


@needs_cpu
def test_compiled_code_sees_a_changed_pin():
    x = torch.randn(2, 8)
    graphs = []

    def backend(graph, inputs):
        graphs.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return graph

    compiled = torch.compile(_layer_norm, backend=backend, fullgraph=True)

    def native(graph):
        return any("bertfast" in str(target) for target in graph)

    compiled(x)
    with use_backend("torch"):
        compiled(x)
    assert [native(graph) for graph in graphs] == [True, False]
    compiled(x)
    with use_backend("torch"):
        compiled(x)
    assert len(graphs) == 2, "both stay in the cache"
    torch._dynamo.reset()


def test_an_error_of_the_public_op_is_the_same():
    with pytest.raises(bertfast.BackendError, match=r"add_layer_norm\(device=cpu, dtypes=float32") as raised:
        ops.add_layer_norm(torch.ones(2, 8), None, torch.ones(8), torch.ones(8).double(), backend="cuda")
    assert all(f"  {backend}: " in str(raised.value) for backend in BACKENDS)


@pytest.mark.parametrize("capability", candidates(), ids=lambda c: f"{c.op}-{c.backend}")
def test_capabilities_are_data(capability):
    assert dataclasses.is_dataclass(capability) and capability.__dataclass_params__.frozen
    reason = capability.unavailable_reason()
    assert reason is None or (isinstance(reason, str) and reason)


def test_old_gpus_get_reasons_instead_of_errors(registry):
    registry("triton", min_compute=(8, 0), op="attention")
    registry("torch", op="attention")
    call = Call("attention", "cuda", (6, 1), (torch.float16,), head_dim=64)
    assert chosen(call) == "torch"
    with pytest.raises(BackendError, match=r"sm_61.*\n  triton: compute capability is 6\.1, needs 8\.0"):
        chosen(call, "triton")


def test_the_automatic_choice_takes_auto_dtypes_only(registry):
    registry("triton", auto_dtypes=backends.HALF)
    registry("torch")
    call = CALL._replace(device="cuda", compute=(9, 0))
    assert chosen(call) == "torch"
    assert chosen(call._replace(dtypes=(torch.float16, torch.float32))) == "torch"
    assert chosen(call._replace(dtypes=(torch.float16, torch.bfloat16))) == "triton"
    assert chosen(call, "triton") == "triton"
    with use_backend("triton", "torch"):
        assert chosen(call) == "triton"
    with use_backend("auto"):
        assert chosen(call) == "torch"


# The ops whose kernels are GEMMs. Triton's dot on 7.5 is made of FMAs; everything else there is bound by memory.
GEMMS = ("linear_gelu", "feed_forward", "qkv_projection")
BOUND_BY_MEMORY = ("add_layer_norm", "embed_layer_norm")


@pytest.fixture
def triton_installed(monkeypatch):
    """The capabilities as registered, with Triton taken for installed."""
    found = {
        key: dataclasses.replace(capability, unavailable=lambda: None) if key[1] == "triton" else capability
        for key, capability in backends._capabilities.items()
    }
    monkeypatch.setattr(backends, "_capabilities", found)
    monkeypatch.setattr(backends, "_choices", {})


def gpu_call(op, compute, dtype, **facts):
    features = ("gelu",) if op == "feed_forward" else ()
    return Call(op, "cuda", compute, (dtype,), width=768, features=features, **facts)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("compute", [(6, 1), (7, 5), (8, 0), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", [*GEMMS, *BOUND_BY_MEMORY])
def test_what_each_gpu_is_served_by(triton_installed, op, dtype, compute, grad):
    call = gpu_call(op, compute, dtype, grad=grad, dropout=grad and op in ("feed_forward", *BOUND_BY_MEMORY))
    least = (8, 0) if op in GEMMS else (7, 5)
    serves = compute >= least and dtype != torch.float64
    automatic = serves and (op in BOUND_BY_MEMORY or dtype != torch.float32)
    assert chosen(call) == ("triton" if automatic else "torch")
    if serves:
        assert chosen(call, "triton") == "triton"
        return
    with pytest.raises(BackendError) as raised:
        chosen(call, "triton")
    reasons = next(line for line in str(raised.value).splitlines() if line.startswith("  triton: "))
    too_old = "compute capability is {}.{}, needs {}.{}".format(*compute, *least)
    assert (too_old in reasons) == (compute < least)
    assert ("dtype float64 is not one of" in reasons) == (dtype == torch.float64)


@pytest.mark.parametrize("op", BOUND_BY_MEMORY)
def test_rows_that_are_too_wide_for_triton(triton_installed, op):
    call = gpu_call(op, (9, 0), torch.float16)
    assert chosen(call._replace(width=8192)) == "triton"
    assert chosen(call._replace(width=8193)) == "torch"
    with pytest.raises(BackendError, match="triton: width is 8193, at most 8192"):
        chosen(call._replace(width=8193), "triton")


@pytest.fixture
def find_triton(monkeypatch):
    """Looks for Triton anew, whose version is then the one given, or None for none."""
    monkeypatch.setattr(backends, "_choices", {})

    def find(version):
        def installed(name):
            assert name == "triton"
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        with monkeypatch.context() as patch:
            patch.setattr(importlib.metadata, "version", installed)
            # Nothing may import it.
            patch.setitem(sys.modules, "triton", None)
            reason = _library._triton_reason()
        monkeypatch.setattr(_library, "_TRITON_REASON", reason)

    return find


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "Triton is not installed (pip install 'bertfast[triton]')"),
        ("2.3.1", "Triton 2.3.1 is installed, needs 3.6"),
        ("3.5.1", "Triton 3.5.1 is installed, needs 3.6"),
        ("3.6.0", None),
        ("3.10.0", None),
        ("4.0.0+git1234", None),
        ("3.7", None),
    ],
)
def test_a_missing_or_old_triton_is_the_reason(find_triton, version, reason):
    find_triton(version)
    assert _library.triton_unavailable() == reason
    call = gpu_call("add_layer_norm", (9, 0), torch.float16)
    # Tests run with the emulated kernels of `cuda`.
    assert chosen(call) == ("triton" if reason is None else "cuda")
    if reason is not None:
        with pytest.raises(BackendError) as raised:
            chosen(call, "triton")
        assert f"  triton: {reason}" in str(raised.value)


def test_a_rocm_build_of_torch_is_the_reason(find_triton, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    find_triton("3.9.0")
    assert "built for ROCm" in _library.triton_unavailable()


@pytest.mark.parametrize(
    ("facts", "with_triton", "without"),
    [
        ({}, "triton", "cuda"),
        ({"head_dim": 129}, "triton", "torch"),
        ({"head_dim": 257}, "torch", "torch"),
        ({"dtypes": (torch.float32,)}, "torch", "torch"),
        ({"compute": (7, 5)}, "torch", "torch"),
    ],
)
@pytest.mark.parametrize("op", ["attention", "varlen_attention"])
def test_attention_on_a_gpu(find_triton, op, facts, with_triton, without):
    call = Call(op, "cuda", (9, 0), (torch.bfloat16,), head_dim=128, grad=True, dropout=True)._replace(**facts)
    find_triton("3.8.0")
    assert chosen(call) == with_triton
    backends._choices.clear()
    find_triton(None)
    assert chosen(call) == without
