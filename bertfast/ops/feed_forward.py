"""feed_forward: activation(x w_in^T + b_in) w_out^T + b_out, two GEMMs with an activation between.

FLOPs: 4 M N F for x (M, N) and w_in (F, N). Memory floor: x, both weights and out; the (M, F) intermediate is what a
fused kernel writes once and reads once.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bertfast import gemm_forms
from bertfast.activations import FORMULAS, Activation, get_activation
from bertfast.backends import FLOAT, HALF, Capability, choose, describe, needs_grad, register
from bertfast.dropout import apply_dropout, check_probability, seed_for
from bertfast.ops._autocast import to_autocast, without_autocast
from bertfast.ops._checks import check_required, check_same_dtype, check_shape, check_tensors
from bertfast.ops._library import TRITON_DEVICES, cuda_unavailable, extension_unavailable, triton_unavailable
from bertfast.ops._once import distinct, once
from bertfast.ops.linear_gelu import (
    BWD,
    check_linear,
    checkpointed,
    forward,
    linear_gradients,
    linear_on,
    rows_of,
)


@without_autocast
def _backward(backend, activation, dropout_p, recompute, wanted, dout, x, w_in, b_in, w_out, seed, pre):
    wants_x, wants_w_in, wants_b_in, wants_w_out, wants_b_out = wanted
    db_out = rows_of(dout).sum(0) if wants_b_out else None
    if not any(wanted[:4]):
        return None, None, None, None, db_out
    if recompute:
        pre = linear_on(backend, x, w_in, b_in)
    dhidden, _ = linear_gradients(backend, dout, pre, w_out, True, False)
    dpre, hidden, db_in = BWD[backend](dhidden, pre, activation, seed, dropout_p, wants_w_out, wants_b_in)
    del pre, dhidden
    _, dw_out = linear_gradients(backend, dout, hidden, w_out, False, wants_w_out)
    del hidden
    dx, dw_in = linear_gradients(backend, dpre, x, w_in, wants_x, wants_w_in)
    return dx, dw_in, db_in.to(w_in.dtype) if wants_b_in else None, dw_out, db_out


class _FeedForward(torch.autograd.Function):
    """Saves the input of the activation, of which backward makes its output again, or makes both again by another
    GEMM; the dropout mask is regenerated. Differentiable once."""

    @staticmethod
    def forward(ctx, x, w_in, b_in, w_out, b_out, seed, activation, dropout_p, recompute, backend):
        hidden, pre = forward(backend, x, w_in, b_in, activation, seed, dropout_p, not recompute)
        ctx.save_for_backward(x, w_in, b_in, w_out, seed, None if recompute else pre)
        ctx.backend, ctx.activation, ctx.dropout_p, ctx.recompute = backend, activation, dropout_p, recompute
        return linear_on(backend, hidden, w_out, b_out)

    @staticmethod
    def backward(ctx, dout):
        wanted = ctx.needs_input_grad[:5]
        backward = partial(_backward, ctx.backend, ctx.activation, ctx.dropout_p, ctx.recompute, wanted)
        return *once("feed_forward", backward)(dout, *ctx.saved_tensors), *(None,) * 5


def _fused(x, w_in, b_in, w_out, b_out, activation, dropout_p, seed, recompute, backend, grad):
    activation = FORMULAS[activation]
    seed = seed_for(dropout_p, seed, x.device)
    if grad:
        inputs = distinct(x, w_in, b_in, w_out, b_out)
        return _FeedForward.apply(*inputs, seed, activation, dropout_p, recompute, backend)
    return linear_on(backend, forward(backend, x, w_in, b_in, activation, seed, dropout_p, False)[0], w_out, b_out)


def _torch(x, w_in, b_in, w_out, b_out, activation, dropout_p, seed, recompute, backend, grad):
    def both(x, w_in, b_in, w_out, b_out):
        hidden = get_activation(activation)(F.linear(x, w_in, b_in))
        return F.linear(apply_dropout(hidden, dropout_p, "feed_forward", seed), w_out, b_out)

    return checkpointed(recompute and grad, both, x, w_in, b_in, w_out, b_out)


def feed_forward(
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    activation: str | Activation = "gelu",
    *,
    dropout_p: float = 0.0,
    recompute_activation: bool = False,
    backend: str | None = None,
    _seed: Tensor | None = None,
) -> Tensor:
    """The feed-forward of a transformer layer.

    Equivalent PyTorch::

        hidden = F.dropout(ACT2FN[activation](F.linear(x, w_in, b_in)), dropout_p)
        return F.linear(hidden, w_out, b_out)

    Args:
        x: (..., N) fp16, bf16, fp32 or fp64.
        w_in, b_in: (F, N) and (F,) or None.
        w_out, b_out: (N_out, F) and (N_out,) or None. All are in the dtype of `x` (autocast makes it so).
        activation: a configuration name such as `"gelu"` (exact, by erf), or a callable.
        dropout_p: dropout of the activated intermediate, applied whenever it is above 0 (BERT drops behind the second
            GEMM instead: that is `add_layer_norm`'s `dropout_p`).
        recompute_activation: keep only the inputs for backward, and make the (..., F) intermediate again by another
            GEMM there.
        backend: a backend's name, or None for the one in force.
        _seed: int64 tensor of one element that fixes the dropout mask (see `ops.dropout_mask`).

    Returns:
        (..., N_out) in the dtype of `x` (autocast's dtype under autocast). Differentiable once on fused backends.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown activation, `dropout_p` outside [0, 1].
        TypeError: an input that is not floating point.
        BackendError: `backend` cannot serve these inputs.
    """
    check_probability(dropout_p)
    get_activation(activation)
    check_linear(x, w_in, b_in, ("x", "w_in", "b_in"))
    check_required(("w_out",), w_out)
    check_tensors(("x", "w_out", "b_out"), x, w_out, b_out)
    if w_out.dim() != 2 or w_out.shape[1] != w_in.shape[0]:
        raise ValueError(f"w_out must have shape (N_out, {w_in.shape[0]}), got {tuple(w_out.shape)}")
    check_shape("b_out", b_out, (w_out.shape[0],))
    x, w_in, b_in, w_out, b_out = to_autocast(x, w_in, b_in, w_out, b_out)
    check_same_dtype(("x", "w_in", "b_in", "w_out", "b_out"), x, w_in, b_in, w_out, b_out)
    grad = needs_grad(x, w_in, b_in, w_out, b_out)
    call = describe(
        "feed_forward",
        (x, w_in, b_in, w_out, b_out),
        grad=grad,
        dropout_p=dropout_p,
        features=(activation if isinstance(activation, str) else "callable activation",),
    )
    chosen = choose(call, backend, gemm_forms.automatic_order(x, w_in.shape[0], backend, dropout_p > 0.0))
    return chosen.implementation(
        x,
        w_in,
        b_in,
        w_out,
        b_out,
        activation,
        dropout_p,
        _seed,
        recompute_activation,
        chosen.backend,
        grad,
    )


register(Capability("feed_forward", "torch", _torch))
register(
    Capability(
        "feed_forward",
        "triton",
        _fused,
        devices=TRITON_DEVICES,
        dtypes=FLOAT,
        auto_dtypes=HALF,
        min_compute=(8, 0),
        features=frozenset(FORMULAS),
        unavailable=triton_unavailable,
    )
)
register(
    Capability(
        "feed_forward",
        "cuda",
        _fused,
        devices=frozenset({"cuda"}),
        dtypes=FLOAT,
        auto_dtypes=HALF,
        min_compute=(8, 0),
        features=frozenset(FORMULAS),
        unavailable=cuda_unavailable,
    )
)
register(
    Capability(
        "feed_forward",
        "cpu",
        _fused,
        devices=frozenset({"cpu"}),
        dtypes=FLOAT,
        features=frozenset(FORMULAS),
        unavailable=extension_unavailable,
    )
)
