"""add_layer_norm: LN(residual + dropout(x + x_bias)), the op between any two GEMMs of a post-LayerNorm encoder.

Memory floor for M rows of width N at e bytes an element: forward reads x and residual and writes out, 3 M N e bytes;
backward reads dout and the saved sum and writes dx (and dresidual when dropout makes it differ), 3 to 4 M N e bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bertfast.backends import FLOAT, HALF, Capability, choose, describe, needs_grad, register
from bertfast.dropout import apply_dropout, check_probability, seed_for
from bertfast.kernels.tiles import MAX_WIDTH
from bertfast.ops._autocast import normalises_in_float32
from bertfast.ops._checks import check_eps, check_rank, check_required, check_shape, check_tensors
from bertfast.ops._library import TRITON_DEVICES, cuda_unavailable, define, extension_unavailable, triton_unavailable
from bertfast.ops._once import distinct, once

_BACKENDS = ("triton", "cuda", "cpu")


def _fwd_fake(x, residual, weight, bias, x_bias, seed, eps, dropout_p, need_sum):
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    out = x.new_empty(x.shape, dtype=dtype)
    total = x.new_empty(x.shape if need_sum else (0,), dtype=dtype)
    mean = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return out, total, mean, torch.empty_like(mean)


def _bwd_fake(dout, dsum, total, mean, rstd, weight, seed, dropout_p, has_residual, has_x_bias):
    dx = total.new_empty(total.shape)
    dresidual = total.new_empty(total.shape if has_residual and seed is not None else (0,))
    dweight = weight.new_empty(weight.shape, dtype=torch.float32)
    dx_bias = weight.new_empty(weight.shape if has_x_bias else (0,), dtype=torch.float32)
    return dx, dresidual, dweight, torch.empty_like(dweight), dx_bias


_FWD = define(
    "add_layer_norm_fwd",
    "(Tensor x, Tensor? residual, Tensor weight, Tensor bias, Tensor? x_bias, Tensor? seed, float eps,"
    " float dropout_p, bool need_sum) -> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)",
    _fwd_fake,
    _BACKENDS,
    launcher="layer_norm",
)
_BWD = define(
    "add_layer_norm_bwd",
    "(Tensor dout, Tensor? dsum, Tensor sum, Tensor mean, Tensor rstd, Tensor weight, Tensor? seed,"
    " float dropout_p, bool has_residual, bool has_x_bias)"
    " -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias, Tensor dx_bias)",
    _bwd_fake,
    _BACKENDS,
    launcher="layer_norm",
)


class _AddLayerNorm(torch.autograd.Function):
    """Saves the sum, the statistics and the seed; the dropout mask is regenerated. Differentiable once.

    In eager mode the sum is always an output, so that the saved one leads back to the inputs (see `once`). A
    trace, which has no second derivatives anyway, would make zeros for its gradient. Where the sum is x, as of a plain
    LayerNorm, x is what is saved.
    """

    @staticmethod
    def forward(ctx, x, residual, weight, bias, x_bias, seed, eps, dropout_p, need_sum, backend):
        is_x = residual is None and x_bias is None and seed is None and not need_sum
        out, total, mean, rstd = _FWD[backend](x, residual, weight, bias, x_bias, seed, eps, dropout_p, not is_x)
        total = x if is_x else total
        ctx.save_for_backward(total, mean, rstd, weight, seed)
        ctx.backend, ctx.dropout_p = backend, dropout_p
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, residual, weight, bias, x_bias))
        ctx.set_materialize_grads(False)
        return (out, total) if need_sum else (out, None)

    @staticmethod
    def backward(ctx, dout, dsum):
        total, mean, rstd, weight, seed = ctx.saved_tensors
        x_dtype, residual_dtype, weight_dtype, bias_dtype, x_bias_dtype = ctx.dtypes
        if dout is None:
            dout = torch.zeros_like(total)
        dx, dresidual, dweight, dbias, dx_bias = once("add_layer_norm", _BWD[ctx.backend])(
            dout,
            dsum,
            total,
            mean,
            rstd,
            weight,
            seed,
            ctx.dropout_p,
            residual_dtype is not None,
            x_bias_dtype is not None,
        )
        if seed is None:
            dresidual = dx
        return (
            dx.to(x_dtype),
            None if residual_dtype is None else dresidual.to(residual_dtype),
            dweight.to(weight_dtype),
            dbias.to(bias_dtype),
            None if x_bias_dtype is None else dx_bias.to(x_bias_dtype),
            *(None,) * 5,
        )


def _fused(x, residual, weight, bias, eps, x_bias, dropout_p, return_sum, seed, backend, grad):
    seed = seed_for(dropout_p, seed, x.device)
    if grad:
        inputs = distinct(x, residual, weight, bias, x_bias)
        is_x = residual is None and x_bias is None and seed is None
        need_sum = return_sum or not (is_x or torch.compiler.is_compiling())
        out, total = _AddLayerNorm.apply(*inputs, seed, eps, dropout_p, need_sum, backend)
    else:
        out, total, _, _ = _FWD[backend](x, residual, weight, bias, x_bias, seed, eps, dropout_p, return_sum)
    return (out, total) if return_sum else out


def _torch(x, residual, weight, bias, eps, x_bias, dropout_p, return_sum, seed, backend, grad):
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    total = apply_dropout(x if x_bias is None else x + x_bias, dropout_p, "add_layer_norm", seed)
    total = (total if residual is None else residual + total).to(dtype)
    if return_sum and total is x:
        total = x.clone()
    half_on_cpu = total.device.type == "cpu" and total.dtype in HALF
    if weight.dtype == total.dtype == bias.dtype and not half_on_cpu:
        out = F.layer_norm(total, weight.shape, weight, bias, eps)
    else:
        # Stock LayerNorm refuses some mixes (fp16 input and fp32 weight), and on the CPU keeps statistics and the sums
        # over rows in half precision: constant rows become NaN, and a bias gradient of 65.5 stalls at 0.5.
        wide = torch.promote_types(torch.promote_types(total.dtype, weight.dtype), bias.dtype)
        wide = torch.promote_types(wide, torch.float32)
        out = F.layer_norm(total.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps)
        out = out.float() if normalises_in_float32(x) else out.to(total.dtype)
    return (out, total) if return_sum else out


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-12,
    *,
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    return_sum: bool = False,
    backend: str | None = None,
    _seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """LN(residual + dropout(x + x_bias)) over the last dimension, statistics in fp32 (fp64 for fp64).

    Equivalent PyTorch::

        total = residual + F.dropout(x + x_bias, dropout_p)
        return F.layer_norm(total, (N,), weight, bias, eps)

    Args:
        x: (..., N) fp16, bf16, fp32 or fp64, any strides.
        residual: shape of `x`, its own dtype; None gives plain LayerNorm.
        weight, bias: (N,), their own dtypes.
        eps: added to the variance in fp32.
        x_bias: (N,), the bias of the linear layer that made `x`; None for none.
        dropout_p: applied whenever it is above 0; modules pass 0 outside training.
        return_sum: also return the sum in front of the LayerNorm (pre-norm models feed it on).
        backend: a backend's name, or None for the one in force.
        _seed: int64 tensor of one element that fixes the dropout mask (see `ops.dropout_mask`).

    Returns:
        (..., N) in the promoted dtype of `x` and `residual` (fp32 under CUDA autocast, as LayerNorm there), or a
        pair of it and the sum. Each gradient has its input's dtype. Differentiable once on fused backends.

    Raises:
        ValueError: shapes or devices that do not fit, `dropout_p` outside [0, 1], `eps` below 0.
        TypeError: an input that is no floating point tensor.
        BackendError: `backend` cannot serve these inputs.
    """
    check_probability(dropout_p)
    check_eps(eps)
    check_required(("x", "weight", "bias"), x, weight, bias)
    check_tensors(("x", "residual", "weight", "bias", "x_bias"), x, residual, weight, bias, x_bias)
    check_rank("x", x, 1)
    width = x.shape[-1]
    check_shape("residual", residual, tuple(x.shape))
    for name, tensor in (("weight", weight), ("bias", bias), ("x_bias", x_bias)):
        check_shape(name, tensor, (width,))
    if normalises_in_float32(x) and residual is None:
        x = x.float()
    grad = needs_grad(x, residual, weight, bias, x_bias)
    call = describe("add_layer_norm", (x, residual, weight, bias, x_bias), grad=grad, dropout_p=dropout_p, width=width)
    chosen = choose(call, backend)
    return chosen.implementation(
        x, residual, weight, bias, eps, x_bias, dropout_p, return_sum, _seed, chosen.backend, grad
    )


register(Capability("add_layer_norm", "torch", _torch))
register(
    Capability(
        "add_layer_norm",
        "triton",
        _fused,
        devices=TRITON_DEVICES,
        dtypes=FLOAT,
        min_compute=(7, 5),
        max_width=MAX_WIDTH,
        unavailable=triton_unavailable,
    )
)
register(
    Capability(
        "add_layer_norm",
        "cuda",
        _fused,
        devices=frozenset({"cuda"}),
        dtypes=FLOAT,
        min_compute=(8, 0),
        max_width=MAX_WIDTH,
        unavailable=cuda_unavailable,
    )
)
register(
    Capability(
        "add_layer_norm",
        "cpu",
        _fused,
        devices=frozenset({"cpu"}),
        dtypes=FLOAT,
        unavailable=extension_unavailable,
    )
)
