"""attention on every backend: parity forward and backward, masks of every kind, fully masked rows, dropout, errors."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bertfast import BackendError, ops, reference
from helpers import poison
from helpers.op_cases import ALL_DTYPES, Attention, backends_for, each_backend_for, random, seed_tensor
from helpers.poison import LAYOUTS, poisoned_memory  # noqa: F401
from helpers.tolerance import assert_parity, random_cotangents

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.dtypes_in_turn]

SERVED = backends_for("attention")
EVERY = backends_for("attention", ALL_DTYPES)
EACH = each_backend_for("attention")
INF = float("inf")


def case(batch, heads, s_q, s_k, width, dtype, mask=None, layout=poison.contiguous, **settings):
    q, k, v = (
        layout(random(batch, heads, length, width, dtype=dtype, seed=seed))
        for seed, length in ((1, s_q), (2, s_k), (3, s_k))
    )
    return Attention({"query": q, "key": k, "value": v, "attn_mask": mask}, settings)


def bools(*shape, seed=0, share=0.7):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


@pytest.mark.parametrize(
    "s_q, s_k",
    [(1, 1), (7, 7), (16, 16), (17, 17), (63, 63), (64, 64), (200, 200)]
    + [(127, 129), (129, 127), (1, 33), (33, 1), (5, 3), (40, 33), (16, 200), (64, 17)]
    # Ends of blocks, cheap enough to be tried on many mutants.
    + [(1, 63), (63, 1), (1, 65), (65, 1)],
)
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_lengths(backend, dtype, s_q, s_k):
    assert_parity(case(1, 2, s_q, s_k, 16, dtype), backend)


@pytest.mark.parametrize("width", [1, 4, 8, 12, 20, 24, 32, 48, 64, 72, 80, 96, 128, 160, 256])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_head_dims(backend, dtype, width):
    for length in (2, 17):
        assert_parity(case(2, 2, length, length + 1, width, dtype), backend)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 4, 8, 12, 20, 24, 32, 48, 64, 72, 80, 96, 128, 160, 256])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_head_dims_and_lengths(backend, dtype, width):
    for length in (1, 3, 15, 16, 17, 33):
        mask = bools(2, 1, 1, length) if length % 4 == 1 else None
        assert_parity(case(2, 2, length, length, width, dtype, mask), backend)


@pytest.mark.parametrize("shape", [(0, 2, 5, 5, 8), (2, 0, 5, 5, 8), (2, 3, 0, 5, 8), (2, 3, 5, 0, 8), (2, 3, 0, 0, 8)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, "keys", "pairs", "expanded", "float"])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_empty(backend, dtype, mask, shape, is_causal):
    batch, _, s_q, s_k, _ = shape
    made = {
        None: lambda: None,
        "keys": lambda: bools(batch, 1, 1, s_k),
        "pairs": lambda: bools(s_q, s_k),
        "expanded": lambda: bools(batch, 1, 1, s_k).expand(batch, 1, s_q, s_k),
        "float": lambda: bias_of(bools(batch, 1, s_q, s_k), dtype),
    }[mask]()
    results = assert_parity(case(*shape, dtype, made, is_causal=is_causal), backend)
    assert not any(result.any() for result in results.values())


@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_heads_without_any_dimension(backend, dtype):
    empty = torch.ones(2, 3, 5, 0, dtype=dtype, requires_grad=True)
    out = ops.attention(empty, empty, empty, torch.ones(5, 5), backend=backend)
    out.sum().backward()
    assert out.shape == empty.grad.shape == (2, 3, 5, 0)


MASKS = {
    "right padding": lambda b, h, q, k: torch.arange(k) < torch.tensor([k, k // 2]).view(b, 1, 1, 1),
    "left padding": lambda b, h, q, k: torch.arange(k) >= torch.tensor([0, k // 2]).view(b, 1, 1, 1),
    "holes": lambda b, h, q, k: bools(b, 1, 1, k),
    "(q, k)": lambda b, h, q, k: bools(q, k),
    "(1, k)": lambda b, h, q, k: bools(1, k),
    "(h, q, k)": lambda b, h, q, k: bools(h, q, k),
    "(1, q, k)": lambda b, h, q, k: bools(1, q, k),
    "(b, 1, q, k)": lambda b, h, q, k: bools(b, 1, q, k),
    "(1, h, 1, k)": lambda b, h, q, k: bools(1, h, 1, k),
    "(b, h, q, k)": lambda b, h, q, k: bools(b, h, q, k),
    "(b, h, q, 1)": lambda b, h, q, k: bools(b, h, q, 1),
    "block diagonal": lambda b, h, q, k: (torch.arange(q)[:, None] < 3) == (torch.arange(k) < 3),
    "expanded": lambda b, h, q, k: bools(b, 1, 1, k).expand(b, h, q, k),
    "keys with a stride": lambda b, h, q, k: bools(b, 1, 1, 2 * k)[..., ::2],
    "keys outermost": lambda b, h, q, k: bools(k, b).t()[:, None, None],
}


def bias_of(mask, dtype, seed=5):
    noise = random(*mask.shape, dtype=dtype, seed=seed, grad=False)
    return noise.masked_fill(~mask, -INF)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_bool_masks(backend, dtype, name, is_causal):
    mask = MASKS[name](2, 3, 9, 11)
    assert_parity(case(2, 3, 9, 11, 16, dtype, mask, is_causal=is_causal), backend)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_float_masks(backend, dtype, name, is_causal):
    mask = bias_of(MASKS[name](2, 3, 9, 11), dtype)
    assert_parity(case(2, 3, 9, 11, 16, dtype, mask, is_causal=is_causal), backend)


@pytest.mark.parametrize(
    "name", ["(q, k)", "(h, q, k)", "(b, 1, q, k)", "(1, h, 1, k)", "(b, h, q, k)", "(b, h, q, 1)"]
)
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_a_bias_gets_its_gradient(backend, dtype, name):
    bias = random(*MASKS[name](2, 3, 9, 11).shape, dtype=dtype, seed=6)
    results = assert_parity(case(2, 3, 9, 11, 16, dtype, bias), backend)
    # What all keys share has none.
    if results is not None and "dattn_mask" in results and bias.shape[-1] > 1:
        assert results["dattn_mask"].any()


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_masks_of_another_dtype(backend, dtype, of):
    mask = bias_of(MASKS["(b, 1, q, k)"](2, 3, 9, 11), of)
    assert_parity(case(2, 3, 9, 11, 16, dtype, mask), backend)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_an_eight_bit_mask(backend, dtype, is_causal):
    ones = torch.ones(1, 1, 5, 16, dtype=dtype)
    mask = torch.tensor([0.0, 1.0, -2.0, 0.5, 4.0]).expand(5, 5)
    expected = ops.attention(ones, ones, ones, mask, is_causal=is_causal, backend=backend)
    out = ops.attention(ones, ones, ones, mask.to(torch.float8_e4m3fn), is_causal=is_causal, backend=backend)
    torch.testing.assert_close(out, expected)


# Of keys beyond the sequence, in rows that are not stored.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("of", [None, torch.float32])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_huge_finite_biases_are_arithmetic(backend, dtype, of):
    """A row of the lowest number is uniform: the score vanishes in it. It is not a masked row."""
    of = of or dtype
    mask = torch.zeros(2, 1, 5, 7, dtype=of)
    mask[0, :, 1] = torch.finfo(of).min
    mask[0, :, 2] = torch.finfo(of).min / 2
    mask[1, :, 3, :4] = torch.finfo(of).min
    mask[1, :, 4, 2] = -10000.0
    whole = case(2, 3, 5, 7, 16, dtype, mask)
    results = assert_parity(whole, backend)
    if of in (dtype, torch.float32) and dtype in (torch.float32, torch.bfloat16):
        mean = whole.inputs["value"][0].double().mean(-2)
        assert (results["out"][0, :, 1].double() - mean).abs().max() < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_a_masked_key_never_wins(backend, dtype, kind):
    """+8000 on the masked key against -2500 on the other: masking by -10000 would give it all the weight."""
    q = torch.tensor([[100.0, 1.0]], dtype=dtype).view(1, 1, 1, 2)
    k = torch.tensor([[80.0, 0.0], [-25.0, 0.0]], dtype=dtype).view(1, 1, 2, 2)
    v = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype).view(1, 1, 2, 2)
    keep = torch.tensor([[False, True]])
    mask = keep if kind == "bool" else torch.zeros(1, 2).masked_fill(~keep, -INF)
    assert torch.equal(ops.attention(q, k, v, mask, scale=1.0, backend=backend), v[:, :, 1:])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("of", ["keys", "queries and keys"])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_a_masked_key_gets_no_gradient_however_large_its_scores(backend, dtype, of, kind):
    mask = torch.ones(2, 1, 1 if of == "keys" else 9, 11, dtype=torch.bool)
    mask[0, ..., 3], mask[1, ..., 8:] = False, False
    whole = case(2, 3, 9, 11, 16, dtype, mask if kind == "bool" else bias_of(mask, dtype))
    with torch.no_grad():
        whole.inputs["key"][0, :, 3] *= 1000
        whole.inputs["key"][1, :, 8:] *= -1000
    results = assert_parity(whole, backend)
    for gradient in (results[name] for name in ("dkey", "dvalue") if name in results):
        assert not gradient[0, :, 3].any() and not gradient[1, :, 8:].any()


@pytest.mark.parametrize("width", [20, 72])
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_head_dims_across_blocks(backend, dtype, width):
    assert_parity(case(1, 1, 40, 140, width, dtype), backend)


# Of masked keys, whose rows become 0.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_large_scores_beside_blocks_without_keys(backend, dtype):
    """2 to the power of such a score overflows: a block in which all keys are masked must not reset the maximum."""
    mask = torch.arange(140).ge(130).view(1, 1, 1, 140)
    assert_parity(case(1, 1, 5, 140, 16, dtype, mask, scale=64.0), backend)


ACROSS_BLOCKS = {
    "keys": lambda dtype: bools(2, 1, 1, 200),
    "(q, k)": lambda dtype: bools(70, 200),
    "left padding of a block and more": lambda dtype: torch.arange(200).ge(130).view(1, 1, 1, 200),
    "right padding of a block and more": lambda dtype: torch.arange(200).lt(3).view(1, 1, 1, 200),
    "bias of keys": lambda dtype: random(2, 1, 1, 200, dtype=dtype, seed=6),
    "bias of queries": lambda dtype: random(1, 2, 70, 1, dtype=dtype, seed=6),
    "bias": lambda dtype: random(1, 1, 70, 200, dtype=dtype, seed=6),
    "none": lambda dtype: None,
}


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ACROSS_BLOCKS)
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_several_blocks_of_queries_and_keys(backend, dtype, name, is_causal, dropout_p):
    settings = {"is_causal": is_causal, "dropout_p": dropout_p, "seed": seed_tensor()}
    mask = ACROSS_BLOCKS[name](dtype)
    if backend == "torch" and mask is not None:
        # Stock takes another kernel for a bias that needs a gradient: other bits than without gradients.
        mask.requires_grad_(False)
    assert_parity(case(2, 2, 70, 200, 16, dtype, mask, **settings), backend)


BEYOND_CPU_BLOCKS = {
    "none": lambda dtype: None,
    "left padding of a block and more": lambda dtype: torch.arange(1200).ge(700).view(1, 1, 1, 1200),
    "bias": lambda dtype: random(1, 1, 401, 1200, dtype=dtype, seed=6),
    "bias of keys": lambda dtype: random(1, 2, 1, 1200, dtype=dtype, seed=6),
}


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", BEYOND_CPU_BLOCKS)
@pytest.mark.parametrize("dtype", [dtype for backend, dtype in SERVED if backend == "cpu"])
def test_more_keys_than_a_block_and_queries_than_a_unit_of_the_cpu_kernels(dtype, name, is_causal, dropout_p):
    settings = {"is_causal": is_causal, "dropout_p": dropout_p, "seed": seed_tensor()}
    # Parts of an odd number are unequal.
    assert_parity(case(1, 2, 401, 1200, 16, dtype, BEYOND_CPU_BLOCKS[name](dtype), **settings), "cpu")


FULLY_MASKED = {
    "bool row of a batch": lambda dtype: torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 8),
    "bool row of queries": lambda dtype: bools(2, 1, 8, 8).index_fill(2, torch.tensor([2, 5]), False),
    "float": lambda dtype: torch.zeros(2, 1, 8, 8, dtype=dtype).index_fill(2, torch.tensor([0, 7]), -INF),
    "float in fp32": lambda dtype: torch.zeros(2, 1, 8, 8).index_fill(2, torch.tensor([0, 7]), -INF),
    "everything": lambda dtype: torch.zeros(8, 8, dtype=torch.bool),
}


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", FULLY_MASKED)
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_fully_masked_rows_give_zero_and_no_gradient(backend, dtype, name, is_causal, dropout_p):
    mask = FULLY_MASKED[name](dtype)
    settings = {"is_causal": is_causal, "dropout_p": dropout_p, "seed": seed_tensor()}
    whole = case(2, 3, 8, 8, 16, dtype, mask, **settings)
    results = assert_parity(whole, backend)
    visible = (mask if mask.dtype == torch.bool else mask == 0).expand(2, 3, 8, 8)
    visible = visible & torch.ones(8, 8, dtype=torch.bool).tril() if is_causal else visible
    empty_query, unused_key = ~visible.any(-1), ~visible.any(-2)
    assert empty_query.any()
    assert not results["out"][empty_query].any()
    if "dquery" in results:
        assert not results["dquery"][empty_query].any()
        assert not results["dkey"][unused_key].any() and not results["dvalue"][unused_key].any()


@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_a_masked_sample_does_not_poison_the_gradients_of_another(backend, dtype):
    whole = case(2, 4, 8, 8, 16, dtype, torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 8))

    def first_only(outputs):
        cotangents = random_cotangents(outputs)
        cotangents["out"][1] = 0.0
        return cotangents

    results = assert_parity(whole, backend, cotangents=first_only)
    alone = {name: whole.inputs[name][:1].detach().requires_grad_() for name in ("query", "key", "value")}
    both = random_cotangents({"out": results["out"]})["out"]
    single = assert_parity(Attention({**alone, "attn_mask": None}), backend, cotangents=lambda _: {"out": both[:1]})
    for name in ("dquery", "dkey", "dvalue"):
        torch.testing.assert_close(results[name][:1], single[name])
        assert not results[name][1].any()


@pytest.mark.parametrize(("s_q", "s_k"), [(4, 4), (4, 7), (7, 4), (1, 5)])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_causality_is_aligned_at_the_top_left(backend, dtype, s_q, s_k):
    whole = case(2, 2, s_q, s_k, 16, dtype, is_causal=True)
    results = assert_parity(whole, backend)
    first = whole.inputs["value"][:, :, 0]
    assert torch.equal(results["out"][:, :, 0], first)


@pytest.mark.parametrize("scale", [None, 1.0, 0.01, -0.5, 0.0, 1e-50, -1e-50])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_scale(backend, dtype, scale):
    assert_parity(Attention(case(2, 2, 9, 11, 12, dtype).inputs, {"scale": scale}), backend)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_a_negative_scale_with_a_mask(backend, dtype, kind):
    mask = MASKS["(b, 1, q, k)"](2, 3, 9, 11)
    mask = mask if kind == "bool" else bias_of(mask, dtype)
    assert_parity(case(2, 3, 9, 11, 16, dtype, mask, scale=-2.0), backend)


@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_a_negative_scale_of_whole_blocks_of_keys(backend, dtype):
    assert_parity(case(1, 2, 9, 64, 16, dtype, scale=-2.0), backend)


@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_logits_beyond_the_range_of_half(backend, dtype):
    """The unscaled product 230400 overflows fp16, the scaled 28800 does not."""
    signs = bools(1, 1, 5, 64, seed=3, share=0.5).float() * 2 - 1
    q = (60 * signs).to(dtype)
    v = random(1, 1, 5, 64, dtype=dtype, seed=1)
    out = ops.attention(q, q, v, backend=backend)
    exact = reference.attention(q.double(), q.double(), v.double())[0]
    assert out.isfinite().all()
    assert (out.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * v.abs().max()


@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_large_logits_of_one_size(backend, dtype):
    whole = case(2, 2, 9, 9, 16, dtype)
    bias = torch.full((9, 9), 200.0, dtype=dtype) + random(9, 9, dtype=dtype, seed=8, grad=False)
    assert_parity(Attention({**whole.inputs, "attn_mask": bias}), backend)


@pytest.mark.parametrize("shift", [3.0, 1e3])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_values_far_from_zero(backend, dtype, shift):
    whole = case(2, 2, 17, 33, 16, dtype)
    value = random(2, 2, 33, 16, dtype=dtype, seed=3, shift=shift)
    assert_parity(Attention({**whole.inputs, "value": value}), backend)


GRADS = {**LAYOUTS, "expanded": poison.expanded}


@pytest.mark.parametrize("grad_layout", GRADS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_layouts(backend, dtype, layout, grad_layout):
    strided = case(2, 3, 5, 7, 16, dtype, bools(2, 1, 1, 7), layout=LAYOUTS[layout])
    assert_parity(strided, backend, cotangents=lambda out: {"out": GRADS[grad_layout](random_cotangents(out)["out"])})


@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_views_of_one_packed_projection(backend, dtype):
    packed = random(2, 9, 3, 4, 16, dtype=dtype, seed=0, grad=False)
    q, k, v = (t.requires_grad_() for t in packed.permute(2, 0, 3, 1, 4).unbind(0))
    assert_parity(Attention({"query": q, "key": k, "value": v, "attn_mask": None}), backend)


@pytest.mark.parametrize("length", [17, 50, 77, 127, 129, 255])
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_nothing_is_read_past_the_sequence(backend, dtype, length):
    buffers = [torch.full((1, 2, 256, 32), float("nan"), dtype=dtype) for _ in range(3)]
    views = [buffer[:, :, :length] for buffer in buffers]
    for seed, view in enumerate(views):
        view.copy_(random(1, 2, length, 32, dtype=dtype, seed=seed, grad=False))
        view.requires_grad_()
    assert_parity(Attention(dict(zip(("query", "key", "value"), views, strict=True), attn_mask=None)), backend)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_dropout_replays_the_mask_of_the_seed(backend, dtype, dropout_p, masked):
    mask = bias_of(bools(2, 1, 1, 13), dtype) if masked else None
    assert_parity(case(2, 3, 9, 13, 16, dtype, mask, dropout_p=dropout_p, seed=seed_tensor()), backend)


@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_dropout_drops_probabilities_that_add_up_to_one(backend, dtype):
    """With the identity for values the output is the dropped probabilities."""
    q, k = (random(2, 3, 16, 8, dtype=dtype, seed=seed, grad=False) for seed in (1, 2))
    identity = torch.eye(16, dtype=dtype).expand(2, 3, 16, 16)
    keep = ops.dropout_mask(seed_tensor(), (2, 3, 16, 16), 0.3, "attention")
    pad = torch.zeros(2, 3, 16, 8, dtype=dtype)
    settings = {"scale": 0.3, "backend": backend, "_seed": seed_tensor()}
    dropped = ops.attention(torch.cat([q, pad], -1), torch.cat([k, pad], -1), identity, None, 0.3, **settings)
    exact = reference.softmax(0.3 * q.double() @ k.double().mT)
    assert torch.equal(dropped != 0, keep)
    # Probabilities are rounded, and the output.
    rtol = max(1e-5, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(dropped.double(), torch.where(keep, exact / 0.7, 0.0), atol=1e-6, rtol=rtol)


@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_dropout_follows_manual_seed(backend, dtype):
    whole = case(2, 3, 32, 32, 16, dtype)
    arguments = [whole.inputs[name].detach() for name in ("query", "key", "value")]

    def once():
        return ops.attention(*arguments, None, 0.5, backend=backend)

    torch.manual_seed(3)
    first, second = once(), once()
    torch.manual_seed(3)
    assert torch.equal(first, once()) and torch.equal(second, once()) and not torch.equal(first, second)


@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_keep_rate_without_a_given_seed(backend, dtype):
    """Equal keys share the weight: an output of ones counts what was kept."""
    torch.manual_seed(0)
    q, v = torch.zeros(4, 4, 64, 8, dtype=dtype), torch.ones(4, 4, 64, 8, dtype=dtype)
    kept = ops.attention(q, q, v, None, 0.3, backend=backend)[..., 0].double().mean().item() * 0.7
    count = 4 * 4 * 64 * 64
    assert abs(kept - 0.7) < 4 * math.sqrt(0.3 * 0.7 / count)


@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_dropout_1_gives_zeros(backend, dtype):
    whole = case(1, 2, 4, 4, 8, dtype)
    arguments = [whole.inputs[name] for name in ("query", "key", "value")]
    out = ops.attention(*arguments, None, 1.0, backend=backend)
    out.backward(torch.ones_like(out))
    assert not out.any() and not any(t.grad.any() for t in arguments)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_gqa(backend, dtype, kind):
    """Served by some backend or refused; where served, equal to repeated heads."""
    q = random(2, 4, 5, 8, dtype=dtype, seed=0)
    k, v = (random(2, 2, 7, 8, dtype=dtype, seed=seed) for seed in (1, 2))
    mask = {"none": None, "bool": bools(2, 1, 1, 7), "float": bias_of(bools(2, 1, 1, 7), dtype)}[kind]
    if backend != "torch":
        with pytest.raises(BackendError, match="no enable_gqa"):
            ops.attention(q, k, v, mask, enable_gqa=True, backend=backend)
        return
    ours = ops.attention(q, k, v, mask, enable_gqa=True, backend=backend)
    repeated = [t.repeat_interleave(2, 1) for t in (k, v)]
    torch.testing.assert_close(ours, ops.attention(q, *repeated, mask, backend=backend))
    dropped = ops.attention(q, k, v, mask, 0.5, enable_gqa=True, backend=backend, _seed=seed_tensor())
    torch.testing.assert_close(dropped, ops.attention(q, *repeated, mask, 0.5, backend=backend, _seed=seed_tensor()))


@pytest.mark.parametrize(("backend", "dtype"), backends_for("attention", (torch.bfloat16, torch.float16)))
def test_under_autocast_the_dtype_is_that_of_stock(backend, dtype):
    q, k, v = (random(1, 2, 4, 8, dtype=torch.float32, seed=seed) for seed in range(3))
    mask = bias_of(bools(4, 4, share=1.1), torch.float32)
    with torch.autocast("cpu", dtype):
        for arguments in ((q, k, v), (q, k.to(dtype), v)):
            stock = F.scaled_dot_product_attention(*arguments)
            ours = ops.attention(*arguments, mask, backend=backend)
            assert ours.dtype == stock.dtype
            ours.backward(torch.ones_like(ours))
    assert q.grad.dtype == k.grad.dtype == torch.float32


@pytest.mark.parametrize("requires", [("query",), ("key",), ("value",), ("query", "value")])
@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_gradients_of_some_inputs_only(backend, dtype, requires):
    whole = case(2, 2, 5, 7, 16, dtype)
    inputs = {name: t if t is None else t.detach().requires_grad_(name in requires) for name, t in whole.inputs.items()}
    results = assert_parity(Attention(inputs), backend)
    assert {name for name in results if name.startswith("d")} <= {f"d{name}" for name in requires}


def test_double_backward_works_or_says_that_it_does_not():
    q, k, v = (random(1, 2, 3, 4, dtype=torch.float64, seed=seed) for seed in range(3))
    mask = bools(1, 1, 3, 3, seed=2)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda *t: ops.attention(*t, mask, backend="torch"), (q, k, v))
    grad = torch.autograd.grad(ops.attention(q, k, v, mask).square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"derivative for .*flash.* is not implemented|differentiable once"):
        grad.square().sum().backward()


def _arguments(**changes):
    ones = torch.ones(2, 3, 4, 8)
    return {"query": ones, "key": ones, "value": ones, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": torch.ones(3, 4, 8)}, ValueError, r"query must have shape \(B, H, S, D\), got \(3, 4, 8\)"),
        ({"value": torch.ones(2, 3, 5, 8)}, ValueError, r"value must have the key's shape \(2, 3, 4, 8\)"),
        ({"key": torch.ones(2, 3, 4, 7)}, ValueError, "key must have the query's head dim 8, got 7"),
        (
            {"key": torch.ones(1, 3, 4, 8), "value": torch.ones(1, 3, 4, 8)},
            ValueError,
            "key must have the query's batch",
        ),
        (
            {"key": torch.ones(2, 1, 4, 8), "value": torch.ones(2, 1, 4, 8)},
            ValueError,
            "key must have the query's 3 heads",
        ),
        (
            {"key": torch.ones(2, 3, 4, 8).half()},
            ValueError,
            "key must have the dtype torch.float32 of query, got torch.float16",
        ),
        ({"query": torch.ones(2, 3, 4, 8, dtype=torch.long)}, TypeError, "query must be a floating point tensor"),
        ({"value": torch.ones(2, 3, 4, 8, device="meta")}, ValueError, "value is on meta, expected cpu"),
        ({"attn_mask": torch.ones(4, dtype=torch.bool)}, ValueError, "attn_mask must have at least 2"),
        ({"attn_mask": torch.ones(4, 5)}, ValueError, r"attn_mask must broadcast to \(2, 3, 4, 4\), got \(4, 5\)"),
        ({"attn_mask": torch.ones(2, 4, 4)}, ValueError, r"attn_mask must broadcast .* got \(2, 4, 4\)"),
        ({"attn_mask": torch.ones(1, 2, 3, 4, 4)}, ValueError, "attn_mask must broadcast"),
        ({"attn_mask": torch.ones(4, 4, dtype=torch.long)}, TypeError, "attn_mask must be bool .* got torch.int64"),
        ({"dropout_p": 1.01}, ValueError, "dropout_p must be between 0 and 1, got 1.01"),
        ({"dropout_p": -1e-9}, ValueError, "dropout_p must be between 0 and 1"),
        ({"backend": "cuda"}, BackendError, "cuda: dtype float32 is not one of bfloat16, float16"),
        (
            dict.fromkeys(("query", "key", "value"), torch.ones(2, 3, 4, 129).half()) | {"backend": "cuda"},
            BackendError,
            "cuda: head dim is 129, at most 128",
        ),
        ({"backend": "none"}, ValueError, "backend must be"),
    ],
)
def test_wrong_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        ops.attention(**_arguments(**changes))


def test_the_signature_is_that_of_stock():
    ours = list(inspect.signature(ops.attention).parameters.values())[:8]
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert [p.name for p in ours] == names
    assert [p.default for p in ours[3:]] == [None, 0.0, False, None, False]


def test_the_reference_gives_the_log_of_the_sum():
    q, k, v = (random(1, 1, 3, 4, dtype=torch.float64, seed=seed, grad=False) for seed in range(3))
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    out, lse = reference.attention(q, k, v, mask)
    scores = (q @ k.mT / 2)[0, 0]
    assert lse[0, 0, 1] == -INF and not out[0, 0, 1].any()
    torch.testing.assert_close(lse[0, 0, 2], scores[2].exp().sum().log())
    torch.testing.assert_close(out[0, 0, 0], torch.softmax(scores[0, :2], 0) @ v[0, 0, :2])
