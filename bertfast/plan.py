"""How a forward treats padding: packed, or padded with a mask. Decided once for a whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bertfast.backends import is_traced
from bertfast.packing import Packing, check_mask, mask_sizes

IGNORED_LABEL = -100


class RowUse(NamedTuple):
    """Which results the caller goes on to use beside those of real tokens: results at padded positions exist on the
    padded path only.

    Attributes:
        padded_rows: all of them.
        first_token: the first token of every row, which left padding masks.
        labels: (B, S); those rows whose label is not -100.
        nothing_else: no result but those of the first tokens, be they real or not.
    """

    padded_rows: bool = False
    first_token: bool = False
    labels: Tensor | None = None
    nothing_else: bool = False


REAL_ROWS = RowUse()


class Plan(NamedTuple):
    """How a forward treats padding.

    Attributes:
        packing: run packed; None runs padded.
        attn_mask: for attention on the padded path; None when every key takes part.
        rows: (B, S) bool, the rows of the padded path to keep where the others must read 0; None keeps all.
    """

    packing: Packing | None = None
    attn_mask: Tensor | None = None
    rows: Tensor | None = None

    def keep_rows(self, hidden_states: Tensor) -> Tensor:
        """(B, S, N) of the padded path with zeros outside of `rows`."""
        return hidden_states if self.rows is None else hidden_states.masked_fill(~self.rows.unsqueeze(-1), 0.0)


def plan_rows(
    mask: Tensor, use: RowUse, must_pad: Callable[[], bool], can_pack: Callable[[], bool] = lambda: True
) -> Plan:
    """The plan for a (B, S) mask, by one transfer to the host; by none where the result is padded in any case.

    Args:
        mask: nonzero where a token is real, of any dtype.
        use: which padded rows are needed.
        must_pad: whether something else needs stock's rows.
        can_pack: whether the packed path exists; where it does not, the padded one gives the same rows.

    Raises:
        ValueError: a mask of another rank.
    """
    real = check_mask(mask)
    padded = Plan(attn_mask=real[:, None, None, :])
    if use.padded_rows or must_pad():
        return padded
    wanted = []
    if use.first_token:
        wanted.append((~real[:, :1]).any())
    # The loss says what is wrong with labels of another size.
    if use.labels is not None and use.labels.numel() == real.numel():
        labels = use.labels.to(real.device).reshape(real.shape)
        wanted.append(((labels != IGNORED_LABEL) & ~real).any())
    if is_traced(real) or not can_pack():
        return padded._replace(rows=torch.stack([real, *(w.expand_as(real) for w in wanted)]).any(0))
    total, longest, *found = mask_sizes(real, *wanted)
    if total == real.numel():
        return Plan()
    return padded if any(found) else Plan(Packing.from_sizes(real, total, longest))
