"""int8 products: against their arithmetic in float64, step by step, and what must not become a plausible number."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bertfast.ops import quantized_linear as int8
from helpers.op_cases import DTYPES, random
from helpers.poison import LAYOUTS, poisoned_memory  # noqa: F401
from helpers.tolerance import accumulation_roundoff, assert_error_within, unit_roundoff

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(int8.unavailable() is not None, reason=f"no int8: {int8.unavailable()}"),
]

ROOT = Path(__file__).parents[1]
SHAPES = [(48,), (1, 1), (7, 33), (2, 9, 64), (1, 130, 768), (3, 17)]
ACC = accumulation_roundoff(torch.float32)
STEP = 0.5 + 2.0**-14  # half a step, and what fp32 makes of 255 of them


def numbers(*shape, dtype=torch.float32, seed=0, shift=0.0, scale=1.0):
    return random(*shape, dtype=dtype, seed=seed, shift=shift, scale=scale, grad=False)


def packed(weight):
    quantized = int8.quantize_weight(weight)
    return quantized._replace(values=int8.prepack(quantized.values))


def rows_of(values, affine):
    """What quantised rows stand for, in float64, and the size of their steps."""
    scale, shift = affine.double().unsqueeze(-1)
    return scale * (values.double() - 128) + shift, scale


def assert_quantized(values, affine, exact, noise=None):
    noise = torch.zeros_like(exact) if noise is None else noise
    rows, scale = rows_of(values, affine)
    assert_error_within(rows, exact, 0.0, STEP * scale + noise, "rows")
    span = exact.amax(1).clamp(min=0) - exact.amin(1).clamp(max=0)
    assert_error_within(affine[0], span / 255, 0.0, 4 * ACC * span / 255 + noise.amax(1), "scale")


def simulated(values, affine, quantized, bias):
    """The exact result for quantised rows and weight, and the rounding that fp32 may show behind the integer sum."""
    scale, shift = affine.double().unsqueeze(-1)
    t, w = quantized.scale.double(), quantized.values.double()
    product = scale * t * ((values.double() - 128) @ w.t())
    rest = shift * t * w.sum(1)
    bias = torch.zeros(()) if bias is None else bias.double()
    return product + rest + bias, 4 * ACC * (product.abs() + rest.abs() + bias.abs())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shift", [-3.0, 0.0, 0.5, 40.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(dtype, shape, shift, layout):
    x = LAYOUTS[layout](numbers(*shape, dtype=dtype, shift=shift))
    values, affine = int8.QUANTIZE_ROWS(x)
    assert_quantized(values, affine, x.double().reshape(-1, shape[-1]))


def test_zero_stays_zero():
    x = numbers(50, 33, shift=1.0)
    x[:, ::4] = 0.0
    rows, scale = rows_of(*int8.QUANTIZE_ROWS(x))
    assert_error_within(rows[:, ::4], torch.zeros(50, 9).double(), 0.0, 256 * ACC * scale, "zeros")


@pytest.mark.parametrize("shape", [(5, 7), (40, 768), (1, 1), (33, 130)], ids=str)
def test_weights(shape):
    weight = numbers(*shape)
    values, scale, total = int8.quantize_weight(weight)
    exact = weight.double()
    assert_error_within(values.double() * scale.double()[:, None], exact, 0.0, STEP * scale.double()[:, None], "weight")
    assert values.abs().amax(1).eq(127).all()
    assert torch.equal(total, values.sum(1) * scale)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 5), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype, shape, bias):
    x, weight = numbers(*shape, dtype=dtype, shift=0.3), numbers(40, shape[-1], dtype=dtype, seed=1)
    bias = numbers(40, dtype=dtype, seed=2) if bias else None
    out = int8.linear(x, packed(weight), bias)
    exact, noise = simulated(*int8.QUANTIZE_ROWS(x), int8.quantize_weight(weight), bias)
    assert out.dtype == dtype and out.shape == (*shape[:-1], 40)
    stored = unit_roundoff(dtype) * exact.abs() + torch.finfo(dtype).tiny
    assert_error_within(out.reshape(-1, 40), exact, 0.0, noise + stored, "out")


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("shift", [0.0, -6.0, 6.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_feed_forward(dtype, shift, activation):
    x, w_in, w_out = numbers(2, 9, 48, dtype=dtype), numbers(70, 48, seed=1, scale=0.2), numbers(48, 70, seed=2)
    b_in, b_out = numbers(70, dtype=dtype, seed=3, shift=shift), numbers(48, dtype=dtype, seed=4)
    values, affine = int8.QUANTIZE_ROWS(x)
    first = packed(w_in)
    exact, noise = simulated(values, affine, int8.quantize_weight(w_in), b_in)
    product = int8._product(values, first.values, first.scale)
    middle = int8.SCALE_ROWS_ACTIVATION(product, affine, first.sum, b_in, activation)
    form = "tanh" if activation == "gelu_tanh" else "none"
    # A GELU's slope is below 1.13.
    assert_quantized(*middle, F.gelu(exact, approximate=form), 1.13 * noise + 4 * ACC * exact.abs())
    out = int8.feed_forward(x, first, b_in, packed(w_out), b_out, activation)
    exact, noise = simulated(*middle, int8.quantize_weight(w_out), b_out)
    stored = unit_roundoff(dtype) * exact.abs()
    assert_error_within(out.reshape(-1, 48), exact, 0.0, noise + stored, "out")


def test_sums_of_the_largest_values():
    """Pairs of products would saturate in 16 bits, and single floats would not hold the sum."""
    x = torch.full((3, 4096), 255, dtype=torch.uint8)
    w = torch.full((32, 4096), 127, dtype=torch.int8)
    product = int8._product(x, int8.prepack(w), torch.ones(32))
    assert torch.equal(product, torch.full((3, 32), 127.0 * 127 * 4096))


NAN = torch.tensor([0x7FC00000, 0xFFC00000 - 2**32, 0x7F800001, 0xFF800001 - 2**32], dtype=torch.int32)


@pytest.mark.parametrize("bad", [*NAN.view(torch.float32).tolist(), math.inf, -math.inf])
@pytest.mark.parametrize("width", [1, 7, 33, 64])
def test_nan_and_infinity_spoil_their_row_and_no_other(width, bad):
    x, weight, bias = numbers(4, width), packed(numbers(5, width, seed=1)), numbers(5, seed=2)
    expected = int8.linear(x, weight, bias)
    x[2, width // 2] = bad
    out = int8.linear(x, weight, bias)
    assert out[2].isnan().all() and torch.equal(out[[0, 1, 3]], expected[[0, 1, 3]])
    out = int8.feed_forward(x, weight, bias, packed(numbers(3, 5)), None, "gelu")
    assert out.isnan().any(1).tolist() == [False, False, True, False]


def test_every_pattern_of_nan_is_seen():
    for pattern in NAN:
        x = torch.zeros(1, 40)
        x.view(torch.int32)[0, 17] = pattern
        assert int8.QUANTIZE_ROWS(x)[1][0].isnan().all()


def test_weights_that_are_not_finite_spoil_their_output_and_no_other():
    x, weight = numbers(4, 33), numbers(5, 33, seed=1)
    expected = int8.linear(x, packed(weight), None)
    weight[1, 3], weight[4, 0] = math.nan, math.inf
    out = int8.linear(x, packed(weight), None)
    assert out[:, [1, 4]].isnan().all() and torch.equal(out[:, [0, 2, 3]], expected[:, [0, 2, 3]])


def test_zeros_and_denormals_give_the_bias():
    bias = numbers(5)
    x = torch.zeros(3, 40)
    x[1], x[2, 4] = 1e-42, -1e-45
    assert torch.equal(int8.linear(x, packed(numbers(5, 40)), bias), bias.expand(3, 5))
    weight = torch.zeros(5, 40)
    weight[1], weight[2, 4] = 1e-42, -1e-45
    assert torch.equal(int8.linear(numbers(3, 40), packed(weight), bias), bias.expand(3, 5))


def test_the_ends_of_the_range():
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[largest, -largest, 0.0, 1.0], [largest, 0.0, 0.0, 0.0], [-largest, -1.0, 0.0, 0.0]])
    values, affine = int8.QUANTIZE_ROWS(x)
    assert_quantized(values, affine, x.double())
    # Half a step beyond both ends, which must not wrap around.
    x = torch.tensor([[-126.5, 128.5, 0.0], [-127.5, 127.5, 1.0], [-0.5, 254.5, 3.0]])
    for scale in (1.0, 0.1, 3.7, 1e-30):
        values, affine = int8.QUANTIZE_ROWS(x * scale)
        assert_quantized(values, affine, (x * scale).double())


def test_wrong_arguments():
    product, affine, total = torch.zeros(3, 5), torch.zeros(2, 3), torch.zeros(5)
    with pytest.raises(RuntimeError, match="x: expected float32"):
        int8.QUANTIZE_ROWS(torch.zeros(3, 5, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="product: expected a contiguous float32 matrix"):
        int8.SCALE_ROWS(product.t(), affine, total, None, torch.float32)
    with pytest.raises(RuntimeError, match="affine: expected one value per row"):
        int8.SCALE_ROWS(product, affine[:1], total, None, torch.float32)
    with pytest.raises(RuntimeError, match=r"sum: expected shape \(5\), got \(4\)"):
        int8.SCALE_ROWS(product, affine, total[:4], None, torch.float32)
    with pytest.raises(RuntimeError, match=r"bias: expected shape \(5\)"):
        int8.SCALE_ROWS_ACTIVATION(product, affine, total, torch.zeros(3), "gelu")
    with pytest.raises(RuntimeError, match="got gleu"):
        int8.SCALE_ROWS_ACTIVATION(product, affine, total, None, "gleu")
    with pytest.raises(RuntimeError, match="dtype: expected float32"):
        int8.SCALE_ROWS(product, affine, total, None, torch.float64)


def test_bitwise_the_same_with_any_number_of_threads():
    x, b = numbers(300, 130), numbers(96, seed=3)
    w_in, w_out = packed(numbers(96, 130, seed=1)), packed(numbers(130, 96, seed=2))
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append((int8.linear(x, w_in, b), int8.feed_forward(x, w_in, b, w_out, None, "gelu")))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets(isa):
    """Of the rows; oneDNN chooses for itself."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/test_quantized_linear.py"]
    environment = {**os.environ, "BERTFAST_CPU_ISA": isa}
    done = subprocess.run(
        [*command, "-k", "not instruction"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (AttributeError("no operator qlinear_pointwise"), "private to PyTorch.*no operator"),
        (32767.0, "saturate"),
    ],
)
def test_why_there_is_none(monkeypatch, product, reason):
    def fails(*arguments):
        if isinstance(product, Exception):
            raise product
        return torch.full((16, 32), product)

    monkeypatch.setattr(int8, "_product", fails)
    int8.unavailable.cache_clear()
    try:
        text = int8.unavailable()
    finally:
        int8.unavailable.cache_clear()
    assert re.search(reason, text), text
