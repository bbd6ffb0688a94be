"""Tile tables: every number within the limits that it has to meet, on every capability, for every shape."""

import pytest

from bertfast.kernels import tiles
from helpers.project import ROOT, block, copy_installation, run_python

CAPABILITIES = sorted(tiles.MULTIPROCESSORS)
GEMM_CAPABILITIES = [capability for capability in CAPABILITIES if capability >= 80]
WIDTHS = [1, 3, 16, 17, 48, 127, 128, 384, 768, 1000, 1024, 1025, 3072, 4096, 4097, 8192]
ROWS = [1, 2, 7, 8, 15, 16, 17, 32, 33, 64, 65, 128, 129, 512, 4096, 16384, 2**20]
# (K, N) of the linear layers of MiniLM, BERT-base, BERT-large, and one that nothing divides.
LAYERS = [(384, 1536), (384, 1152), (768, 3072), (3072, 768), (768, 2304), (1024, 4096), (1000, 4097)]

REGISTERS = 65536
ELEMENTS = 2**20  # the most that Triton lets a block have


def is_power_of_2(n):
    return n > 0 and n & (n - 1) == 0


def check_launchable(*sizes, num_warps):
    elements = 1
    for size in sizes:
        assert is_power_of_2(size)
        elements *= size
    assert elements <= ELEMENTS
    assert is_power_of_2(num_warps) and num_warps <= 32


def test_no_triton_is_imported(tmp_path):
    copy_installation(tmp_path / "site")
    path = (tmp_path / "site", block(tmp_path / "blocked", "triton"))
    done = run_python("-c", "from bertfast.kernels import tiles; print(tiles.MAX_WIDTH)", cwd=ROOT / "tests", path=path)
    assert done.stdout.strip() == "8192"


@pytest.mark.parametrize(("n", "power"), [(-1, 1), (0, 1), (1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)])
def test_next_power_of_2(n, power):
    assert tiles.next_power_of_2(n) == power


def test_cdiv():
    assert [tiles.cdiv(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_each_counted_capability_has_a_limit_of_shared_memory():
    assert set(CAPABILITIES) <= set(tiles.SHARED_KIB)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("table", "live_values"), [(tiles.layer_norm_fwd, 3), (tiles.layer_norm_bwd, 5)])
def test_row_tiles(table, live_values, width):
    tile = table(width)
    check_launchable(tile.block_m, tile.block_n, num_warps=tile.num_warps)
    assert width <= tile.block_n < max(2 * width, 32)
    threads = 32 * tile.num_warps
    values = tile.block_m * tile.block_n // threads
    # At least one 128-bit access in half precision, and no more live values than registers.
    assert values >= 8
    assert live_values * values <= min(255, REGISTERS // threads)


@pytest.mark.parametrize("multiprocessors", sorted(set(tiles.MULTIPROCESSORS.values())))
def test_programs_of_the_row_kernels_backward(multiprocessors):
    for width in WIDTHS:
        block_m = tiles.layer_norm_bwd(width).block_m
        for rows in ROWS:
            programs = tiles.layer_norm_bwd_programs(rows, block_m, multiprocessors)
            assert 1 <= programs <= min(2 * multiprocessors, max(1, rows))
            # Partial sums, three rows of fp32 at most, against three passes over the rows in half precision.
            assert programs == 1 or 3 * 4 * programs <= 3 * 2 * rows


@pytest.mark.parametrize("width", WIDTHS)
def test_column_sums(width):
    tile = tiles.column_sum(width)
    check_launchable(tile.block_p, tile.block_n, num_warps=tile.num_warps)
    assert 4 * tile.block_n >= 128
    assert tile.block_p * tile.block_n // (32 * tile.num_warps) <= 32


def operands_kib(tile, item_size):
    return (tile.block_m + tile.block_n) * tile.block_k * item_size * tile.num_stages / 1024


def check_gemm_tile(tile, rows, item_size, capability):
    check_launchable(tile.block_m, tile.block_n, num_warps=tile.num_warps)
    # mma takes 16 rows, 8 columns and 32 bytes of K at least; tl.dot takes 16 of each.
    assert min(tile.block_m, tile.block_n, tile.block_k) >= 16
    assert is_power_of_2(tile.block_k) and tile.group_m >= 1 and tile.num_stages >= 2
    assert tile.block_m <= max(16, tiles.next_power_of_2(rows))
    assert operands_kib(tile, item_size) <= tiles.SHARED_KIB[capability]
    # Tensor memory holds the accumulators of 100; elsewhere they are registers and leave room for the epilogue.
    if capability not in (100, 103):
        assert tile.block_m * tile.block_n // (32 * tile.num_warps) <= 128


@pytest.mark.parametrize("capability", GEMM_CAPABILITIES)
@pytest.mark.parametrize("item_size", [2, 4])
@pytest.mark.parametrize("aligned", [True, False])
def test_gemm_tiles(capability, item_size, aligned):
    multiprocessors = tiles.MULTIPROCESSORS[capability]
    for rows in ROWS:
        for _, width in LAYERS:
            tile = tiles.gemm_tile(rows, width, item_size, capability, multiprocessors, aligned)
            check_gemm_tile(tile, rows, item_size, capability)


@pytest.mark.parametrize("capability", GEMM_CAPABILITIES)
def test_splits_fill_the_card_and_cover_the_sum(capability):
    multiprocessors = tiles.MULTIPROCESSORS[capability]
    for rows in ROWS:
        for width_in, width in LAYERS:
            for item_size in (2, 4):
                tile = tiles.gemm_tile(rows, width, item_size, capability, multiprocessors)
                splits = tiles.gemm_splits(rows, width, width_in, tile, multiprocessors)
                programs = tiles.cdiv(rows, tile.block_m) * tiles.cdiv(width, tile.block_n)
                assert 1 <= splits <= 8
                assert splits == 1 or programs * splits <= multiprocessors
                # Launchers give every part the same number of steps: none may be left without one.
                steps = tiles.cdiv(width_in, tile.block_k)
                part = tiles.cdiv(steps, splits)
                assert (splits - 1) * part < steps <= splits * part


@pytest.mark.parametrize("capability", [90, 100])
def test_persistent_tiles(capability):
    multiprocessors = tiles.MULTIPROCESSORS[capability]
    for rows in (row for row in ROWS if row > 64):
        for _, width in LAYERS:
            tile = tiles.persistent_tile(rows, width, multiprocessors)
            check_gemm_tile(tile._replace(block_m=16), rows, 2, capability)
            # Half of the outputs are staged next to the operands; a descriptor's block has 256 rows at most.
            staged = tile.block_m * tile.block_n // 2 * 2 / 1024
            assert operands_kib(tile, 2) + staged <= tiles.SHARED_KIB[capability]
            assert max(tile.block_m, tile.block_n) <= 256 and tile.block_k * 2 <= 128


def plan(rows, width_in, width, capability, *, item_size=2, tensor_cores=True, dropout=False, tma=True, aligned=True):
    multiprocessors = tiles.MULTIPROCESSORS[capability]
    return tiles.linear_gelu_fwd(
        rows, width, width_in, item_size, tensor_cores, dropout, aligned, tma, capability, multiprocessors
    )


@pytest.mark.parametrize("capability", GEMM_CAPABILITIES)
@pytest.mark.parametrize(("width_in", "width"), LAYERS)
def test_plans_of_linear_gelu(capability, width_in, width):
    for rows in ROWS:
        for how in (
            {},
            dict(tma=False),
            dict(aligned=False, tma=False),
            dict(item_size=4),
            dict(item_size=4, tensor_cores=False),
        ):
            form, tile, splits = plan(rows, width_in, width, capability, **how)
            assert form in ("tile", "split", "persistent", "separate")
            assert (form == "split") == (splits > 1)
            if form in ("tile", "split"):
                check_gemm_tile(tile, rows, how.get("item_size", 2), capability)
            if form == "persistent":
                assert 90 <= capability < 120 and how.get("tma", True) and how.get("item_size", 2) == 2
            assert plan(rows, width_in, width, capability, dropout=True, **how).form == "separate"
            if how.get("tensor_cores", True) is False and rows > 64:
                assert form == "separate"


def test_a_known_plan_for_each_form():
    assert plan(8, 768, 3072, 80).form == "split"
    assert plan(4096, 768, 3072, 80).form == "tile"
    assert plan(4096, 768, 3072, 90).form == "persistent"
    assert plan(4096, 768, 3072, 90, tma=False).form == "tile"
    assert plan(4096, 768, 3072, 120).form == "tile"
    assert plan(4096, 4096, 1024, 100).form == "separate"


@pytest.mark.parametrize("capability", GEMM_CAPABILITIES)
@pytest.mark.parametrize(("width_in", "width"), LAYERS)
def test_row_counts_make_few_plans(capability, width_in, width):
    """Each plan is another variant to compile."""
    row_counts = (*range(1, 200), *range(200, 20000, 8))
    gelu = {plan(rows, width_in, width, capability) for rows in row_counts}
    multiprocessors = tiles.MULTIPROCESSORS[capability]
    qkv = {
        tiles.qkv_projection_fwd(rows, width // 3, width_in, 2, True, capability, multiprocessors)
        for rows in row_counts
    }
    assert len(gelu) <= 10
    assert len(qkv) <= 10


@pytest.mark.parametrize("width", WIDTHS)
def test_elementwise_tiles(width):
    tile = tiles.bias_activation(width)
    check_launchable(tile.block_m, tile.block_n, num_warps=tile.num_warps)
    assert tile.block_m * tile.block_n // (32 * tile.num_warps) >= 8
    for multiprocessors in set(tiles.MULTIPROCESSORS.values()):
        for rows in ROWS:
            programs = tiles.linear_gelu_bwd_programs(rows, width, tile, multiprocessors)
            assert 1 <= programs <= min(65535, rows)
            assert programs == 1 or 4 * programs * tile.block_m <= rows + 4 * tile.block_m


@pytest.mark.parametrize("capability", GEMM_CAPABILITIES)
def test_qkv_tiles(capability):
    multiprocessors = tiles.MULTIPROCESSORS[capability]
    for rows in ROWS:
        for width in (384, 768, 1000, 1024):
            for item_size in (2, 4):
                tile, splits = tiles.qkv_projection_fwd(
                    rows, width, width, item_size, True, capability, multiprocessors
                )
                check_gemm_tile(tile, rows, item_size, capability)
                assert 1 <= splits <= 8


def test_qkv_weights_are_packed_for_large_products_where_it_pays():
    for capability in GEMM_CAPABILITIES:
        packed = [tiles.qkv_weights_are_packed(rows, 2304, 768, capability) for rows in ROWS]
        assert packed == sorted(packed)
        assert any(packed) == (90 <= capability < 120)
    check_launchable(tiles.update_pack().block_m, tiles.update_pack().block_n, num_warps=tiles.update_pack().num_warps)


HEAD_DIMS = [1, 8, 16, 20, 32, 48, 64, 72, 80, 96, 128, 160, 256]


@pytest.mark.parametrize("capability", GEMM_CAPABILITIES)
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("item_size", [2, 4])
@pytest.mark.parametrize("table", [tiles.attention_fwd, tiles.attention_bwd_dq, tiles.attention_bwd_dk_dv])
def test_attention_tiles(table, item_size, crowded, capability):
    for head_dim in HEAD_DIMS:
        for length in (1, 16, 17, 64, 65, 512, 4096):
            tile = table(length, head_dim, item_size, crowded, capability)
            check_launchable(tile.block_m, tile.block_n, num_warps=tile.num_warps)
            assert head_dim <= tile.block_d < max(2 * head_dim, 17) and is_power_of_2(tile.block_d)
            # 16 is the least that each side of a matrix product takes, and dropout's words come in fours.
            assert min(tile.block_m, tile.block_n, tile.block_d) >= 16
            # Keys and values of each stage, and the queries.
            kib = (2 * tile.num_stages * tile.block_n + 2 * tile.block_m) * tile.block_d * item_size / 1024
            assert kib <= tiles.SHARED_KIB[capability]


@pytest.mark.parametrize("capability", GEMM_CAPABILITIES)
@pytest.mark.parametrize("item_size", [2, 4])
def test_attention_mask_tiles(item_size, capability):
    for head_dim in HEAD_DIMS:
        for queries in (1, 16, 17, 64, 65, 512, 4096):
            tile = tiles.attention_mask_bwd(queries, head_dim, item_size, capability)
            check_launchable(tile.block_m, tile.block_n, num_warps=tile.num_warps)
            assert tile.block_d >= head_dim and min(tile.block_m, tile.block_n, tile.block_d) >= 16
            kib = 2 * (tile.block_n + tile.block_m) * tile.block_d * item_size / 1024
            assert kib <= tiles.SHARED_KIB[capability]


@pytest.mark.parametrize("capability", GEMM_CAPABILITIES)
def test_lengths_make_few_tiles_of_attention(capability):
    """Each tile is another variant to compile."""
    for table in (tiles.attention_fwd, tiles.attention_bwd_dq, tiles.attention_bwd_dk_dv):
        assert len({table(length, 64, 2, False, capability) for length in range(1, 2000)}) <= 3


def test_descriptors_are_for_long_sequences_of_half_precision_where_the_card_has_them():
    assert tiles.attention_descriptors(512, 2, 90) and tiles.attention_descriptors(256, 2, 100)
    assert not tiles.attention_descriptors(255, 2, 90)
    assert not tiles.attention_descriptors(512, 4, 90)
    assert not tiles.attention_descriptors(512, 2, 80) and not tiles.attention_descriptors(512, 2, 120)


@pytest.mark.parametrize("lengths", [[1], [64], [65], [64, 64], [0, 0], [1, 0, 65], [40] * 511 + [512]], ids=len)
def test_packed_blocks_are_enough_and_few(lengths):
    for size in (16, 64, 128):
        useful = sum(tiles.cdiv(length, size) for length in lengths)
        launched = tiles.attention_blocks(sum(lengths), size, len(lengths))
        assert useful <= launched <= sum(lengths) // size + len(lengths)


def test_padded_blocks():
    assert [tiles.attention_blocks(length, 64, 0) for length in (1, 64, 65)] == [1, 1, 2]
