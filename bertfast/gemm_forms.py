"""Who computes a linear layer in half precision on a GPU, by its sizes: the kernels in Triton or in CUDA C++, or
"separate", torch's GEMM and a second pass over its outputs for bias, activation and dropout.

The table is asked in eager calls: by the automatic choice of a backend, and by `cuda`, which has both of the latter two
(Triton's launchers plan for themselves). A trace knows no sizes; there the backends come in their usual order, and
`cuda` runs its kernel.

Reasoned, not measured. A launch in C++ costs the host less than one in Triton. mma.sync, which the kernel in CUDA C++
uses, has about 5 of 8 of the FLOPs of wgmma on 9.0, and is taken for that on 10.0 as well: 0.6 of the GEMM's time more.
A second pass costs 367 / K of that time on 9.0 and 430 / K on 10.0 (`kernels.tiles`), which is less from K = 612 and
K = 717 on.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from bertfast.backends import HALF, has_values, is_pinned
from bertfast.kernels import tiles

_SEPARATE_FROM = {80: math.inf, 90: 612, 100: 717, 120: math.inf}

# Best first, by what there is to do:
#
#     few     up to 64 rows, or fewer tiles of 128 x 128 than multiprocessors: weights and launches are waited for, not
#             products, and mma.sync is fast enough on every card
#     deep    K so long that the second pass costs less than what torch's GEMM gains (Triton's own plan says which)
#     wide    more, and K of `_SEPARATE_FROM` or longer
#     many    the others: both kernels are equals where both use mma.sync
_FORMS = {
    "few": ("cuda", "triton", "separate"),
    "deep": ("separate", "triton", "cuda"),
    "wide": ("triton", "separate", "cuda"),
    "many": ("triton", "cuda", "separate"),
}


@functools.lru_cache(1024)
def forms_of(rows: int, width_out: int, width_in: int, capability: int, dropout: bool = False) -> tuple[str, ...]:
    """The three, best first, for x (rows, width_in) and a weight (width_out, width_in) on a card of that capability, 80
    and up, as large as they come. What a backend has no kernel for is "separate" on it: Triton for dropout, CUDA C++
    for rows of other than whole 16 bytes."""
    multiprocessors, separate_from = (
        table[max(known for known in table if known <= capability)] for table in (tiles.MULTIPROCESSORS, _SEPARATE_FROM)
    )
    plan = tiles.linear_gelu_fwd(rows, width_out, width_in, 2, True, False, True, True, capability, multiprocessors)
    blocks = tiles.cdiv(rows, 128) * tiles.cdiv(width_out, 128)
    if rows <= 64 or (plan.form != "separate" and blocks < multiprocessors):
        size = "few"
    elif plan.form == "separate":
        size = "deep"
    else:
        size = "wide" if width_in >= separate_from else "many"
    forms = _FORMS[size]
    for backend, has_kernel in (("triton", not dropout), ("cuda", width_in % 8 == 0)):
        if not has_kernel:
            rest = [form for form in forms if form != backend]
            at = rest.index("separate") + 1
            forms = (*rest[:at], backend, *rest[at:])
    return forms


def gemm_forms(x: Tensor, width_out: int, dropout: bool = False) -> tuple[str, ...] | None:
    """`forms_of` a linear layer on `x` (..., K); None where sizes do not decide: not on a GPU that has these kernels,
    not in half precision, or in a trace."""
    if not has_values(x) or torch.jit.is_tracing() or not x.is_cuda or x.dtype not in HALF:
        return None
    major, minor = torch.cuda.get_device_capability(x.device)
    if major < 8:
        return None
    width_in = x.shape[-1]
    return forms_of(x.numel() // max(width_in, 1), width_out, width_in, 10 * major + minor, dropout)


def automatic_order(
    x: Tensor, width_out: int, backend: str | None, dropout: bool = False, separate: str | None = None
) -> tuple[str, ...] | None:
    """The backends of a linear layer on `x` as the automatic choice takes them; None where sizes do not decide, or
    `backend` or a `use_backend` does.

    Args:
        separate: the backend that "separate" is. None where each has it.
    """
    forms = gemm_forms(x, width_out, dropout) if backend is None and not is_pinned() else None
    if forms is None:
        return None
    named = (separate if form == "separate" else form for form in forms)
    return tuple(dict.fromkeys((*(name for name in named if name is not None), "torch")))


def is_separate(x: Tensor, width_out: int) -> bool:
    """Whether the backend `cuda` leaves the GEMM to torch."""
    forms = gemm_forms(x, width_out)
    return forms is not None and forms.index("separate") < forms.index("cuda")
