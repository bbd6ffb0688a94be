"""linear_gelu: gelu(x weight^T + bias), the first half of the feed-forward.

FLOPs: 2 M N K for x (M, K) and weight (N, K). Memory floor: x, weight and out once each.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bertfast import gemm_forms, onednn, prepacked
from bertfast.backends import FLOAT, HALF, Capability, choose, describe, is_transformed, needs_grad, register
from bertfast.ops._autocast import to_autocast, without_autocast
from bertfast.ops._checks import check_rank, check_required, check_same_dtype, check_shape, check_tensors
from bertfast.ops._library import TRITON_DEVICES, cuda_unavailable, define, extension_unavailable, triton_unavailable
from bertfast.ops._once import distinct, once

# The name in `bertfast.activations.FORMULAS` of each `approximate`.
_FORMULA = {"none": "gelu", "tanh": "gelu_tanh"}


def _fwd_fake(x, weight, bias, activation, seed, dropout_p, need_pre):
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return out, x.new_empty(out.shape if need_pre else (0,))


def _bwd_fake(dout, pre, activation, seed, dropout_p, need_out, has_bias):
    dpre = pre.new_empty(pre.shape)
    out = pre.new_empty(pre.shape if need_out else (0,))
    return dpre, out, pre.new_empty(pre.shape[-1:] if has_bias else (0,), dtype=torch.float32)


# dropout(activation(x weight^T + bias)): `activation` is a value of `bertfast.activations.FORMULAS`, the mask that of
# the op feed_forward. `pre` is what the activation gets.
FWD_SIGNATURE = (
    "(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? seed, float dropout_p, bool need_pre)"
    " -> (Tensor out, Tensor pre)"
)
FWD = define(
    "linear_gelu_fwd",
    FWD_SIGNATURE,
    _fwd_fake,
    ("triton", "cuda", "cpu"),
    launcher="linear_gelu",
)
# The same by torch's GEMM and a pass over its product, whatever the sizes. It is what `cuda` has for fp32, for a weight
# without unit stride, and for K and addresses of other than whole 16 bytes.
SEPARATE_FWD = define("linear_gelu_separate_fwd", FWD_SIGNATURE, _fwd_fake, ("cuda",))["cuda"]
# dropout(activation(pre)) alone, behind a GEMM that stands elsewhere.
_ACTIVATION_FWD = define(
    "activation_fwd",
    "(Tensor pre, str activation, Tensor? seed, float dropout_p) -> Tensor",
    lambda pre, activation, seed, dropout_p: pre.new_empty(pre.shape),
    ("cpu",),
)["cpu"]
# The gradient of `pre`, `out` once more where it is needed, and the sum of the gradient over rows in fp32.
BWD = define(
    "linear_gelu_bwd",
    "(Tensor dout, Tensor pre, str activation, Tensor? seed, float dropout_p, bool need_out, bool has_bias)"
    " -> (Tensor dpre, Tensor out, Tensor dbias)",
    _bwd_fake,
    ("triton", "cuda", "cpu"),
    launcher="bias_activation",
)


def forward(
    backend: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    seed: Tensor | None,
    dropout_p: float,
    need_pre: bool,
) -> tuple[Tensor, Tensor]:
    """The op `FWD` of a backend, or `SEPARATE_FWD` where that is the better one of two; on `cpu` by oneDNN's GEMM where
    there can be one."""
    arguments = x, weight, bias, activation, seed, dropout_p, need_pre
    if backend == "cpu":
        return _forward_on_cpu(*arguments)
    separate = backend == "cuda" and gemm_forms.is_separate(x, weight.shape[0])
    return (SEPARATE_FWD if separate else FWD[backend])(*arguments)


def _forward_on_cpu(x, weight, bias, activation, seed, dropout_p, need_pre):
    rides_along = activation in prepacked.ACTIVATIONS and dropout_p == 0.0 and not need_pre
    out = prepacked.linear(x, (weight,), (bias,), activation if rides_along else None)
    if rides_along and out is not None:
        return out, out.new_empty(0)
    pre = onednn.linear(x, weight, bias) if out is None else out
    if pre is None:
        return FWD["cpu"](x, weight, bias, activation, seed, dropout_p, need_pre)
    return _ACTIVATION_FWD(pre, activation, seed, dropout_p), pre if need_pre else pre.new_empty(0)


def linear_gradients(backend: str, dout: Tensor, x: Tensor, weight: Tensor, wants_x: bool, wants_weight: bool):
    """dx (..., K) and dweight (N, K) of x weight^T for dout (..., N), each None unless wanted: plain GEMMs."""
    mm = onednn.mm if backend == "cpu" else torch.mm
    dout = rows_of(dout)
    dx = mm(dout, weight).reshape(x.shape) if wants_x else None
    dweight = mm(dout.t(), rows_of(x)) if wants_weight else None
    return dx, dweight


class _Linear(torch.autograd.Function):
    """Differentiable any number of times: GEMMs of which a graph is recorded are torch's."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return onednn.product(x, weight, bias)

    @staticmethod
    @without_autocast
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        gradients = linear_gradients("cpu", dout, x, weight, wants_x, wants_weight)
        return *gradients, rows_of(dout).sum(0) if wants_bias else None


def linear_on_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """F.linear(x, weight, bias) by oneDNN: of a reordered weight, or of the weight itself where a gradient is recorded.
    None where neither serves the call."""
    if not needs_grad(x, weight, bias):
        out = prepacked.linear(x, (weight,), (bias,))
        return onednn.linear(x, weight, bias) if out is None else out
    return _Linear.apply(x, weight, bias) if onednn.serves(x, weight, bias) else None


def linear_on(backend: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear(x, weight, bias); on `cpu` by oneDNN where it serves."""
    out = linear_on_cpu(x, weight, bias) if backend == "cpu" else None
    return F.linear(x, weight, bias) if out is None else out


def rows_of(x: Tensor) -> Tensor:
    """(..., N) as (M, N)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@without_autocast
def _backward(backend, activation, recompute, wanted, dout, x, weight, bias, pre):
    wants_x, wants_weight, wants_bias = wanted
    if recompute:
        pre = linear_on(backend, x, weight, bias)
    dpre, _, dbias = BWD[backend](dout, pre, activation, None, 0.0, False, wants_bias)
    gradients = linear_gradients(backend, dpre, x, weight, wants_x, wants_weight)
    return *gradients, dbias.to(weight.dtype) if wants_bias else None


class _LinearGelu(torch.autograd.Function):
    """Saves the input of the activation, or makes it again by another GEMM. Differentiable once; the bias is saved to
    lead back to it (see `once`)."""

    @staticmethod
    def forward(ctx, x, weight, bias, activation, recompute, backend):
        out, pre = forward(backend, x, weight, bias, activation, None, 0.0, not recompute)
        ctx.save_for_backward(x, weight, bias, None if recompute else pre)
        ctx.backend, ctx.activation, ctx.recompute = backend, activation, recompute
        return out

    @staticmethod
    def backward(ctx, dout):
        backward = partial(_backward, ctx.backend, ctx.activation, ctx.recompute, ctx.needs_input_grad[:3])
        return *once("linear_gelu", backward)(dout, *ctx.saved_tensors), None, None, None


def _fused(x, weight, bias, approximate, recompute, backend, grad):
    activation = _FORMULA[approximate]
    if grad:
        return _LinearGelu.apply(*distinct(x, weight, bias), activation, recompute, backend)
    return forward(backend, x, weight, bias, activation, None, 0.0, False)[0]


def checkpointed(recompute: bool, function, *arguments):
    """`function(*arguments)`, under non-reentrant checkpointing if `recompute`; `torch.func` knows no checkpoints."""
    if recompute and not is_transformed():
        return checkpoint(function, *arguments, use_reentrant=False)
    return function(*arguments)


def _torch(x, weight, bias, approximate, recompute, backend, grad):
    def activated(x, weight, bias):
        return F.gelu(F.linear(x, weight, bias), approximate=approximate)

    return checkpointed(recompute and grad, activated, x, weight, bias)


def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    approximate: str = "none",
    *,
    recompute_activation: bool = False,
    backend: str | None = None,
) -> Tensor:
    """GELU of a linear layer.

    Equivalent PyTorch::

        return F.gelu(F.linear(x, weight, bias), approximate=approximate)

    Args:
        x: (..., K) fp16, bf16, fp32 or fp64.
        weight: (N, K) as `nn.Linear.weight`, in the dtype of `x` (autocast makes it so).
        bias: (N,) in the same dtype, or None.
        approximate: `"none"` for the exact form by erf, `"tanh"` for the tanh form.
        recompute_activation: keep only the inputs for backward, and make the (..., N) input of the activation again
            by another GEMM there.
        backend: a backend's name, or None for the one in force.

    Returns:
        (..., N) in the dtype of `x` (autocast's dtype under autocast). Differentiable once on fused backends.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown `approximate`.
        TypeError: an input that is not floating point.
        BackendError: `backend` cannot serve these inputs.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    check_linear(x, weight, bias, ("x", "weight", "bias"))
    x, weight, bias = to_autocast(x, weight, bias)
    check_same_dtype(("x", "weight", "bias"), x, weight, bias)
    grad = needs_grad(x, weight, bias)
    call = describe("linear_gelu", (x, weight, bias), grad=grad)
    chosen = choose(call, backend, gemm_forms.automatic_order(x, weight.shape[0], backend))
    return chosen.implementation(x, weight, bias, approximate, recompute_activation, chosen.backend, grad)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, names: tuple[str, str, str]) -> None:
    """Raises ValueError or TypeError unless `weight` and `bias` make a linear layer on `x`."""
    check_required(names[:2], x, weight)
    check_tensors(names, x, weight, bias)
    check_rank(names[0], x, 1)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"{names[1]} must have shape (N, {x.shape[-1]}), got {tuple(weight.shape)}")
    check_shape(names[2], bias, (weight.shape[0],))


register(Capability("linear_gelu", "torch", _torch))
register(
    Capability(
        "linear_gelu",
        "triton",
        _fused,
        devices=TRITON_DEVICES,
        dtypes=FLOAT,
        auto_dtypes=HALF,
        min_compute=(8, 0),
        unavailable=triton_unavailable,
    )
)
register(
    Capability(
        "linear_gelu",
        "cuda",
        _fused,
        devices=frozenset({"cuda"}),
        dtypes=FLOAT,
        auto_dtypes=HALF,
        min_compute=(8, 0),
        unavailable=cuda_unavailable,
    )
)
register(
    Capability(
        "linear_gelu",
        "cpu",
        _fused,
        devices=frozenset({"cpu"}),
        dtypes=FLOAT,
        unavailable=extension_unavailable,
    )
)
