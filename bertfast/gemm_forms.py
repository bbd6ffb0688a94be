"""Who computes a linear layer in half precision on a GPU, by its sizes: the kernels in Triton or in CUDA C++, or
"separate", torch's GEMM and a second pass over its outputs for bias, activation and dropout.

Reasoned, not measured. In C++ a launch costs the host less than Triton's; mma.sync, which the kernel in CUDA C++ uses,
has about 5 of 8 of the FLOPs of wgmma on 9.0, and less of tcgen05's on 10.0, while the second pass costs
367 / K of the GEMM on 9.0 and 430 / K on 10.0 (`kernels.tiles`).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from bertfast.backends import HALF
from bertfast.kernels import tiles

# Best first, by what there is to do:
#
#     few     up to 64 rows, or fewer tiles of 128 x 128 than multiprocessors: weights and launches are waited for, not
#             products, and mma.sync is fast enough on every card
#     deep    K so long that the second pass costs less than what torch's GEMM gains (Triton's own plan says which)
#     many    the others. What mma.sync leaves idle on 9.0 and 10.0 is more than the second pass costs from K = 600 on.
#             Elsewhere both kernels use it, and are equals
_MMA_SYNC = {
    "few": ("cuda", "triton", "separate"),
    "deep": ("separate", "triton", "cuda"),
    "many": ("triton", "cuda", "separate"),
}
_WARPGROUPS = {**_MMA_SYNC, "many": ("triton", "separate", "cuda")}


@functools.lru_cache(1024)
def forms_of(rows: int, width_out: int, width_in: int, capability: int) -> tuple[str, ...]:
    """ "triton", "cuda" and "separate", best first, for (rows, width_in) by (width_out, width_in) on a card of that
    capability, 80 and up, as large as they come."""
    multiprocessors = tiles.MULTIPROCESSORS[max(known for known in tiles.MULTIPROCESSORS if known <= capability)]
    plan = tiles.linear_gelu_fwd(rows, width_out, width_in, 2, True, False, True, True, capability, multiprocessors)
    if plan.form == "separate":
        size = "deep"
    else:
        blocks = tiles.cdiv(rows, 128) * tiles.cdiv(width_out, 128)
        size = "few" if rows <= 64 or blocks < multiprocessors else "many"
    return (_WARPGROUPS if 90 <= capability < 120 else _MMA_SYNC)[size]


def gemm_forms(x: Tensor, width_out: int) -> tuple[str, ...] | None:
    """`forms_of` a linear layer on `x` (..., K); None where sizes do not decide: not on a GPU that has these kernels,
    not in half precision, or in a trace, which knows no sizes."""
    if torch.compiler.is_compiling() or not x.is_cuda or x.dtype not in HALF:
        return None
    major, minor = torch.cuda.get_device_capability(x.device)
    if major < 8:
        return None
    width_in = x.shape[-1]
    return forms_of(x.numel() // max(width_in, 1), width_out, width_in, 10 * major + minor)


def automatic_order(x: Tensor, width_out: int) -> tuple[str, ...] | None:
    """The backends of a linear layer on `x` as the automatic choice takes them, where sizes decide."""
    forms = gemm_forms(x, width_out)
    return forms and (*(form for form in forms if form != "separate"), "torch")


def is_separate(x: Tensor, width_out: int) -> bool:
    """Whether the backend `cuda` leaves the GEMM to torch."""
    forms = gemm_forms(x, width_out)
    return forms is not None and forms.index("separate") < forms.index("cuda")
