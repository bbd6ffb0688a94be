"""feed_forward: activation(x w_in^T + b_in) w_out^T + b_out, two GEMMs with an activation between.

FLOPs: 4 M N F for x (M, N) and w_in (F, N). Memory floor: x, both weights and out; the (M, F) intermediate is what a
fused kernel writes once and reads once.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from bertfast.activations import GELU_FORMS, Activation, get_activation
from bertfast.backends import FLOAT, Capability, choose, describe, needs_grad, register
from bertfast.dropout import apply_dropout, check_probability
from bertfast.ops._autocast import to_autocast
from bertfast.ops._checks import check_required, check_same_dtype, check_shape, check_tensors
from bertfast.ops._library import extension_unavailable
from bertfast.ops.linear_gelu import check_linear, linear_gelu_fwd


def _torch(x, w_in, b_in, w_out, b_out, activation, dropout_p, seed):
    hidden = apply_dropout(get_activation(activation)(F.linear(x, w_in, b_in)), dropout_p, "feed_forward", seed)
    return F.linear(hidden, w_out, b_out)


def _fused(x, w_in, b_in, w_out, b_out, activation, dropout_p, seed):
    return F.linear(linear_gelu_fwd(x, w_in, b_in, GELU_FORMS[activation], "cpu"), w_out, b_out)


def feed_forward(
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    activation: str | Activation = "gelu",
    *,
    dropout_p: float = 0.0,
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
        backend: a backend's name, or None for the one in force.
        _seed: int64 tensor of one element that fixes the dropout mask (see `ops.dropout_mask`).

    Returns:
        (..., N_out) in the dtype of `x` (autocast's dtype under autocast).

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
    call = describe(
        "feed_forward",
        (x, w_in, b_in, w_out, b_out),
        grad=needs_grad(x, w_in, b_in, w_out, b_out),
        dropout_p=dropout_p,
        features=(activation if isinstance(activation, str) else "callable activation",),
    )
    return choose(call, backend).implementation(x, w_in, b_in, w_out, b_out, activation, dropout_p, _seed)


register(Capability("feed_forward", "torch", _torch))
register(
    Capability(
        "feed_forward",
        "cpu",
        _fused,
        devices=frozenset({"cpu"}),
        dtypes=FLOAT,
        dropout=False,
        backward=False,
        features=frozenset(GELU_FORMS),
        unavailable=extension_unavailable,
    )
)
