"""What Triton's interpreter gets wrong, what it gets right and the tests of interpreted kernels build on, and what
`kernels/common.py` mends.

A failing test of the first kind is good news: that part of `kernels/common.py` has become superfluous.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from bertfast.dropout import dropout_mask, philox
from bertfast.kernels import common
from bertfast.kernels.launch import dropout_of
from helpers.op_cases import random

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is 0"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@triton.jit
def copy_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out_ptr + o, tl.load(x_ptr + o).to(out_ptr.dtype.element_ty))


@triton.jit
def double_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    b_x = tl.load(x_ptr + o)
    tl.store(out_ptr + o, b_x + b_x)


@triton.jit
def erf_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out_ptr + o, tl.erf(tl.load(x_ptr + o)))


@triton.jit
def exp2_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out_ptr + o, tl.exp2(tl.load(x_ptr + o)))


@triton.jit
def rsqrt_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out_ptr + o, 1.0 / tl.sqrt_rn(tl.load(x_ptr + o)))


@triton.jit
def store_cast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out_ptr + o, common.store_cast(tl.load(x_ptr + o), out_ptr.dtype.element_ty))


@triton.jit
def round_to_kernel(x_ptr, like_ptr, out_ptr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out_ptr + o, common.round_to(tl.load(x_ptr + o), like_ptr.dtype.element_ty))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, MENDED: tl.constexpr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    o_tile = o[:, None] * SIZE + o[None, :]
    b_acc = tl.load(out_ptr + o_tile)
    a, b = tl.load(a_ptr + o_tile), tl.load(b_ptr + o_tile)
    b_acc = common.dot(a, b, b_acc, "ieee") if MENDED else tl.dot(a, b, b_acc, input_precision="ieee")
    tl.store(out_ptr + o_tile, b_acc)


@triton.jit
def philox_kernel(seed_ptr, counter_ptr, out_ptr):
    c0, c1, c2, c3 = (tl.full((1,), tl.load(counter_ptr + i).to(tl.uint32), tl.uint32) for i in tl.static_range(4))
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), c0, c1, c2, c3)
    o = tl.arange(0, 1)
    tl.store(out_ptr + o, w0.to(tl.int64))
    tl.store(out_ptr + 1 + o, w1.to(tl.int64))
    tl.store(out_ptr + 2 + o, w2.to(tl.int64))
    tl.store(out_ptr + 3 + o, w3.to(tl.int64))


@triton.jit
def interleave_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    b_x = tl.load(x_ptr + o)
    tl.store(out_ptr + tl.arange(0, 2 * SIZE), tl.interleave(b_x, -b_x))


@triton.jit
def keep_mask_kernel(
    seed_ptr, out_ptr, row, column, last_dropped, STREAM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    o_m = tl.arange(0, BLOCK_M).to(tl.int64) + row
    keep = common.keep_mask(tl.load(seed_ptr), o_m, column, last_dropped, STREAM, BLOCK_M, BLOCK_N)
    o_tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(out_ptr + o_tile, keep.to(tl.int8))


@triton.jit
def descriptor_kernel(x_desc, out_desc, row, column):
    out_desc.store([row, column], x_desc.load([row, column]))


def run(kernel, x, dtype):
    out = torch.empty(x.shape, dtype=dtype)
    kernel[(1,)](x, out, x.numel())
    return out


def bits_of(x):
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def every_16_bit_number(dtype):
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def numbers_to_round():
    """Every bf16 number as fp32, subnormal, infinite and NaN ones among them, and what lies a quarter, a half and three
    quarters of the way to the next, next to the half and next to either end: 2^16 x 8 numbers."""
    high = torch.arange(2**16, dtype=torch.int64) << 16
    low = torch.tensor([0, 0x4000, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF, 1])
    return (high[:, None] + low).flatten().to(torch.int32).view(FP32)


# What is wrong.


def test_bf16_dot_multiplies_bit_patterns():
    a, b = random(16, 16, dtype=BF16, seed=0), random(16, 16, dtype=BF16, seed=1)
    out = torch.zeros(16, 16)
    dot_kernel[(1,)](a, b, out, False, 16)
    patterns = [x.detach().view(torch.uint16).double() for x in (a, b)]
    torch.testing.assert_close(out.double(), patterns[0] @ patterns[1], rtol=1e-4, atol=0)


def test_bf16_arithmetic_is_done_on_bit_patterns():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=BF16)
    assert not torch.equal(run(double_kernel, x, BF16), x + x)


def test_conversion_to_bf16_truncates():
    x = torch.tensor([1.0 + 2.0**-7 * (1 - 2.0**-10), -1.0 - 2.0**-8 * 1.5, 65504.0, 3.4e38])
    found = run(copy_kernel, x, BF16)
    assert torch.equal(bits_of(found).int(), bits_of(x) >> 16)
    assert not torch.equal(found, x.to(BF16))


def test_conversion_to_bf16_makes_other_numbers_of_subnormal_ones():
    x = torch.tensor([1e-39, 3e-39])
    error = (run(copy_kernel, x, BF16).double() - x.double()).abs()
    assert (error > 0.5 * x).all()


# What is right.


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_dot(dtype):
    a, b = (random(32, 32, dtype=dtype, seed=seed).detach() for seed in range(2))
    out = torch.ones(32, 32)
    dot_kernel[(1,)](a, b, out, False, 32)
    torch.testing.assert_close(out, (1 + a.double() @ b.double()).float(), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_conversion_to_fp32(dtype):
    x = every_16_bit_number(dtype)
    normal = (x == 0) | (x.abs() >= torch.finfo(dtype).smallest_normal)
    found = run(copy_kernel, x, FP32)
    assert torch.equal(found[normal], x.float()[normal])
    assert found[x.isnan()].isnan().all()


def test_conversion_to_fp16_rounds():
    x = numbers_to_round()[: 2**19].nan_to_num(nan=1.0, posinf=float("inf"), neginf=float("-inf"))
    assert torch.equal(run(copy_kernel, x, FP16), x.half())


@pytest.mark.parametrize(
    ("kernel", "function", "low", "high"),
    [
        (erf_kernel, torch.erf, -5, 5),
        (exp2_kernel, torch.exp2, -126, 127),
        (rsqrt_kernel, torch.rsqrt, 1e-30, 1e30),
    ],
)
def test_functions(kernel, function, low, high):
    x = torch.linspace(low, high, 2**12)
    torch.testing.assert_close(run(kernel, x, FP32), function(x.double()).float(), rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    ("seed", "counter", "words"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox(seed, counter, words):
    out = torch.empty(4, dtype=torch.int64)
    philox_kernel[(1,)](torch.tensor([seed]), torch.tensor(counter), out)
    assert tuple(out.tolist()) == words
    ours = philox(torch.tensor([seed]), tuple(torch.tensor([c]) for c in counter))
    assert tuple(int(word) for word in ours) == words


def test_interleave():
    x = torch.arange(1.0, 9.0)
    out = torch.empty(16)
    interleave_kernel[(1,)](x, out, 8)
    assert torch.equal(out, torch.stack([x, -x], dim=1).flatten())


def test_descriptors_read_zeros_and_write_nothing_beyond_a_tensor():
    x = torch.arange(1.0, 81.0, dtype=FP16).view(5, 16)[:, :8]
    buffer = torch.full((8, 16), -1.0, dtype=FP16)
    descriptor_kernel[(1,)](
        TensorDescriptor(x, list(x.shape), list(x.stride()), [4, 8]),
        TensorDescriptor(buffer, [7, 8], [16, 1], [4, 8]),
        4,
        0,
    )
    expected = torch.full((8, 16), -1.0, dtype=FP16)
    expected[4:7, :8] = 0
    expected[4, :8] = x[4]
    assert torch.equal(buffer, expected)


# What is mended.


def test_store_cast_rounds_to_nearest_even():
    x = numbers_to_round()
    found, expected = run(store_cast_kernel, x, BF16), x.to(BF16)
    number = ~x.isnan()
    assert torch.equal(bits_of(found)[number], bits_of(expected)[number])
    assert found[~number].isnan().all()


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_store_cast_to_other_types(dtype):
    x = torch.randn(2**12) * 1e4
    assert torch.equal(run(store_cast_kernel, x, dtype), x.to(dtype))


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_round_to_is_what_reads_back(dtype):
    x, out = torch.randn(2**12), torch.empty(2**12)
    round_to_kernel[(1,)](x, torch.empty(1, dtype=dtype), out, x.numel())
    assert torch.equal(out, x.to(dtype).float())


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_mended_dot(dtype):
    a, b = (random(32, 32, dtype=dtype, seed=seed).detach() for seed in range(2))
    out = torch.ones(32, 32)
    dot_kernel[(1,)](a, b, out, True, 32)
    torch.testing.assert_close(out, (1 + a.double() @ b.double()).float(), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("seed", [0, -1, 0x299F31D0A4093822])
def test_keep_mask(seed, dropout_p):
    seed, rows, columns = torch.tensor([seed]), 8, 32
    dropout, out = dropout_of(seed, dropout_p), torch.empty(rows, columns, dtype=torch.int8)
    keep_mask_kernel[(1,)](seed, out, 0, 0, dropout.last_dropped, 2, rows, columns)
    whole = dropout_mask(seed, (16, 64), dropout_p, "feed_forward")
    assert torch.equal(out.bool(), whole[:rows, :columns])
    keep_mask_kernel[(1,)](seed, out, 8, 32, dropout.last_dropped, 2, rows, columns)
    assert torch.equal(out.bool(), whole[8:, 32:])


def test_keep_mask_at_the_threshold():
    """Dropped are words below floor(p * 2**32), the last of which is handed over."""
    seed, out = torch.tensor([7]), torch.empty(1, 4, dtype=torch.int8)
    words = [int(word) for word in philox(seed, (torch.zeros(1, dtype=torch.int64),) * 4)]
    for i, word in enumerate(words):
        for last, kept in ((word, 0), (word - 1, 1)):
            keep_mask_kernel[(1,)](seed, out, 0, 0, last - 2**32 if last >= 2**31 else last, 0, 1, 4)
            assert out[0, i] == kept


def test_keep_mask_beyond_32_bits_of_rows():
    seed, out = torch.tensor([7]), torch.empty(2, 4, dtype=torch.int8)
    row, count = 2**32 + 5, dropout_of(seed, 0.5).last_dropped
    keep_mask_kernel[(1,)](seed, out, row, 4, count, 3, 2, 4)
    for i in range(2):
        words = philox(seed, tuple(torch.tensor([c]) for c in (1, 5 + i, 1, 3)))
        assert out[i].tolist() == [int(word >= 2**31) for word in words]
