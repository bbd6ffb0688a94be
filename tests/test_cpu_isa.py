"""The CPU kernels on every instruction set that the machine has, and with any number of threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bertfast import ops
from bertfast.ops._library import extension_unavailable
from helpers.op_cases import random, seed_tensor

pytestmark = pytest.mark.skipif(extension_unavailable() is not None, reason="the extension is not built")

ROOT = Path(__file__).parents[1]
OPS = ("attention", "varlen_attention", "layer_norm", "embed_layer_norm", "linear_gelu", "activations")
CASES = (
    "test_head_dims",
    "test_lengths",
    "test_float_masks",
    "test_a_bias_gets",
    "test_dropout_replays",
    "test_widths",
    "test_forward_and_derivative",
    "test_kernels",
    "test_shapes",
)


# The best one is that of all other tests; a machine without AVX2 runs the baseline again and again.
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_parity_on_lesser_instruction_sets(isa):
    files = [f"tests/test_{op}.py" for op in OPS]
    selected = ["-k", f"cpu and ({' or '.join(CASES)})", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, *selected]
    environment = {**os.environ, "BERTFAST_CPU_ISA": isa}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_an_unknown_instruction_set_is_an_error():
    code = "import torch; from bertfast import ops; q = torch.ones(1, 1, 3, 8); ops.attention(q, q, q, backend='cpu')"
    environment = {**os.environ, "BERTFAST_CPU_ISA": "sse"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "BERTFAST_CPU_ISA: expected baseline, avx2, avx512 or avx512bf16, got sse" in done.stderr


CODE = """
import torch
from bertfast import ops

torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for width in (4, 33, 64, 200):
        q, k, v = (torch.randn(1, 2, size, width, dtype=dtype).requires_grad_() for size in (100, 1, 1))
        out = ops.attention(q, k, v, backend="cpu")
        dq, dk = torch.autograd.grad(out, (q, k), torch.randn_like(out))
        assert not dq.any() and not dk.any(), (dtype, width, dq.abs().max(), dk.abs().max())
nans = torch.tensor([-1, 0x7FC00001, 0x7FC00100, 0x7F800001], dtype=torch.int32).view(torch.float32)
short = torch.tensor([-1, 0x7FC1, 0x7F81], dtype=torch.int16).view(torch.bfloat16)
for nan in (*nans, *short):
    q, k, v = torch.randn(3, 1, 2, 5, 8).to(nan.dtype).unbind()
    for name in range(3):
        inputs = [t.clone() for t in (q, k, torch.zeros(5, 5, dtype=nan.dtype))]
        inputs[name][..., 3, 2] = nan
        out = ops.attention(inputs[0], inputs[1], v, inputs[2], backend="cpu")
        wrong = out[..., 3, :] if name != 1 else out
        assert wrong.isnan().all(), (nan, name)
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "avx512bf16"])
def test_one_visible_key_has_no_gradient_and_nan_stays_nan(isa):
    environment = {**os.environ, "BERTFAST_CPU_ISA": isa}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]


BITS = """
import torch
from bertfast import ops

for dtype in (torch.float32, torch.float16, torch.bfloat16):
    inputs = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    q, k, v = (t.requires_grad_() for t in inputs.unbind())
    out = ops.attention(q, k, v, backend="cpu")
    results = [out, *torch.autograd.grad(out, (q, k, v), out)]
    print(*(t.double().sum().item().hex() for t in results))
"""


def test_products_of_bf16_are_for_bf16_alone():
    def bits(isa):
        environment = {**os.environ, "BERTFAST_CPU_ISA": isa}
        done = subprocess.run([sys.executable, "-c", BITS], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    *others, of_bf16 = bits("avx512bf16")
    *expected, in_fp32 = bits("avx512")
    assert others == expected
    has_products = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    assert (of_bf16 != in_fp32) == has_products


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_bitwise_the_same_with_any_number_of_threads(threads, dtype):
    lengths = [300, 1, 0, 77, 5, 512]
    q, k, v = (random(sum(lengths), 8, 16, dtype=dtype, seed=seed) for seed in range(3))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    mask = random(1, 1, 40, 700, dtype=dtype, seed=3)

    def results():
        out = ops.varlen_attention(q, k, v, ends, ends, 512, 512, 0.1, backend="cpu", _seed=seed_tensor())
        x, y = q[:160].view(4, 40, 8, 16).transpose(1, 2), k[:700].expand(4, 700, 8, 16).transpose(1, 2)
        padded = ops.attention(x, y, y, mask, backend="cpu")
        return [out, padded, *torch.autograd.grad([out, padded], [q, k, v, mask], [out, padded])]

    threads(1)
    expected = results()
    for count in (2, 3):  # which cut the longest sequence, and one thread does not
        threads(count)
        for got, of in zip(results(), expected, strict=True):
            assert torch.equal(got, of)
