"""The second stage of sums over rows, on the backend triton alone: every number of partial rows, columns and sums."""

import pytest
import torch

from bertfast.ops import _library
from helpers.op_cases import random
from helpers.poison import contiguous, poisoned_memory  # noqa: F401

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not _library.INTERPRETED or _library.triton_unavailable() is not None, reason="needs Triton"),
]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("programs", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 100])
def test_triton_sums_over_the_middle(count, programs, width):
    from bertfast.kernels.column_sum import column_sum

    partial = contiguous(random(count, programs, width, dtype=torch.float32, seed=count, grad=False))
    for ours, exact in zip(column_sum(partial), partial.double().sum(1), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("programs", [1, 70])
def test_triton_sums_of_equal_rows_are_exact(programs):
    from bertfast.kernels.column_sum import column_sum

    partial = torch.arange(3.0)[:, None, None].expand(3, programs, 40).contiguous()
    for k, total in enumerate(column_sum(partial)):
        assert torch.equal(total, torch.full((40,), float(k * programs)))
