"""Who computes a linear layer: the table of sizes, the automatic order that it makes, and when nothing asks it."""

import types

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from bertfast import backends, gemm_forms, ops, use_backend
from bertfast.backends import Call, choose
from bertfast.kernels import tiles
from helpers import cuda_on_cpu
from helpers.op_cases import random

CAPABILITIES = (80, 86, 89, 90, 100, 120)
OPS = ("linear_gelu", "feed_forward", "qkv_projection")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_forms_by_size(capability):
    def forms(rows, width_in=768, **facts):
        return gemm_forms.forms_of(rows, 3072, width_in, capability, **facts)

    has_more_than_mma_sync = 90 <= capability < 120
    assert forms(1) == forms(128) == ("cuda", "triton", "separate")
    many = ("triton", "separate", "cuda") if has_more_than_mma_sync else ("triton", "cuda", "separate")
    assert forms(8192) == many
    # What mma.sync cannot reach, a second pass behind torch's GEMM can, but not where K is short.
    assert forms(8192, 512) == ("triton", "cuda", "separate")
    assert forms(8192, 8192) == ("separate", "triton", "cuda")
    # Without a kernel of its own a backend is as good as what it does instead.
    assert forms(128, dropout=True) == ("cuda", "separate", "triton")
    assert forms(8192, dropout=True) == (
        ("separate", "triton", "cuda") if has_more_than_mma_sync else ("cuda", "separate", "triton")
    )
    assert forms(128, 772) == ("triton", "separate", "cuda")
    assert forms(128, 772, dropout=True) == ("separate", "cuda", "triton")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_forms_agree_with_the_plan_of_the_triton_kernel(capability):
    multiprocessors = tiles.MULTIPROCESSORS[capability]
    for rows in (1, 64, 65, 128, 1000, 4096, 16384):
        for width, width_in in ((768, 768), (3072, 768), (768, 3072), (1024, 4096), (4096, 8192)):
            forms = gemm_forms.forms_of(rows, width, width_in, capability)
            assert sorted(forms) == ["cuda", "separate", "triton"]
            plan = tiles.linear_gelu_fwd(rows, width, width_in, 2, True, False, True, True, capability, multiprocessors)
            assert (plan.form == "separate") == (forms.index("separate") < forms.index("triton"))


@pytest.fixture
def on_hopper(monkeypatch):
    """A function that makes what stands for a tensor of those sizes on a GPU of capability 9.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def tensor(*shape, dtype=torch.float16, is_cuda=True):
        sizes = torch.Size(shape)
        return types.SimpleNamespace(
            shape=sizes, numel=sizes.numel, dtype=dtype, is_cuda=is_cuda, device="cuda", is_meta=False
        )

    return tensor


@pytest.mark.parametrize("op", OPS)
def test_sizes_decide_the_automatic_order(on_hopper, op, monkeypatch):
    for capability in backends.candidates():
        monkeypatch.setitem(
            backends._capabilities,
            (capability.op, capability.backend),
            types.SimpleNamespace(
                backend=capability.backend, not_supported_reasons=lambda call: [], is_automatic_for=lambda call: True
            ),
        )
    monkeypatch.setattr(backends, "_choices", {})
    few, many = (gemm_forms.automatic_order(on_hopper(*shape, 768), 3072, None) for shape in ((2, 16), (32, 128)))
    assert (few, many) == (("cuda", "triton", "torch"), ("triton", "cuda", "torch"))
    # Three linear layers have no second pass: torch's GEMM is the backend torch.
    order = gemm_forms.automatic_order(on_hopper(32, 128, 768), 3072, None, separate="torch")
    assert order == ("triton", "torch", "cuda")
    call = Call(op, "cuda", (9, 0), (torch.float16,))
    assert [choose(call, None, order).backend for order in (few, many, None)] == ["cuda", "triton", "triton"]
    assert choose(call, "triton", few).backend == "triton"
    with use_backend("triton", "cuda"):
        assert choose(call, None, few).backend == "triton"
        assert gemm_forms.automatic_order(on_hopper(2, 768), 3072, None) is None
    assert gemm_forms.automatic_order(on_hopper(2, 768), 3072, "cuda") is None


def test_what_sizes_do_not_decide(on_hopper, monkeypatch):
    for x in (on_hopper(2, 768, dtype=torch.float32), on_hopper(2, 768, is_cuda=False)):
        assert gemm_forms.gemm_forms(x, 3072) is gemm_forms.automatic_order(x, 3072, None) is None
        assert not gemm_forms.is_separate(x, 3072)
    for empty in (on_hopper(0, 768), on_hopper(3, 0)):
        assert gemm_forms.gemm_forms(empty, 3072)[0] == "cuda"
    assert gemm_forms.is_separate(on_hopper(8192, 768), 3072) and not gemm_forms.is_separate(on_hopper(8, 768), 3072)
    for module, name in ((torch.compiler, "is_compiling"), (torch.jit, "is_tracing")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda: True)
            assert gemm_forms.gemm_forms(on_hopper(8, 768), 3072) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert gemm_forms.gemm_forms(on_hopper(8, 768), 3072) is None


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_forms_of_the_backend_cuda(separate, grad, monkeypatch):
    asked = []
    monkeypatch.setattr(gemm_forms, "is_separate", lambda x, width: asked.append((*x.shape, width)) or separate)
    x, weight, bias = (random(*s, dtype=torch.float16, seed=1, grad=grad) for s in ((7, 24), (16, 24), (16,)))
    calls = (
        lambda: ops.linear_gelu(x, weight, bias, backend="cuda"),
        lambda: ops.feed_forward(x, weight, bias, weight.t(), None, dropout_p=0.1, backend="cuda"),
    )
    for call in calls:
        before = cuda_on_cpu.counters().all
        call()
        did = cuda_on_cpu.counters().all - before
        assert (did.products > 0) == (not separate) and did.launches == 1
    assert asked == [(7, 24, 16)] * 2


@pytest.mark.parametrize("op", ["linear_gelu", "qkv_projection"])
def test_the_automatic_choice_is_told_the_sizes(op, monkeypatch):
    asked = []
    monkeypatch.setattr(gemm_forms, "automatic_order", lambda x, width, *facts, **more: asked.append((*x.shape, width)))
    x, weight = torch.ones(3, 8), torch.ones(5, 8)
    ops.linear_gelu(x, weight) if op == "linear_gelu" else ops.qkv_projection(x, (weight,) * 3)
    ops.feed_forward(x, weight, None, weight.t(), None)
    assert asked == [(3, 8, 5 if op == "linear_gelu" else 15), (3, 8, 5)]


class OnGpu(torch.Tensor):
    """What says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("trace", ["make_fx", "jit"])
def test_traces_of_any_kind_know_no_sizes(trace, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = []

    def function(x):
        found.append(gemm_forms.gemm_forms(x.as_subclass(OnGpu) if trace == "jit" else x, 3072))
        return x * 2

    x = torch.ones(3, 8).half()
    assert gemm_forms.gemm_forms(x.as_subclass(OnGpu), 3072) is not None
    if trace == "jit":
        torch.jit.trace(function, x, check_trace=False)
    else:
        monkeypatch.setattr(gemm_forms, "forms_of", lambda *sizes: pytest.fail(f"{sizes}"))
        make_fx(function, tracing_mode="symbolic")(x)
    assert found == [None]
