"""bias_activation's kernels over parts of a sum and blocks of rows and columns: what `linear_gelu`'s forms rest on."""

import importlib

import pytest
import torch
import torch.nn.functional as F
import triton

from bertfast import ops
from bertfast.dropout import keep_scale
from helpers.op_cases import random, seed_tensor
from helpers.poison import poisoned_memory  # noqa: F401

bias_activation = importlib.import_module("bertfast.kernels.bias_activation")

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is 0"),
]

# Blocks have 256 columns and 8 rows, or fewer columns and more rows.
SIZES = pytest.mark.parametrize(("rows", "width"), [(1, 1), (17, 255), (20, 256), (9, 257), (16, 512), (300, 16)])


def numbers(*shape, seed):
    return random(*shape, dtype=torch.float32, seed=seed, grad=False)


@SIZES
@pytest.mark.parametrize(("parts", "biased", "dropout_p"), [(1, True, 0.0), (3, True, 0.0), (2, False, 0.3)])
def test_forward(rows, width, parts, biased, dropout_p):
    partial, bias = numbers(parts, rows, width, seed=1), numbers(width, seed=2) if biased else None
    out, pre = (partial.new_empty(rows, width) for _ in range(2))
    seed = seed_tensor() if dropout_p else None
    bias_activation.bias_activation_fwd(partial, bias, "gelu", seed, dropout_p, out, pre)
    expected = partial.double().sum(0) + (bias.double() if biased else 0.0)
    torch.testing.assert_close(pre.double(), expected, rtol=1e-6, atol=1e-6)
    activated = F.gelu(expected)
    if dropout_p:
        activated *= ops.dropout_mask(seed, (rows, width), dropout_p, "feed_forward") * keep_scale(dropout_p)
    torch.testing.assert_close(out.double(), activated, rtol=2e-6, atol=2e-6)


@SIZES
@pytest.mark.parametrize(
    ("need_out", "has_bias", "dropout_p"), [(False, True, 0.0), (True, True, 0.3), (True, False, 0)]
)
def test_backward(rows, width, need_out, has_bias, dropout_p):
    dout, pre = numbers(rows, width, seed=1), numbers(rows, width, seed=2)
    seed = seed_tensor() if dropout_p else None
    dpre, out, dbias = bias_activation.linear_gelu_bwd(dout, pre, "gelu", seed, dropout_p, need_out, has_bias)
    factor = 1.0
    if dropout_p:
        factor = ops.dropout_mask(seed, (rows, width), dropout_p, "feed_forward") * keep_scale(dropout_p)
    wide = pre.double().requires_grad_()
    activated = F.gelu(wide) * factor
    expected = torch.autograd.grad(activated, wide, dout.double())[0]
    torch.testing.assert_close(dpre.double(), expected, rtol=2e-6, atol=2e-6)
    if need_out:
        torch.testing.assert_close(out.double(), activated.detach(), rtol=2e-6, atol=2e-6)
    if has_bias:
        torch.testing.assert_close(dbias.double(), expected.sum(0), rtol=1e-5, atol=1e-5)
