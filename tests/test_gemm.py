"""What the GEMM kernels share, apart from their products: the order of tiles."""

import importlib

import pytest
import torch
import triton
import triton.language as tl

gemm = importlib.import_module("bertfast.kernels.gemm")

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is 0")


@triton.jit
def tile_of_kernel(out_ptr, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    i_tile = tl.program_id(0)
    i_m, i_n = gemm.tile_of(i_tile, tiles_m, tiles_n, GROUP_M)
    tl.store(out_ptr + 2 * i_tile, i_m)
    tl.store(out_ptr + 2 * i_tile + 1, i_n)


@pytest.mark.parametrize(
    ("tiles_m", "tiles_n", "group"), [(1, 1, 8), (3, 5, 8), (8, 3, 8), (9, 2, 8), (19, 5, 8), (7, 4, 3), (5, 3, 1)]
)
def test_tiles_go_down_a_group_of_rows_before_they_go_one_column_on(tiles_m, tiles_n, group):
    out = torch.full((tiles_m * tiles_n, 2), -1, dtype=torch.int32)
    tile_of_kernel[(tiles_m * tiles_n,)](out, tiles_m, tiles_n, group)
    expected = [
        [row, column]
        for first in range(0, tiles_m, group)
        for column in range(tiles_n)
        for row in range(first, min(first + group, tiles_m))
    ]
    assert out.tolist() == expected
