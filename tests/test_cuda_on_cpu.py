"""What runs CUDA kernels on the CPU: each mistake that it claims to catch, in a small kernel, beside the kernel without
the mistake."""

import ctypes
import mmap
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bertfast import dropout
from helpers import cuda_build
from helpers.cuda_build import EMULATOR
from helpers.cuda_on_cpu import Counts, Emulator

KERNELS = EMULATOR / "kernels"
FILES = ("accesses", "barriers", "warps", "tiles", "matrices", "dropout")
SEEDS = (0, 1, 2)

seeds = pytest.mark.parametrize("seed", SEEDS)


class Case(ctypes.Structure):
    _fields_ = (
        ("arrays", ctypes.c_void_p * 3),
        ("n", ctypes.c_int64),
        ("grid_x", ctypes.c_int64),
        ("grid_y", ctypes.c_int64),
        ("threads", ctypes.c_int),
        ("shared", ctypes.c_int),
    )


class KernelError(Exception):
    pass


class Kernels(Emulator):
    def __call__(self, name, *arrays, n=0, grid=(1, 1), threads=32, shared=0, named=None):
        """Launches a kernel on `arrays`; it may touch those alone, or `named`."""
        self.name_tensors([a for a in arrays if a is not None] if named is None else named)
        function = getattr(self.dll, name)
        function.restype = ctypes.c_char_p
        addresses = (ctypes.c_void_p * 3)(*[None if a is None else a.data_ptr() for a in arrays])
        error = function(ctypes.byref(Case(addresses, n, *grid, threads, shared)))
        if error is not None:
            raise KernelError(error.decode())

    def fails(self, message, *arguments, **options):
        with pytest.raises(KernelError, match=message):
            self(*arguments, **options)
        # Whatever threads were left in the middle of, the next launch starts afresh.
        x, out = torch.arange(64.0), torch.empty(64)
        self("double_values", x, out, n=64, threads=64)
        assert torch.equal(out, 2 * x)


@pytest.fixture(scope="module")
def kernels():
    return Kernels(cuda_build.build([KERNELS / f"{name}.cu" for name in FILES], "cases"))


@pytest.fixture
def seeded(kernels, seed):
    with kernels.seed(seed):
        yield kernels


def of_zeros(count, dtype=torch.float32):
    return torch.zeros(count, dtype=dtype)


@seeds
def test_a_kernel_runs_on_every_element(seeded):
    x, out = torch.randn(1000), torch.empty(1000)
    seeded("double_values", x, out, n=1000, grid=(4, 1), threads=256)
    assert torch.equal(out, 2 * x)
    assert seeded.counters().last == Counts(
        launches=1, blocks=4, threads=1024, requests=0, conflicts=0, wide_accesses=0, other_accesses=2000, products=0
    )


@pytest.mark.parametrize(
    ("size", "out_size", "message"),
    [
        (999, 1000, r"double_values: block \(3, 0\), thread 231: reads 4 bytes at offset 3996 of a tensor of 3996"),
        (1000, 999, r"double_values: block \(3, 0\), thread 231: accesses 4 bytes at offset 3996 of a tensor of 3996"),
    ],
)
def test_accesses_behind_a_tensor(kernels, size, out_size, message):
    storage = torch.zeros(2, 1024)
    kernels.fails(message, "double_values", storage[0, :size], storage[1, :out_size], n=1000, grid=(4, 1), threads=256)


def test_accesses_before_a_tensor(kernels):
    x = torch.zeros(256)
    kernels("copy_by_16", x[128:], x[:128])
    kernels.fails("reads 16 bytes at offset -16 of a tensor of 512", "copy_by_16", x[128:], x[:128], n=-4)


def test_a_null_pointer(kernels):
    kernels.fails("accesses 4 bytes through a null pointer", "double_values", torch.ones(1), None, n=1)
    kernels("copy_untyped", None, torch.ones(1))


def test_a_pointer_to_nowhere(kernels):
    kernels.fails("points into no tensor", "double_values", torch.ones(1), torch.ones(1), n=1, named=[])


def test_untyped_pointers_know_their_tensor(kernels):
    x, out = torch.randn(32), torch.empty(32)
    kernels("copy_untyped", x, out)
    assert torch.equal(x, out)
    kernels.fails("reads 4 bytes at offset 124 of a tensor of 124 bytes", "copy_untyped", x[:31], out)


def test_misaligned_accesses(kernels):
    x, out = torch.randn(132), torch.empty(132)
    assert x.data_ptr() % 16 == out.data_ptr() % 16 == 0
    kernels("copy_by_16", x, out, n=4)
    assert torch.equal(out[4:], x[4:])
    message = r"16 bytes at offset \d+ of a tensor of \d+ bytes, an address that is no multiple of 16"
    kernels.fails("reads " + message, "copy_by_16", x, out, n=1)
    kernels.fails("writes " + message, "copy_by_16", x, out[1:129])


def test_accesses_of_16_bytes_are_counted(kernels):
    before = kernels.counters().all
    kernels("copy_by_16", torch.randn(128), torch.empty(128))
    kernels("copy_valid", torch.randn(128), torch.empty(128), n=64, shared=512)
    counts = kernels.counters().all - before
    assert (counts.launches, counts.wide_accesses, counts.other_accesses) == (2, 64 + 16, 128)
    assert (kernels.counters().last.wide_accesses, kernels.counters().last.other_accesses) == (16, 128)


def test_what_load_16_reads_is_not_written_to(kernels):
    """The whole tensor, or part of it, in whichever order; what another launch reads can be."""
    x = torch.randn(160)
    message = r"copy_by_16: block \(0, 0\), thread \d+: writes to a tensor that load_16 has read, which takes it for"
    kernels.fails(message, "copy_by_16", x[:128], x[:128])
    kernels.fails(message, "copy_by_16", x[:128], x[32:])
    kernels.fails("load_16 reads a tensor that was written to", "write_then_load_16", x[:128])
    out = torch.empty(128)
    kernels("copy_by_16", x[:128], out)
    kernels("copy_by_16", out, x[32:])
    assert torch.equal(x[32:], out)
    kernels("double_values", x, x, n=160, grid=(5, 1))
    assert torch.equal(x[32:], 2 * out)


@seeds
def test_indices_outside_of_arrays_in_registers(seeded):
    out = of_zeros(32)
    seeded("index_local", out, n=3)
    assert torch.equal(out[:4], torch.tensor([0.0, 1.0, 2.0, 7.0]))
    for n in (4, -1, 2**40):
        message = (
            rf"index_local: block \(0, 0\), thread \d+: index {n} is outside of an array 'float ?\[4\]' \(accesses.cu"
        )
        seeded.fails(message, "index_local", out, n=n)


def test_accesses_behind_a_piece_of_shared_memory(kernels):
    out = of_zeros(128)
    kernels("touch_shared", out, n=127, threads=128, shared=1024)
    assert torch.equal(out, torch.full((128,), 127.0))
    message = "at offset 512 of a piece of shared memory of 512 bytes"
    kernels.fails(message, "touch_shared", out, n=128, threads=128, shared=1024)


def test_too_little_shared_memory(kernels):
    message = "takes 512 bytes of shared memory behind 512 that are taken; the launch has 1023"
    kernels.fails(message, "touch_shared", of_zeros(128), n=0, threads=128, shared=1023)


def test_the_limit_of_shared_memory(kernels):
    def runs_up_to(most):
        kernels("touch_shared", of_zeros(32), shared=most)
        message = f"asks for {most + 1} bytes of shared memory, a block can have {most}"
        kernels.fails(message, "touch_shared", of_zeros(32), shared=most + 1)

    runs_up_to(99 * 1024)
    with kernels.shared_limit(227 * 1024):
        runs_up_to(227 * 1024)
    runs_up_to(99 * 1024)


def test_pieces_of_different_sizes(kernels):
    message = "bytes of shared memory at 0 as piece 0, another thread takes"
    kernels.fails(message, "take_different_sizes", of_zeros(32), shared=64)


@pytest.mark.parametrize("dtype", ["float", "half", "bfloat16"])
def test_unwritten_shared_memory_is_nan(kernels, dtype):
    out = of_zeros(32, getattr(torch, dtype))
    kernels(f"read_unwritten_{dtype}", out, shared=128)
    assert out.isnan().all()


def test_unwritten_locals_are_no_numbers_to_count_on(kernels):
    if not cuda_build._accepts("-ftrivial-auto-var-init=pattern"):
        pytest.skip("the compiler leaves locals as they are")
    out = of_zeros(32)
    kernels("use_local", out, n=4)
    assert (out == 1).all()
    kernels("use_local", out, n=0)
    assert (out.abs() > 1e30).all()


def test_offsets_of_more_than_32_bits(kernels):
    """A row offset in 32 bits, in the last block of a grid over 2^31 elements, which nothing else touches."""
    width, rows = 4096, 2**31 // 4096 + 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    x = torch.frombuffer(mmap.mmap(-1, 2 * width * rows, flags=flags), dtype=torch.float16).view(rows, width)
    x[-1, :32] = torch.arange(32)
    out = of_zeros(32, torch.float16)
    with kernels.only_blocks(rows - 1, 5):
        kernels("read_row_int64", x, out, n=width, grid=(rows, 1))
        assert kernels.counters().last.blocks == 1
        assert torch.equal(out, x[-1, :32])
        with pytest.raises(KernelError, match=r"block \(524288, 0\).*reads 2 bytes at offset -42949672\d\d of"):
            kernels("read_row_int", x, out, n=width, grid=(rows, 1))


@pytest.mark.parametrize(
    ("grid", "threads", "message"),
    [
        ((2**31, 1), 32, r"double_values: needs a grid of \(2147483648, 1\), CUDA takes \(2147483647, 65535\)"),
        ((1, 65536), 32, r"needs a grid of \(1, 65536\)"),
        ((0, 1), 32, "the grid is empty"),
        ((1, 1), 1025, "1025 threads in a block"),
    ],
)
def test_limits_of_a_launch(kernels, grid, threads, message):
    x = torch.ones(1)
    kernels.fails(message, "double_values", x, x.clone(), grid=grid, threads=threads)


def test_the_seed_decides_the_order(kernels):
    def order(seed):
        count, out = of_zeros(1, torch.int32), of_zeros(512)
        with kernels.seed(seed):
            kernels("record_order", count, out, grid=(4, 1), threads=128)
        assert torch.equal(out.sort().values, torch.arange(512.0))
        return out

    assert torch.equal(order(0), order(0))
    orders = [order(seed) for seed in SEEDS]
    assert not any(torch.equal(orders[i], orders[i - 1]) for i in range(len(orders)))
    assert not any(torch.equal(o[:128].sort().values, torch.arange(128.0)) for o in orders[:2])


def test_launches_of_several_threads(kernels):
    def run(i):
        x, out = torch.full((256,), float(i)), torch.empty(256)
        for _ in range(20):
            kernels("double_values", x, out, n=256, grid=(2, 1), threads=128)
        return (out == 2 * i).all().item()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(8)))


REVERSED = {"block": 128, "warp": 32}


def reverse(kernels, name, of):
    """What the kernel made of it, and what it should have made."""
    x, out = torch.randn(128), torch.empty(128)
    kernels(name, x, out, n=REVERSED[of], threads=128, shared=512)
    return out, x + 1


@seeds
@pytest.mark.parametrize("of", REVERSED)
def test_barriers(seeded, of):
    out, expected = reverse(seeded, f"reverse_in_{of}", of)
    assert torch.equal(out, expected)


MISSING = [
    ("reverse_without_first", "block", "reads offset .* thread .* wrote|writes offset .* thread .* read"),
    ("reverse_without_second", "block", "reads offset .* thread .* wrote|writes offset .* thread .* read"),
    ("reverse_in_warp", "block", "reads offset .* thread .* wrote|writes offset .* thread .* read"),
    ("reverse_without_first", "warp", "reads offset .* thread .* wrote|writes offset .* thread .* read"),
    ("reverse_in_warp_without_second", "warp", "reads offset .* thread .* wrote|writes offset .* thread .* read"),
]


@seeds
@pytest.mark.parametrize(("name", "of", "message"), MISSING)
def test_missing_barriers_are_races(seeded, name, of, message):
    with pytest.raises(KernelError, match=f"({message}) with no barrier between"):
        reverse(seeded, name, of)


@pytest.mark.parametrize(("name", "of", "message"), MISSING)
def test_missing_barriers_show_in_results(kernels, name, of, message):
    wrong = 0
    for seed in SEEDS:
        with kernels.seed(seed), kernels.races_allowed():
            out, expected = reverse(kernels, name, of)
        wrong += not torch.equal(out, expected)
    assert wrong > 0


@seeds
def test_shuffles_are_no_barriers(seeded):
    x, out = torch.randn(64), torch.empty(64)
    seeded.fails("with no barrier between", "reverse_behind_shuffle", x, out, threads=64, shared=256)


@seeds
def test_a_race_without_a_wrong_result(seeded):
    out = of_zeros(32)
    seeded("add_in_turns", out, n=4, threads=128, shared=128)
    assert (out == 10).all()
    seeded.fails("with no barrier between", "add_in_turns", out, n=2, threads=128, shared=128)


@seeds
def test_barriers_that_not_all_come_to(seeded):
    seeded("barrier_for_some", n=128, threads=128)
    message = r"exits while \d+ threads wait at sync_threads \(barriers.cu:\d+\)|\d+ threads have exited"
    seeded.fails(message, "barrier_for_some", n=127, threads=128)
    seeded("barriers_apart", n=128, threads=128)
    seeded.fails(r"waits at sync_threads \(barriers.cu:\d+\) while others wait at", "barriers_apart", n=64, threads=128)


@seeds
def test_named_barriers(seeded):
    x, out = torch.randn(4, 32), torch.empty(4, 32)
    seeded("hand_over", x, out, threads=64, shared=128)
    assert torch.equal(out, x.flip(1))


@seeds
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (1, r"deadlock: 32 threads wait at named_barrier_sync \(barriers.cu:\d+\), 32 have exited"),
        (2, r"deadlock: 32 threads wait at named_barrier_sync \(.*\), 32 threads wait at named_barrier_sync"),
        (3, r"takes (32|64) threads, but another thread said (32|64) for barrier 1|deadlock"),
        (4, "comes to barrier 1 again|with no barrier between|deadlock"),
    ],
)
def test_mistakes_with_named_barriers(seeded, mistake, message):
    seeded.fails(message, "hand_over", torch.randn(4, 32), torch.empty(4, 32), n=mistake, threads=64, shared=128)


@seeds
def test_barriers_take_whole_warps(seeded):
    seeded("half_a_warp", n=32, threads=64)
    seeded.fails("barrier 1 in divergent code: of warp 0 only lanes", "half_a_warp", n=16, threads=64)
    seeded.fails("takes whole warps", "half_a_warp", n=16, threads=16)


@seeds
def test_operations_of_a_warp(seeded):
    x, out = torch.randn(64), torch.empty(5, 64)
    seeded("each_operation", x, out, threads=64)
    lanes = torch.arange(32)
    for warp in range(2):
        value, got = x[32 * warp :][:32], out[:, 32 * warp :][:, :32]
        assert torch.equal(got[0], value[(32 * warp + lanes) * 7 + 3 & 31])
        assert torch.equal(got[1], value[lanes ^ 5])
        assert torch.equal(got[2], value[torch.where(lanes + 9 < 32, lanes + 9, lanes)])
        votes = sum(int(value[lane] > 0) << lane for lane in range(32))
        assert (got[3] == votes >> 8).all()
        assert torch.equal(got[4], value[lanes ^ 16].half().float())


@seeds
@pytest.mark.parametrize(
    ("name", "right", "wrong", "message"),
    [
        ("some_lanes", 0xFF0, 0xFF1, "reads from lane 1, which the mask 0x00000ff1 leaves out"),
        ("everybody", 2**32 - 1, 0xFFFF, "the mask 0x0000ffff leaves the caller out"),
        (
            "first_lane_exits",
            2**32 - 2,
            2**32 - 1,
            "lanes 0x00000001, which have exited|waits for it at shuffle",
        ),
        ("masks_differ", 2**32 - 1, 0xFFFF, "lanes of one warp disagree|have exited|waits for it at shuffle"),
    ],
)
def test_masks(seeded, name, right, wrong, message):
    x, out = torch.randn(32), of_zeros(32)
    seeded(name, x, out, n=right)
    seeded.fails(message, name, x, out, n=wrong)


@seeds
def test_masks_name_lanes_of_the_block(seeded):
    x, out = torch.randn(32), of_zeros(32)
    seeded("everybody", x, out, n=0xFFFF, threads=16)
    seeded.fails("has lanes that the block has not", "everybody", x, out, n=2**32 - 1, threads=16)


@seeds
def test_numbers_that_only_seem_uniform(seeded):
    x, out = torch.tensor([3.0, 5.0]).repeat_interleave(32), torch.zeros(64)
    seeded("uniform_of", x, out, threads=64)
    assert torch.equal(out, x)
    x[40] = 6.0
    seeded.fails(r"uniform \(warps.cu:\d+\) is given 6, but by lane 0 5", "uniform_of", x, out, threads=64)


@seeds
def test_operations_that_do_not_meet(seeded):
    seeded.fails("lanes of one warp disagree: (shuffle|sync_warp)", "operations_differ", of_zeros(32))
    message = r"deadlock: 2 threads wait at sync_threads \(.*\), 62 threads wait at sync_warp"
    seeded.fails(message, "warps_wait_crosswise", of_zeros(64), threads=64)


def bank_conflicts(kernels, *arguments, **options):
    kernels(*arguments, **options)
    return kernels.counters().last[3:5]


@seeds
@pytest.mark.parametrize(("layout", "conflicts"), [("plain", 32 * 31), ("padded", 0), ("swizzled", 0)])
def test_bank_conflicts_of_a_transposition(seeded, layout, conflicts):
    x, out = torch.randn(32, 32), torch.empty(32, 32)
    counted = bank_conflicts(seeded, f"transpose_{layout}", x, out, shared=4 * 33 * 32)
    assert torch.equal(out, x.T)
    assert counted == (64, conflicts)


@pytest.mark.parametrize(
    ("bytes_each", "apart", "conflicts"),
    [
        # Wavefronts beyond one, and beyond one for each quarter or half of a warp.
        (4, 0, 0), (4, 4, 0), (4, 8, 1), (4, 12, 0), (4, 128, 31),
        (8, 0, 0), (8, 8, 0), (8, 16, 2 * 1), (8, 24, 0), (8, 128, 2 * 15),
        (16, 0, 0), (16, 16, 0), (16, 32, 4 * 1), (16, 48, 0), (16, 128, 4 * 7),
    ],
)  # fmt: skip
def test_bank_conflicts_by_width(kernels, bytes_each, apart, conflicts):
    out = of_zeros(32 * 4)
    shared = 32 * apart + 16
    assert bank_conflicts(kernels, f"read_{bytes_each}_apart", out, n=apart, shared=shared) == (1, conflicts)


# Fragments by the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and "ldmatrix": (row, column)
# of element i of lane's registers, two elements to a register of 16-bit ones.


def place_in_a(lane, i):
    group, thread_in_group = lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    column = thread_in_group * 2 + (i & 1) if i < 4 else thread_in_group * 2 + (i & 1) + 8
    return row, column


def place_in_b(lane, i):
    group, thread_in_group = lane >> 2, lane % 4
    return thread_in_group * 2 + (i & 1) + (0 if i < 2 else 8), group


def place_in_c(lane, i):
    group, thread_in_group = lane >> 2, lane % 4
    return group if i < 2 else group + 8, thread_in_group * 2 + (i & 1)


def fragment(matrix, place, count):
    """Elements of all lanes' registers, (32, count)."""
    return torch.stack([torch.stack([matrix[place(lane, i)] for i in range(count)]) for lane in range(32)])


@seeds
@pytest.mark.parametrize("dtype", ["half", "bfloat16"])
def test_fragments_of_a_product(seeded, dtype):
    # Small integers: every sum is exact in any order.
    a, b, c = (torch.randint(-8, 9, shape).float() for shape in ((16, 16), (16, 8), (16, 8)))
    registers = [
        fragment(x.to(getattr(torch, dtype)), place, count).contiguous()
        for x, place, count in ((a, place_in_a, 8), (b, place_in_b, 4))
    ]
    result = fragment(c, place_in_c, 4).contiguous()
    seeded(f"product_{dtype}", *registers, result)
    assert torch.equal(result, fragment(a @ b + c, place_in_c, 4))
    assert seeded.counters().last.products == 1


@seeds
@pytest.mark.parametrize("kind", ["plain", "transposed"])
def test_fragments_of_loaded_matrices(seeded, kind):
    matrices = torch.arange(4 * 64, dtype=torch.float16).view(4, 8, 8)
    out = torch.empty(32, 4, 2, dtype=torch.float16)
    seeded(f"fragments_{kind}", matrices, out, shared=512)
    for lane in range(32):
        for i in range(4):
            for j in range(2):
                row, column = lane // 4, lane % 4 * 2 + j
                expected = matrices[i, row, column] if kind == "plain" else matrices[i, column, row]
                assert out[lane, i, j] == expected


GEMM = dict(threads=128, shared=2 * 2 * (64 * 40 + 32 * 72))


def gemm_inputs(dtype, m=64, n=128, k=128):
    return torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.full((m, n), float("nan"))


@seeds
@pytest.mark.parametrize("dtype", ["half", "bfloat16"])
@pytest.mark.parametrize("k", [32, 128])
def test_a_matrix_product(seeded, dtype, k):
    a, b, out = gemm_inputs(getattr(torch, dtype), k=k)
    seeded(f"multiply_{dtype}", a, b, out, n=k, grid=(2, 1), **GEMM)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    # Pairs of rows of a's tile, written by a quarter-warp, overlap in 4 banks; all else is free of conflicts.
    assert seeded.counters().last.conflicts == 2 * k // 32 * 32


def test_eight_products_are_added_at_once(kernels):
    """Each alone would be lost beside 2^24."""
    a, b, out = torch.zeros(64, 32).half(), torch.zeros(32, 128).half(), torch.full((64, 128), float("nan"))
    a[:, 0], b[0] = 2.0**12, 2.0**12
    a[:, 8:16], b[8:16] = 0.5, 0.5
    kernels("multiply_half", a, b, out, n=32, grid=(2, 1), **GEMM)
    assert out.eq(2**24 + 2).all()


MISTAKES = {
    "without_wait": "nan",
    "waiting_for_too_few": "nan",
    "without_barrier_behind_wait": "with no barrier between",
    "without_barrier_before_refill": "with no barrier between",
    "with_last_not_awaited": "exits with 4 asynchronous copies that it never waited for",
}


@seeds
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_with_asynchronous_copies(seeded, mistake):
    a, b, out = gemm_inputs(torch.half)
    arguments = (f"multiply_{mistake}", a, b, out)
    if MISTAKES[mistake] == "nan":
        seeded(*arguments, n=128, grid=(2, 1), **GEMM)
        assert out.isnan().any()
    else:
        seeded.fails(MISTAKES[mistake], *arguments, n=128, grid=(2, 1), **GEMM)


@pytest.mark.parametrize("mistake", ["without_barrier_behind_wait", "without_barrier_before_refill"])
def test_missing_barriers_of_copies_show_in_results(kernels, mistake):
    wrong = 0
    for seed in SEEDS:
        a, b, out = gemm_inputs(torch.half)
        with kernels.seed(seed), kernels.races_allowed():
            kernels(f"multiply_{mistake}", a, b, out, n=128, grid=(2, 1), **GEMM)
        wrong += bool(out.isnan().any())
    assert wrong > 0


@pytest.mark.parametrize(("name", "size"), [("copy_valid", 16), ("copy_valid_4", 4)])
def test_copies_of_nothing_are_zeros(kernels, name, size):
    x, out = torch.randn(64), torch.empty(128)
    kernels(name, x, out, n=64, shared=512)
    assert torch.equal(out, torch.cat([x, torch.zeros(64)]))
    kernels.fails(f"reads {size} bytes at offset 256 of a tensor of 256", name, x, out, n=65, shared=512)


def words(*rows):
    """Unsigned numbers of 32 bits, as hexadecimal text, in a signed tensor."""
    return torch.tensor([[int(word, 16) for word in row.split()] for row in rows]).to(torch.int32)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        # Random123's known answers for philox4x32-10.
        ("0 0", "0 0 0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff", "ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("a4093822 299f31d0", "243f6a88 85a308d3 13198a2e 03707344", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_words_of_philox(kernels, key, counter, expected):
    out = torch.empty(1, 4, dtype=torch.int32)
    kernels("philox_words", words(counter), words(key), out, threads=1)
    assert torch.equal(out, words(expected))


@pytest.mark.parametrize("first", [0, 2**31 - 1, 2**32 - 2, 5 * 2**32 - 1])
def test_rows_of_dropout(kernels, first):
    """Also those whose number has a high word."""
    seed, out = torch.tensor([-(2**40) - 7]), torch.empty(3, 128)
    kernels("drop_half_of_ones", seed, out, n=first, grid=(3, 1))
    rows, quads = torch.arange(first, first + 3)[:, None], torch.arange(32)
    stream = torch.tensor(dropout.STREAMS["feed_forward"])
    drawn = torch.stack(dropout.philox(seed, (quads, rows & 0xFFFFFFFF, rows >> 32, stream)), -1).flatten(1)
    assert torch.equal(out, 2.0 * (drawn >= 2**31))


@pytest.mark.parametrize("fibers", ["boost", "ucontext"])
def test_both_kinds_of_fibers(fibers, monkeypatch):
    if fibers == "ucontext":
        monkeypatch.setattr(cuda_build, "has_boost", lambda: False)
    elif not cuda_build.has_boost():
        pytest.skip("Boost.Context is not installed")
    kernels = Kernels(cuda_build.build([KERNELS / f"{n}.cu" for n in ("accesses", "barriers")], "fibers"))
    for seed in SEEDS:
        with kernels.seed(seed):
            for of in REVERSED:
                out, expected = reverse(kernels, f"reverse_in_{of}", of)
                assert torch.equal(out, expected)
            kernels.fails("threads wait at sync_threads|have exited", "barrier_for_some", n=127, threads=128)
            kernels.fails("deadlock", "hand_over", torch.randn(4, 32), torch.empty(4, 32), n=1, threads=64, shared=128)


@pytest.fixture(scope="module")
def doubled():
    schemas = torch.library.Library("bertfast_cuda_on_cpu", "DEF")
    schemas.define("doubled(Tensor x, Tensor? bias, int width) -> Tensor")
    sources = [KERNELS / "op.cpp", KERNELS / "doubled.cu"]
    torch.ops.load_library(cuda_build.build(sources, "op", linked=cuda_build.with_torch()))
    yield torch.ops.bertfast_cuda_on_cpu.doubled
    schemas._destroy()


def test_an_op_names_its_tensors(doubled):
    x, bias = torch.randn(5, 100)[:, 3:80], torch.randn(77)
    assert torch.equal(doubled(x, None, 77), 2 * x)
    assert torch.equal(doubled(x, bias, 77), 2 * x + bias)
    assert doubled(x[:0], None, 77).shape == (0, 77)
    with pytest.raises(RuntimeError, match=r"doubled: block .*reads 4 bytes at offset 1908 of a tensor of 1908 bytes"):
        doubled(x, None, 78)
    with pytest.raises(RuntimeError, match=r"reads 4 bytes at offset 304 of a tensor of 304 bytes"):
        doubled(x, bias[:76], 77)


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(cuda_build.CannotBuild, match="need a C\\+\\+ compiler, there is no no-such-compiler"):
        cuda_build.build([KERNELS / "accesses.cu"], "cases")


def test_without_headers(monkeypatch):
    cuda_build._headers.cache_clear()
    monkeypatch.setattr(cuda_build, "find_spec", lambda name: None)
    with pytest.raises(cuda_build.CannotBuild, match=re.escape("<cuda_fp16.h>: pip install triton")):
        cuda_build._headers()
    cuda_build._headers.cache_clear()


def test_files_of_the_package_can_be_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_build, "BUILT", tmp_path / "built")
    changed = tmp_path / "changed.cuh"
    changed.write_text("// changed\n")
    folder = cuda_build._overlaid({"reduce.cuh": changed})
    assert folder == cuda_build._overlaid({"reduce.cuh": changed})
    for path in cuda_build.KERNELS.iterdir():
        expected = changed if path.name == "reduce.cuh" else path
        assert (folder / path.name).read_bytes() == expected.read_bytes()
    with pytest.raises(ValueError, match="csrc/cuda has no nonsense.cuh"):
        cuda_build._overlaid({"nonsense.cuh": changed})


def test_objects_are_built_once(tmp_path, monkeypatch):
    """And anew where a header changed."""
    monkeypatch.setattr(cuda_build, "BUILT", tmp_path)
    source = tmp_path / "one.cu"
    source.write_text('#include "one.h"\n')
    header = tmp_path / "one.h"
    header.write_text("int one() { return 1; }\n")
    first = cuda_build._object(source, (), ())
    assert cuda_build._object(source, (), ()) == first
    assert cuda_build._object(source, (), ("-DTWO",)) != first
    header.write_text("int one() { return 2; }\n")
    assert cuda_build._object(source, (), ()) != first
    source.write_text("nonsense\n")
    with pytest.raises(cuda_build.CannotBuild, match="nonsense"):
        cuda_build._object(source, (), ())
    assert not list(tmp_path.glob("*.part"))


def test_what_a_mutant_leaves_alone_is_not_built_again(tmp_path, monkeypatch):
    """Its headers lie beside it, and those of the emulator find their own copies beside the mutant."""
    folders = [tmp_path / name for name in ("kernels", "mutant", "emulator", "built")]
    for folder in folders:
        folder.mkdir()
    kernels, mutant, emulator, built = folders
    monkeypatch.setattr(cuda_build, "BUILT", built)
    for folder in (kernels, mutant):
        (folder / "limits_of_all.h").write_text("#pragma once\nint limit();\n")
    (emulator / "emulator_of_all.h").write_text('#pragma once\n#include "limits_of_all.h"\n')
    source = kernels / "one.cu"
    source.write_text('#include "limits_of_all.h"\n#include "emulator_of_all.h"\n')
    first = cuda_build._object(source, (kernels, emulator), ())
    assert cuda_build._object(source, (mutant, emulator), ()) == first
