"""torch.library.opcheck on every private op: schema, fake, dynamic shapes; strided, optional and empty arguments."""

import pytest
import torch
from torch.library import opcheck

from bertfast import _extension
from helpers.op_cases import random, seed_tensor
from helpers.poison import LAYOUTS

pytestmark = pytest.mark.skipif(_extension.STATUS.state != "loaded", reason="the native extension is not built")

DTYPES = (torch.float32, torch.bfloat16)


def _operators():
    """Every operator of ours that has a kernel for the CPU."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("bertfast::")]
    return sorted(name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"))


def _forward_arguments(shape, dtype, layout="contiguous", residual=True, x_bias=True, dropout_p=0.0, need_sum=True):
    def numbers(seed, *size):
        return LAYOUTS[layout](random(*size, dtype=dtype, seed=seed, grad=False))

    width = shape[-1]
    return (
        numbers(1, *shape),
        numbers(2, *shape) if residual else None,
        numbers(3, width),
        numbers(4, width),
        numbers(5, width) if x_bias else None,
        seed_tensor() if dropout_p else None,
        1e-12,
        dropout_p,
        need_sum,
    )


def _backward_arguments(shape, dtype, layout="contiguous", residual=True, x_bias=True, dropout_p=0.0, dsum=True):
    forward = _forward_arguments(shape, dtype, layout, residual, x_bias, dropout_p)
    out, total, mean, rstd = torch.ops.bertfast.add_layer_norm_fwd_cpu(*forward)
    dout = LAYOUTS[layout](torch.randn_like(out))
    extra = LAYOUTS[layout](torch.randn_like(out)) if dsum else None
    return dout, extra, total, mean, rstd, forward[2], forward[5], dropout_p, residual, x_bias


CASES = [
    {"shape": (6, 33)},
    {"shape": (2, 3, 17), "residual": False},
    {"shape": (5, 8), "x_bias": False},
    {"shape": (6, 33), "dropout_p": 0.3},
    {"shape": (6, 33), "dropout_p": 0.3, "residual": False, "x_bias": False},
    {"shape": (0, 33)},
    {"shape": (0, 33), "dropout_p": 0.3},
    {"shape": (33,)},
    *({"shape": (4, 5, 33), "layout": layout} for layout in LAYOUTS if layout != "contiguous"),
]


@pytest.mark.parametrize("arguments", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_layer_norm_fwd(dtype, arguments):
    for need_sum in (True, False):
        opcheck(
            torch.ops.bertfast.add_layer_norm_fwd_cpu, _forward_arguments(dtype=dtype, need_sum=need_sum, **arguments)
        )


@pytest.mark.parametrize("arguments", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_layer_norm_bwd(dtype, arguments):
    for dsum in (True, False):
        opcheck(torch.ops.bertfast.add_layer_norm_bwd_cpu, _backward_arguments(dtype=dtype, dsum=dsum, **arguments))


def test_mixed_dtypes():
    x, _, weight, bias, *rest = _forward_arguments((6, 33), torch.bfloat16)
    residual = random(6, 33, dtype=torch.float32, seed=9, grad=False)
    opcheck(torch.ops.bertfast.add_layer_norm_fwd_cpu, (x, residual, weight.float(), bias.half(), *rest))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize(
    ("shape", "layout"), [((6, 33), "contiguous"), ((2, 3, 8), "transposed"), ((0, 8), "contiguous")]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gelu_fwd(dtype, shape, layout, approximate, bias):
    x = LAYOUTS[layout](random(*shape, dtype=dtype, seed=1, grad=False))
    weight = random(7, shape[-1], dtype=dtype, seed=2, grad=False)
    arguments = (x, weight, random(7, dtype=dtype, seed=3, grad=False) if bias else None, approximate)
    opcheck(torch.ops.bertfast.linear_gelu_fwd_cpu, arguments)


def test_every_operator_is_checked_here():
    checked = {"add_layer_norm_fwd_cpu", "add_layer_norm_bwd_cpu", "linear_gelu_fwd_cpu"}
    assert set(_operators()) == {f"bertfast::{name}" for name in checked}


def test_names_exist_without_kernels():
    """A missing extension removes no name: schemas and fakes are Python's."""
    with torch._subclasses.FakeTensorMode():
        x, ones = torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(8)
        out, total, mean, rstd = torch.ops.bertfast.add_layer_norm_fwd_cpu(
            x, None, ones, ones, None, None, 1e-5, 0.0, True
        )
    assert out.dtype == total.dtype == torch.bfloat16 and mean.dtype == rstd.dtype == torch.float32
    assert out.shape == total.shape == (4, 8) and mean.shape == rstd.shape == (4,)
