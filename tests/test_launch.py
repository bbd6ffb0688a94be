"""Launches: which calls share a compiled kernel, on which device and stream they run, and what a launch costs.

Compiled kernels, not interpreted ones, for a GPU that is not there.
"""

import statistics
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from bertfast.dropout import keep_scale
from bertfast.kernels import launch
from bertfast.kernels.launch import Device, Dropout, Launcher, as_rows, device_of, dropout_of
from helpers.fake_gpu import fake_gpu
from helpers.poison import misaligned


def add_kernel(x_ptr, y_ptr, out_ptr, M, stride_x_m, scale, N: tl.constexpr, BLOCK_N: tl.constexpr):
    o_n = tl.arange(0, BLOCK_N)
    i_m = tl.program_id(0).to(tl.int64)
    mask = (o_n < N) & (i_m < M)
    b_x = tl.load(x_ptr + i_m * stride_x_m + o_n, mask=mask) * scale
    if y_ptr is not None:
        b_x += tl.load(y_ptr + i_m * N + o_n, mask=mask)
    tl.store(out_ptr + i_m * N + o_n, b_x, mask=mask)


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A kernel that is compiled although tests run interpreted: it uses none of Triton's own device functions."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    with fake_gpu(90):
        yield JITFunction(add_kernel, do_not_specialize=["M"])


def arguments(x, y=None, rows=4, scale=0.5, width=64, block_n=64):
    return x, y, torch.empty(4, 64), rows, x.stride(0), scale, width, block_n


def test_row_counts_share_one_variant(kernel):
    add = Launcher(kernel)
    for rows in range(1, 200):
        add((rows,), *arguments(torch.empty(rows, 64), rows=rows))
    assert add.variants == 1


def test_rows_beyond_32_bits_are_another_variant(kernel):
    add, x = Launcher(kernel), torch.empty(4, 64)
    for rows, variants in ((2**31 - 1, 1), (2**31, 2), (2**40, 2), (7, 2)):
        add((4,), *arguments(x, rows=rows))
        assert add.variants == variants


@pytest.mark.parametrize(
    "other",
    [
        dict(x=torch.empty(4, 64, dtype=torch.float16)),
        dict(x=misaligned(torch.empty(4, 64))),
        dict(x=torch.empty(4, 65)[:, :64]),
        dict(x=torch.empty(4, 64), y=torch.empty(4, 64)),
        dict(x=torch.empty(4, 64), width=48),
        dict(x=torch.empty(4, 64), block_n=128),
        dict(x=torch.empty(4, 64), num_warps=8),
    ],
    ids=["dtype", "alignment", "stride", "a missing tensor", "width", "tile", "warps"],
)
def test_what_makes_another_variant(kernel, other):
    add, options = Launcher(kernel), {"num_warps": other.pop("num_warps", 4)}
    add((4,), *arguments(torch.empty(4, 64)), num_warps=4)
    add((4,), *arguments(**other), **options)
    assert add.variants == 2
    add((4,), *arguments(torch.empty(4, 64)), num_warps=4)
    assert add.variants == 2


def test_a_missing_argument(kernel):
    add, args = Launcher(kernel), arguments(torch.empty(4, 64))
    add((4,), *args)
    with pytest.raises(ValueError):
        add((4,), *args[:-1])


def test_each_gpu_has_its_own_variant(kernel):
    add = Launcher(kernel)
    for capability in (80, 90, 80):
        with fake_gpu(capability):
            add((4,), *arguments(torch.empty(4, 64)))
    assert {kernel.metadata.target.arch for kernel in add._variants.values()} == {80, 90}
    assert add.variants == 2


def test_values_of_floats_make_no_variant(kernel):
    add = Launcher(kernel)
    for scale in (0.0, 1.0, 1.25, 1e-12):
        add((4,), *arguments(torch.empty(4, 64), scale=scale))
    assert add.variants == 1


def test_a_variant_serves_only_what_triton_would_give_it(kernel):
    """Two calls that Triton compiles differently never share a variant: its own cache has no more entries than ours."""
    add = Launcher(kernel)
    tensors = [torch.empty(4, 64), misaligned(torch.empty(4, 64)), torch.empty(4, 65)[:, :64], torch.empty(64)[None]]
    for x in tensors:
        for y in (None, *tensors):
            for rows in (1, 16, 17, 2**31):
                add((4,), *arguments(x, y, rows=rows))
    caches = kernel.device_caches[90][0]
    assert len(caches) <= add.variants
    assert {id(compiled) for compiled in add._variants.values()} == {id(compiled) for compiled in caches.values()}


def test_descriptors_are_told_apart_by_dtype_and_block():
    def of(x, block):
        return launch._key(0, (TensorDescriptor.from_tensor(x, block),), ("value",), {})

    half, x = torch.empty(64, 64, dtype=torch.float16), torch.empty(64, 64)
    assert of(x, [16, 32]) == of(torch.empty(128, 64), [16, 32])
    assert len({of(x, [16, 32]), of(x, [32, 16]), of(half, [16, 32])}) == 3


@pytest.mark.parametrize("grid", [(2**31,), (1, 65536), (1, 1, 65536)])
def test_a_grid_beyond_the_limits(kernel, grid):
    with pytest.raises(ValueError, match=r"add_kernel needs a grid of .*CUDA takes \(2147483647, 65535, 65535\)"):
        Launcher(kernel)(grid, *arguments(torch.empty(4, 64)))


def test_the_largest_grid(kernel):
    add = Launcher(kernel)
    add((2**31 - 1, 65535, 65535), *arguments(torch.empty(4, 64)))
    assert add.variants == 1


class OnGpu:
    """What a launcher asks a CUDA tensor, of a tensor that is none."""

    is_cuda = True

    def __init__(self, index):
        self.device = torch.device("cuda", index)

    def stride(self, dim):
        return 64


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs that are not there; the log lists device entries, exits and launches (device, stream)."""
    log, current = [], [0]

    @contextmanager
    def device(index):
        previous, current[0] = current[0], index
        log.append(f"enter {index}")
        try:
            yield
        finally:
            current[0] = previous
            log.append(f"leave {index}")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    return log


class Compiled:
    """A variant that notes its launches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, log):
        self.log = log

    def run(self, *args):
        self.log.append(args)


def with_variant(kernel, log, monkeypatch):
    """A launcher all of whose variants are one `Compiled`, and the kernel's own first launches noted as "compile"."""
    monkeypatch.setattr(
        JITFunction, "__getitem__", lambda self, grid: lambda *args, **options: log.append("compile") or Compiled(log)
    )
    return Launcher(kernel)


def test_launches_enter_the_tensors_device(kernel, gpus, monkeypatch):
    add = with_variant(kernel, gpus, monkeypatch)
    second, first = OnGpu(1), OnGpu(0)
    for x in (second, second, first, first):
        add((1,), *arguments(x))
    launched = [entry if isinstance(entry, str) else "launch" for entry in gpus]
    assert launched == ["enter 1", "compile", "leave 1", "enter 1", "launch", "leave 1", "compile", "launch"]
    assert add.variants == 2


def test_a_failing_launch_leaves_the_device(kernel, gpus, monkeypatch):
    add = with_variant(kernel, gpus, monkeypatch)
    monkeypatch.setattr(JITFunction, "__getitem__", lambda self, grid: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        add((1,), *arguments(OnGpu(1)))
    assert gpus == ["enter 1", "leave 1"] and torch.cuda.current_device() == 0 and add.variants == 0


def test_launches_use_the_current_stream(kernel, gpus, monkeypatch):
    add, x = with_variant(kernel, gpus, monkeypatch), OnGpu(1)
    streams = {0: 11, 1: 12}
    driver = triton.runtime.driver.active
    monkeypatch.setattr(driver, "get_current_stream", lambda index: streams[index], raising=False)
    args = arguments(x)
    add((5,), *args)
    streams[1] = 13
    add((5, 6), *args)
    (launch_arguments,) = (entry for entry in gpus if not isinstance(entry, str))
    assert launch_arguments == (5, 6, 1, 13, "function", "metadata", None, None, None, *args)


def test_the_device_that_tiles_are_for(monkeypatch):
    x = torch.empty(1)
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        assert device_of(x) == launch.INTERPRETED_AS
        patch.setattr(triton.knobs.runtime, "interpret", False)
        for capability, multiprocessors in ((75, 40), (90, 132), (120, 170)):
            with fake_gpu(capability):
                assert device_of(x) == Device(capability, multiprocessors)


def test_a_gpus_facts_are_asked_once(monkeypatch):
    asked = []

    def properties(index):
        asked.append(index)
        return SimpleNamespace(major=8, minor=9, multi_processor_count=76)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    launch._cuda_device.cache_clear()
    try:
        assert [device_of(OnGpu(3)) for _ in range(2)] == [Device(89, 76)] * 2
        assert asked == [3]
    finally:
        launch._cuda_device.cache_clear()


def test_rows_are_a_view_where_one_exists():
    x = torch.randn(2, 3, 8)
    for view in (x, x[:, :, 2:6], x[0], x[0, 0], x[:1].expand(4, 3, 8)[:, 0]):
        rows = as_rows(view)
        assert rows.shape == (view.shape[:-1].numel(), view.shape[-1]) and rows.stride(-1) == 1
        assert rows.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert torch.equal(rows.view(view.shape), view)
    for copied in (x.transpose(1, 2), x[..., ::2], x[:1, :1, :1].expand(2, 3, 8)):
        rows = as_rows(copied)
        assert rows.stride(-1) == 1 and torch.equal(rows.view(copied.shape), copied)


def test_one_column_of_any_stride_is_a_view():
    x = torch.randn(6, 4)[:, :1]
    assert as_rows(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dropout_p", [2.0**-32, 0.1, 0.5, 0.9, 1.0])
def test_the_kernels_form_of_a_dropout_probability(dropout_p):
    seed = torch.tensor([1])
    kept_from = int(dropout_p * 2**32)
    dropout = dropout_of(seed, dropout_p)
    assert dropout.seed is seed and dropout.scale == keep_scale(dropout_p)
    assert dropout.last_dropped in range(-(2**31), 2**31)
    assert dropout.last_dropped % 2**32 == kept_from - 1


@pytest.mark.parametrize(("seed", "dropout_p"), [(None, 0.0), (torch.tensor([1]), 0.0), (torch.tensor([1]), 2.0**-33)])
def test_no_dropout_leaves_the_kernel(seed, dropout_p):
    assert dropout_of(seed, dropout_p) == Dropout(None, 0, 1.0)


def test_a_launch_costs_less_than_tritons_own(kernel):
    """Interleaved medians of the Python side of a launch; the driver's part is left out on both sides."""
    add, args = Launcher(kernel), arguments(torch.empty(4, 64), torch.empty(4, 64))
    ways = {
        "Launcher": lambda: add((4,), *args, num_warps=4),
        "JITFunction.run": lambda: kernel[(4, 1, 1)](*args, enable_fp_fusion=True, num_warps=4),
    }
    seconds = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(50):
        for name, way in ways.items():
            started = time.perf_counter()
            for _ in range(20):
                way()
            seconds[name].append((time.perf_counter() - started) / 20)
    ours, tritons = (statistics.median(seconds[name]) * 1e6 for name in ways)
    assert ours < tritons, f"{ours:.2f} us, Triton's own {tritons:.2f} us"
