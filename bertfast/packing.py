"""Packing: the real tokens of a padded batch laid end to end, and back.

A (B, S, N) batch whose (B, S) mask marks T tokens becomes (T, N). `cu_seqlens` marks where each sequence begins, so
attention stays within sequences, and everything else in an encoder works token by token. The mask may have any form:
padding right or left, holes, empty rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertfast.backends import is_transformed, needs_grad


@dataclass(frozen=True)
class Packing:
    """Where the T real tokens of a (B, S) batch are.

    Attributes:
        indices: (T,) int64, positions in the flattened batch, ascending.
        cu_seqlens: (B + 1,) int32, where each sequence begins in the packed tokens; the last entry is T.
        max_seqlen: length of the longest sequence.
        batch, seqlen: B and S.
    """

    indices: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    batch: int
    seqlen: int

    @classmethod
    def from_mask(cls, mask: Tensor) -> Packing:
        """From a (B, S) mask of any dtype, nonzero where a token is real. One device-to-host transfer.

        Raises:
            ValueError: a mask of another rank.
        """
        real = check_mask(mask)
        total, longest = mask_sizes(real)
        return cls.from_sizes(real, total, longest)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], seqlen: int, device: torch.device | str = "cpu") -> Packing:
        """From lengths on the host, padding on the right; nothing is transferred back from the device.

        Raises:
            ValueError: a length outside [0, seqlen].
        """
        for length in lengths:
            if not 0 <= length <= seqlen:
                raise ValueError(f"lengths must be between 0 and seqlen={seqlen}, got {length}")
        on_host = torch.tensor(lengths, dtype=torch.int64)
        real = torch.arange(seqlen) < on_host[:, None]
        packing = cls.from_sizes(real, sum(lengths), max(lengths, default=0))
        indices, cu_seqlens = (t.to(device, non_blocking=True) for t in (packing.indices, packing.cu_seqlens))
        return cls(indices, cu_seqlens, packing.max_seqlen, packing.batch, packing.seqlen)

    @classmethod
    def from_sizes(cls, real: Tensor, total: int, longest: int) -> Packing:
        """From a (B, S) bool mask whose number of tokens and longest length are known; nothing is transferred."""
        batch, seqlen = real.shape
        indices = torch.nonzero_static(real.flatten(), size=total).squeeze(1)
        cu_seqlens = torch.zeros(batch + 1, dtype=torch.int32, device=real.device)
        torch.cumsum(real.sum(1), 0, out=cu_seqlens[1:])
        return cls(indices, cu_seqlens, longest, batch, seqlen)

    def unpad(self, x: Tensor) -> Tensor:
        """(B, S, ...) to (T, ...); differentiable any number of times.

        Raises:
            ValueError: `x` does not begin with this packing's B and S.
        """
        if tuple(x.shape[:2]) != (self.batch, self.seqlen):
            raise ValueError(f"x must have shape ({self.batch}, {self.seqlen}, ...), got {tuple(x.shape)}")
        flat = x.flatten(0, 1)
        if not _takes_function(x):
            return flat.index_select(0, self.indices)
        return _Unpad.apply(flat, self.indices)

    def repad(self, packed: Tensor) -> Tensor:
        """(T, ...) to (B, S, ...), zeros where there is no token; differentiable any number of times.

        Raises:
            ValueError: `packed` does not begin with this packing's T.
        """
        if packed.shape[0] != self.indices.shape[0]:
            raise ValueError(f"packed must have shape ({self.indices.shape[0]}, ...), got {tuple(packed.shape)}")
        rows = self.batch * self.seqlen
        move = _Repad.apply if _takes_function(packed) else _scatter
        flat = move(packed, self.indices, rows)
        return flat.unflatten(0, (self.batch, self.seqlen))


def _takes_function(x: Tensor) -> bool:
    """Whether gradients go through the Functions below; `torch.func` and forward mode take plain ops only."""
    return needs_grad(x) and not is_transformed()


def _scatter(packed: Tensor, indices: Tensor, rows: int) -> Tensor:
    return packed.new_zeros(rows, *packed.shape[1:]).index_copy_(0, indices, packed)


class _Unpad(torch.autograd.Function):
    """Gathers rows; its backward is _Repad, because plain indexing's backward sorts the indices on CUDA."""

    @staticmethod
    def forward(ctx, flat, indices):
        ctx.save_for_backward(indices)
        ctx.rows = flat.shape[0]
        return flat.index_select(0, indices)

    @staticmethod
    def backward(ctx, grad):
        return _Repad.apply(grad, ctx.saved_tensors[0], ctx.rows), None


class _Repad(torch.autograd.Function):
    """Scatters rows into zeros; its backward is _Unpad."""

    @staticmethod
    def forward(ctx, packed, indices, rows):
        ctx.save_for_backward(indices)
        return _scatter(packed, indices, rows)

    @staticmethod
    def backward(ctx, grad):
        return _Unpad.apply(grad, ctx.saved_tensors[0]), None, None


def check_mask(mask: Tensor) -> Tensor:
    """The bool form of a (B, S) mask. Raises ValueError for another rank."""
    if mask.dim() != 2:
        raise ValueError(f"mask must have shape (B, S), got {tuple(mask.shape)}")
    return mask if mask.dtype == torch.bool else mask != 0


def mask_sizes(real: Tensor, *flags: Tensor) -> list[int]:
    """[total, longest, *flags] of a (B, S) bool mask as Python numbers, in one device-to-host transfer."""
    lengths = real.sum(1)
    longest = lengths.max() if lengths.numel() else lengths.sum()
    return torch.stack([lengths.sum(), longest, *(flag.to(torch.int64) for flag in flags)]).tolist()


def unpad(x: Tensor, mask: Tensor) -> tuple[Tensor, Packing]:
    """The real tokens of `x` end to end, and the packing that leads back.

    Equivalent PyTorch: `x[mask != 0]`.

    Args:
        x: (B, S, ...).
        mask: (B, S) of any dtype, nonzero where a token is real: right or left padding, holes, empty rows.

    Returns:
        (T, ...) and its :class:`Packing`, whose `cu_seqlens` and `max_seqlen` go to `ops.varlen_attention`.

    Raises:
        ValueError: `mask` is not (B, S) or does not fit `x`.
    """
    packing = Packing.from_mask(mask)
    return packing.unpad(x), packing


def repad(packed: Tensor, packing: Packing) -> Tensor:
    """(T, ...) back to (B, S, ...), with zeros in the padded rows.

    Raises:
        ValueError: `packed` has another number of tokens than `packing`.
    """
    return packing.repad(packed)
