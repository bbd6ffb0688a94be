"""qkv_projection: query, key and value of one input, three linear layers of one shape as one GEMM.

FLOPs: 6 M N K for x (M, K) and weights (N, K). Memory floor: x, the three weights and the three outputs once each.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from bertfast import gemm_forms, prepacked, weight_cache
from bertfast.backends import FLOAT, HALF, Capability, choose, describe, needs_grad, register
from bertfast.kernels import tiles
from bertfast.ops._autocast import to_autocast, without_autocast
from bertfast.ops._checks import check_rank, check_required, check_same_dtype, check_shape, check_tensors
from bertfast.ops._library import TRITON_DEVICES, cuda_unavailable, define, extension_unavailable, triton_unavailable
from bertfast.ops._once import distinct
from bertfast.ops.linear_gelu import linear_on, rows_of

_NAMES = ("x", "weights[0]", "weights[1]", "weights[2]", "biases[0]", "biases[1]", "biases[2]")


def _fwd_fake(x, weight_q, weight_k, weight_v, bias_q, bias_k, bias_v):
    return x.new_empty((*x.shape[:-1], 3 * weight_q.shape[0]))


_FWD = define(
    "qkv_projection_fwd",
    "(Tensor x, Tensor weight_q, Tensor weight_k, Tensor weight_v, Tensor? bias_q, Tensor? bias_k, Tensor? bias_v)"
    " -> Tensor",
    _fwd_fake,
    ("triton", "cuda"),
    launcher="qkv_projection",
)


def _split(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return packed.unflatten(-1, (3, packed.shape[-1] // 3)).unbind(-2)


class _QkvProjection(torch.autograd.Function):
    """Saves its inputs; the GEMMs of backward are torch's, so it is differentiable any number of times."""

    @staticmethod
    def forward(ctx, x, weight_q, weight_k, weight_v, bias_q, bias_k, bias_v, backend):
        ctx.save_for_backward(x, weight_q, weight_k, weight_v)
        ctx.set_materialize_grads(False)
        return _split(_FWD[backend](x, weight_q, weight_k, weight_v, bias_q, bias_k, bias_v))

    @staticmethod
    @without_autocast
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        need_x, *needed = ctx.needs_input_grad[:7]
        rows = rows_of(x)
        grads = [None if grad is None else rows_of(grad) for grad in grads]
        dx = None
        for grad, weight in zip(grads, weights, strict=True):
            if need_x and grad is not None:
                dx = grad @ weight if dx is None else _plus_product(dx, grad, weight)
        pairs = list(zip(grads * 2, needed, strict=True))
        dweights = (grad.t() @ rows if need and grad is not None else None for grad, need in pairs[:3])
        dbiases = (grad.sum(0) if need and grad is not None else None for grad, need in pairs[3:])
        return None if dx is None else dx.view(x.shape), *dweights, *dbiases, None


def _plus_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b. Half precision has fp32 accumulators to start from; a chain of fp32 sums would lose by its
    length."""
    return torch.addmm(total, a, b) if total.dtype in HALF else total + a @ b


def _fused(backend, x, weights, biases, grad, compute):
    if grad:
        return _QkvProjection.apply(*distinct(x, *weights, *biases), backend)
    if backend == "triton" and not torch.compiler.is_compiling() and compute is not None and x.dtype in HALF:
        width, width_in = weights[0].shape
        rows = x.numel() // max(width_in, 1)
        if tiles.qkv_weights_are_packed(rows, 3 * width, width_in, 10 * compute[0] + compute[1]):
            pack = weight_cache.packed(weights, biases)
            if pack is not None:
                return _split(F.linear(x, pack.weight, pack.bias))
    return _split(_FWD[backend](x, *weights, *biases))


def _torch(x, weights, biases, grad, compute):
    return tuple(map(F.linear, (x, x, x), weights, biases))


def _cpu(x, weights, biases, grad, compute):
    packed = prepacked.linear(x, tuple(weights), tuple(biases))
    if packed is not None:
        return _split(packed)
    return tuple(linear_on("cpu", x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def qkv_projection(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Three linear layers of one shape on one input.

    Equivalent PyTorch::

        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases))

    Args:
        x: (..., K) fp16, bf16, fp32 or fp64.
        weights: of query, key and value, (N, K) each as `nn.Linear.weight`, in the dtype of `x` (autocast makes it so).
        biases: (N,) each in the same dtype, or None for no biases.
        backend: a backend's name, or None for the one in force.

    Returns:
        query, key and value, (..., N) in the dtype of `x` (autocast's dtype under autocast). On fused backends they are
        views of one (..., 3 N) buffer, each with unit stride in its last dimension; autograd then lets none of them be
        changed in place, and all require gradients where one does.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, not three weights or biases.
        TypeError: an input that is not floating point.
        BackendError: `backend` cannot serve these inputs.
    """
    biases = (None, None, None) if biases is None else tuple(biases)
    if len(weights) != 3 or len(biases) != 3:
        raise ValueError(f"weights and biases must be three each, got {len(weights)} and {len(biases)}")
    check_required(_NAMES[:4], x, *weights)
    if biases[0] is not None or biases[1] is not None or biases[2] is not None:
        check_required(_NAMES[4:], *biases)
    check_tensors(_NAMES, x, *weights, *biases)
    check_rank("x", x, 1)
    if weights[0].dim() != 2 or weights[0].shape[1] != x.shape[-1]:
        raise ValueError(f"weights[0] must have shape (N, {x.shape[-1]}), got {tuple(weights[0].shape)}")
    shape = tuple(weights[0].shape)
    for name, tensor in zip(_NAMES[2:], (*weights[1:], *biases), strict=True):
        check_shape(name, tensor, shape if name.startswith("weights") else shape[:1])
    x, *parameters = to_autocast(x, *weights, *biases)
    check_same_dtype(_NAMES, x, *parameters)
    grad = needs_grad(x, *parameters)
    call = describe("qkv_projection", (x, *parameters), grad=grad)
    chosen = choose(call, backend, gemm_forms.automatic_order(x, 3 * weights[0].shape[0], backend, separate="torch"))
    return chosen.implementation(x, parameters[:3], parameters[3:], grad, call.compute)


register(Capability("qkv_projection", "torch", _torch))
register(
    Capability(
        "qkv_projection",
        "triton",
        functools.partial(_fused, "triton"),
        devices=TRITON_DEVICES,
        dtypes=FLOAT,
        auto_dtypes=HALF,
        min_compute=(8, 0),
        unavailable=triton_unavailable,
    )
)
register(
    Capability(
        "qkv_projection",
        "cuda",
        functools.partial(_fused, "cuda"),
        devices=frozenset({"cuda"}),
        dtypes=FLOAT,
        auto_dtypes=HALF,
        min_compute=(8, 0),
        unavailable=cuda_unavailable,
    )
)
register(
    Capability(
        "qkv_projection",
        "cpu",
        _cpu,
        devices=frozenset({"cpu"}),
        dtypes=FLOAT,
        unavailable=extension_unavailable,
    )
)
