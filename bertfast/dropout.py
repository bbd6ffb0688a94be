"""Counter-based dropout: the same mask on every backend, from a seed that is a tensor.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a 64-bit key and a 128-bit
counter into four 32-bit words. The key is the seed; the counter names the element:

    counter = (column // 4, row, batch_head, stream)        word = column % 4
    dropped  <=>  word < floor(p * 2**32)                   kept values are scaled by 1 / (1 - p)

    op                  column      row                   batch_head
    attention           key index   query index           batch * heads + head (varlen: sequence * heads + head)
    everything else     column      row % 2**32           row // 2**32

So a backward pass regenerates its mask from the seed and nothing is stored, in whatever block order a kernel likes.
This module is the specification in plain PyTorch; kernels are tested against it bit by bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STREAMS = {"attention": 0, "add_layer_norm": 1, "feed_forward": 2, "embed_layer_norm": 3}

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def new_seed(device: torch.device) -> Tensor:
    """One int64 drawn from torch's generator of `device`: reproducible with `torch.manual_seed`, traceable, and
    redrawn by every replay of a CUDA graph."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def seed_for(dropout_p: float, seed: Tensor | None, device: torch.device) -> Tensor | None:
    """The seed of a kernel's mask: `seed` or else a new one, and None where nothing is dropped.

    Raises:
        ValueError: `seed` is no int64 tensor of one element on `device`.
    """
    if dropout_p == 0.0:
        return None
    if seed is None:
        return new_seed(device)
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
        raise ValueError(
            f"_seed must be an int64 tensor of one element on {device}, got {seed.dtype} of shape "
            f"{tuple(seed.shape)} on {seed.device}"
        )
    return seed


def check_probability(dropout_p: float) -> None:
    """Raises ValueError unless `dropout_p` is in [0, 1]."""
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")


def keep_scale(dropout_p: float) -> float:
    """1 / (1 - p), and 0 for p = 1 where nothing is kept."""
    return 0.0 if dropout_p >= 1.0 else 1.0 / (1.0 - dropout_p)


def philox(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10 on int64 tensors that hold unsigned 32-bit words; `counter` tensors broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        # int64 products wrap modulo 2**64, which keeps all 64 bits of the unsigned 32x32 product.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def dropout_mask(seed: Tensor, shape: tuple[int, ...], dropout_p: float, op: str = "add_layer_norm") -> Tensor:
    """The keep mask that `op` uses for `seed`: bool, True where the element is kept.

    Args:
        seed: int64 tensor of one element, as passed to the op's `_seed`.
        shape: (B, H, S_q, S_k) for `"attention"`; for the other ops the shape of the tensor that is dropped, whose
            last dimension gives the columns and whose leading ones, flattened, the rows. For `varlen_attention` use
            (sequences, H, max_seqlen_q, max_seqlen_k): each sequence's mask is the top left corner of its slice.
        dropout_p: probability of dropping, in [0, 1].
        op: a key of `STREAMS`.

    Raises:
        ValueError: `dropout_p` outside [0, 1], an unknown `op`, or a shape of the wrong rank.
    """
    check_probability(dropout_p)
    if op not in STREAMS:
        raise ValueError(f"op must be one of {sorted(STREAMS)}, got {op!r}")
    if op == "attention" and len(shape) != 4:
        raise ValueError(f"shape must be (B, H, S_q, S_k) for attention, got {tuple(shape)}")
    device = seed.device
    columns = shape[-1]
    if op == "attention":
        batch_head = torch.arange(shape[0] * shape[1], device=device).view(-1, 1, 1)
        row = torch.arange(shape[2], device=device).view(1, -1, 1)
    else:
        flat = torch.arange(math.prod(shape[:-1]), device=device).view(-1, 1)
        batch_head, row = flat >> 32, flat & _LOW
    quad = torch.arange((columns + 3) // 4, device=device)
    stream = torch.full((), STREAMS[op], dtype=torch.int64, device=device)
    words = torch.stack(torch.broadcast_tensors(*philox(seed, (quad, row, batch_head, stream))), dim=-1)
    words = words.flatten(-2)[..., :columns].reshape(shape)
    return words >= math.floor(dropout_p * 2**32)


def apply_dropout(x: Tensor, dropout_p: float, op: str, seed: Tensor | None) -> Tensor:
    """Dropout in plain PyTorch: torch's own generator, or the mask of `seed` when one is given."""
    if dropout_p == 0.0:
        return x
    if seed is None:
        return torch.nn.functional.dropout(x, dropout_p)
    keep = dropout_mask(seed, tuple(x.shape), dropout_p, op)
    return torch.where(keep, x * keep_scale(dropout_p), 0.0)
