"""varlen_attention on every backend: each sequence alone, empty sequences, causality, dropout, errors."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from bertfast import BackendError, ops, reference
from helpers import poison
from helpers.op_cases import (
    ALL_DTYPES,
    Attention,
    VarlenAttention,
    backends_for,
    each_backend_for,
    random,
    seed_tensor,
)
from helpers.poison import LAYOUTS, poisoned_memory  # noqa: F401
from helpers.tolerance import assert_parity, random_cotangents

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.dtypes_in_turn]

SERVED = backends_for("varlen_attention")
EVERY = backends_for("varlen_attention", ALL_DTYPES)
EACH = each_backend_for("varlen_attention")


def ends(lengths, dtype=torch.int32):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


def case(lengths_q, lengths_k, heads, width, dtype, layout=poison.contiguous, index=torch.int32, **settings):
    t_q, t_k = sum(lengths_q), sum(lengths_k)
    q, k, v = (
        layout(random(tokens, heads, width, dtype=dtype, seed=seed)) for seed, tokens in ((1, t_q), (2, t_k), (3, t_k))
    )
    cu_q, cu_k = ends(lengths_q, index), ends(lengths_k, index)
    return VarlenAttention({"query": q, "key": k, "value": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, settings)


LENGTHS = [[5], [1], [1, 1, 1], [7, 63, 1, 12], [3, 3, 3, 9], [0, 3, 0, 5], [0, 1, 0, 1], [5, 0], [0, 0, 4], [127, 2]]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_lengths(backend, dtype, lengths, is_causal, index):
    assert_parity(case(lengths, lengths, 2, 16, dtype, index=index, is_causal=is_causal), backend)


CROSS = [([5, 40, 1], [3, 33, 100]), ([4, 0, 3], [0, 2, 5]), ([3, 2], [0, 0]), ([0, 0], [3, 2]), ([7, 7], [9, 9])]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", CROSS, ids=str)
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_queries_and_keys_of_different_lengths(backend, dtype, lengths, is_causal):
    """Causality is aligned at the bottom right: a query without any key gives 0 and no gradient."""
    assert_parity(case(*lengths, 2, 16, dtype, is_causal=is_causal), backend)


@pytest.mark.parametrize("lengths", [([70, 5], [200, 140]), ([200, 140], [70, 5]), ([65, 96], [96, 65])], ids=str)
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_causality_across_blocks(backend, dtype, lengths):
    assert_parity(case(*lengths, 1, 16, dtype, is_causal=True), backend)


@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_causality_is_aligned_at_the_bottom_right(backend, dtype):
    whole = case([2, 4], [5, 2], 1, 8, dtype, is_causal=True)
    results = assert_parity(whole, backend)
    assert not results["out"][2:4].any(), "the first two of four queries see none of two keys"
    assert torch.equal(results["out"][4], whole.inputs["value"][5])
    if "dquery" in results:
        assert not results["dquery"][2:4].any()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_no_tokens(backend, dtype, lengths):
    results = assert_parity(case(lengths, lengths, 2, 16, dtype), backend)
    assert results["out"].shape == (0, 2, 16)


@pytest.mark.parametrize("heads", [0, 1, 5])
@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_heads(backend, dtype, heads):
    assert_parity(case([3, 4], [3, 4], heads, 16, dtype), backend)


@pytest.mark.parametrize("width", [1, 8, 20, 48, 64, 80, 128, 160, 256])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_head_dims(backend, dtype, width):
    assert_parity(case([5, 17], [5, 17], 2, width, dtype), backend)


GRADS = {**LAYOUTS, "expanded": poison.expanded}


@pytest.mark.parametrize("grad_layout", GRADS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_layouts(backend, dtype, layout, grad_layout):
    strided = case([3, 0, 6], [3, 0, 6], 2, 16, dtype, layout=LAYOUTS[layout])
    assert_parity(strided, backend, cotangents=lambda out: {"out": GRADS[grad_layout](random_cotangents(out)["out"])})


@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_views_of_one_packed_projection(backend, dtype):
    packed = random(9, 3, 2, 16, dtype=dtype, seed=0, grad=False)
    q, k, v = (t.requires_grad_() for t in packed.unbind(1))
    cu = ends([4, 5])
    assert_parity(VarlenAttention({"query": q, "key": k, "value": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu}), backend)


@pytest.mark.parametrize("scale", [1.0, 0.01, -0.5, 1e-50])
@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_scale(backend, dtype, scale):
    assert_parity(case([4, 5], [4, 5], 2, 16, dtype, scale=scale), backend)


@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_equals_padded_attention(backend, dtype):
    lengths = [3, 0, 7, 5]
    whole = case(lengths, lengths, 2, 16, dtype)
    results = assert_parity(whole, backend)
    real = torch.arange(7) < torch.tensor(lengths)[:, None]
    padded = {}
    for name in ("query", "key", "value"):
        t = torch.zeros(4, 7, 2, 16, dtype=dtype)
        t[real] = whole.inputs[name].detach()
        padded[name] = t.transpose(1, 2)
    out = ops.attention(**padded, attn_mask=real.view(4, 1, 1, 7), backend=backend).transpose(1, 2)[real]
    torch.testing.assert_close(results["out"], out, atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("larger", [0, 3])
@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_larger_maxima_are_allowed(backend, dtype, larger):
    whole = case([3, 5], [3, 5], 2, 16, dtype)
    with torch.no_grad():
        out = ops.varlen_attention(**whole.inputs, max_seqlen_q=5 + larger, max_seqlen_k=5 + larger, backend=backend)
        assert torch.equal(out, whole.ours(whole.inputs, backend)["out"])


@pytest.mark.parametrize("lengths", [([5, 9], [5, 9]), ([3, 0, 4], [2, 5, 6])], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_dropout_replays_the_mask_of_the_seed(backend, dtype, dropout_p, is_causal, lengths):
    settings = {"dropout_p": dropout_p, "is_causal": is_causal, "seed": seed_tensor()}
    assert_parity(case(*lengths, 2, 16, dtype, **settings), backend)


@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_dropout_is_that_of_attention(backend, dtype):
    """One sequence per batch row: the same seed drops the same elements."""
    whole = case([6, 6], [6, 6], 3, 8, dtype, dropout_p=0.4, seed=seed_tensor())
    inputs = {name: whole.inputs[name].detach().view(2, 6, 3, 8).transpose(1, 2) for name in ("query", "key", "value")}
    padded = Attention({**inputs, "attn_mask": None}, whole.settings)
    with torch.no_grad():
        ours = whole.ours(whole.inputs, backend)["out"].view(2, 6, 3, 8).transpose(1, 2)
        torch.testing.assert_close(ours, padded.ours(padded.inputs, backend)["out"])


@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_dropout_follows_manual_seed(backend, dtype):
    whole = case([30, 40], [30, 40], 2, 8, dtype, dropout_p=0.5)
    torch.manual_seed(3)
    first, second = (whole.ours(whole.inputs, backend)["out"] for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(first, whole.ours(whole.inputs, backend)["out"]) and not torch.equal(first, second)


@pytest.mark.parametrize(("backend", "dtype"), backends_for("varlen_attention", (torch.bfloat16, torch.float16)))
def test_under_autocast(backend, dtype):
    whole = case([3, 5], [3, 5], 2, 16, torch.float32)
    with torch.autocast("cpu", dtype):
        out = whole.ours(whole.inputs, backend)["out"]
    out.backward(torch.ones_like(out))
    assert out.dtype == dtype and whole.inputs["query"].grad.dtype == torch.float32


def _arguments(**changes):
    ones, cu = torch.ones(8, 2, 4), torch.tensor([0, 3, 8], dtype=torch.int32)
    maxima = {"max_seqlen_q": 5, "max_seqlen_k": 5}
    return {"query": ones, "key": ones, "value": ones, "cu_seqlens_q": cu, "cu_seqlens_k": cu, **maxima, **changes}


def _cu(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": torch.ones(1, 8, 2, 4)}, ValueError, r"query must have shape \(tokens, H, D\), got \(1, 8, 2, 4\)"),
        ({"value": torch.ones(7, 2, 4)}, ValueError, "value must have the key's shape"),
        ({"query": torch.ones(8, 2, 5)}, ValueError, "key must have the query's head dim 5, got 4"),
        ({"query": torch.ones(8, 3, 4)}, ValueError, "key must have the query's 3 heads, got 2$"),
        ({"query": torch.ones(8, 2, 4).half()}, ValueError, "key must have the dtype torch.float16 of query"),
        ({"query": torch.ones(8, 2, 4).int()}, TypeError, "query must be a floating point tensor"),
        ({"cu_seqlens_q": _cu(0, 3, 7)}, ValueError, r"cu_seqlens_q must rise from 0 to .* 8; got \[0, 3, 7\]"),
        ({"cu_seqlens_q": _cu(1, 3, 8)}, ValueError, "cu_seqlens_q must rise from 0"),
        ({"cu_seqlens_k": _cu(0, 9, 8)}, ValueError, "cu_seqlens_k must rise from 0"),
        ({"cu_seqlens_q": _cu()}, ValueError, "cu_seqlens_q must rise from 0"),
        ({"cu_seqlens_k": _cu(0, 8)}, ValueError, "cu_seqlens_k"),
        ({"cu_seqlens_q": _cu(0, 3, 8).float()}, ValueError, "cu_seqlens_q must be a one-dimensional int32 or int64"),
        (
            {"cu_seqlens_q": _cu(0, 3, 8).view(1, 3)},
            ValueError,
            r"one-dimensional .* got torch.int32 of shape \(1, 3\)",
        ),
        ({"cu_seqlens_k": _cu(0, 3, 8).to("meta")}, ValueError, "cu_seqlens_k is on meta, expected cpu"),
        ({"max_seqlen_q": 4}, ValueError, "cu_seqlens_q holds a sequence of 5 tokens, more than its maximum of 4"),
        ({"max_seqlen_k": 4}, ValueError, "cu_seqlens_k holds a sequence of 5 tokens"),
        ({"max_seqlen_q": None}, TypeError, "max_seqlen_q must be an int, got NoneType"),
        ({"max_seqlen_k": "5"}, TypeError, "max_seqlen_k must be an int, got str"),
        ({"dropout_p": 2.0}, ValueError, "dropout_p must be between 0 and 1"),
        ({"backend": "cuda"}, BackendError, "cuda: dtype float32 is not one of bfloat16, float16"),
        (
            dict.fromkeys(("query", "key", "value"), torch.ones(8, 2, 129).half()) | {"backend": "cuda"},
            BackendError,
            "cuda: head dim is 129, at most 128",
        ),
    ],
)
def test_wrong_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        ops.varlen_attention(**_arguments(**changes))


def test_what_stock_is_given_on_a_gpu(monkeypatch):
    """What its kernels refuse goes to the padded form."""
    module = importlib.import_module("bertfast.ops.varlen_attention")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    def serves(query, key, value, dropout_p=0.0):
        views = (
            SimpleNamespace(is_cuda=True, **{name: getattr(x, name) for name in facts}) for x in (query, key, value)
        )
        return module._stock_varlen_serves(*views, dropout_p)

    facts = ("dtype", "device", "shape", "stride")
    packed = torch.empty(8, 2, 48, dtype=torch.float16)
    query, other = packed[..., :16], packed[..., :24]
    assert serves(query, query, query)
    assert not serves(query, query, query, 0.1)
    assert not serves(query, query, other)
    assert not serves(query.float(), query, query)
    for views in (packed[..., ::3], packed[:, :0], packed[..., :0], packed[..., :12]):
        assert not serves(views, views, views)


@pytest.mark.parametrize(("backend", "dtype"), EACH)
def test_heads_without_any_dimension(backend, dtype):
    empty, ends = torch.ones(8, 2, 0, dtype=dtype, requires_grad=True), _cu(0, 3, 8)
    out = ops.varlen_attention(empty, empty, empty, ends, ends, 5, 5, backend=backend)
    out.sum().backward()
    assert out.shape == empty.grad.shape == (8, 2, 0)


@pytest.mark.parametrize(
    "lengths", [([0, 0], [0, 0]), ([2, 1], [0, 0]), ([0, 0], [2, 1]), ([2, 0], [0, 1]), ([2, 1], [1, 2])]
)
def test_values_may_have_a_width_of_their_own(lengths):
    """As in `attention`; also where there is no query or no key."""
    ends_q, ends_k = (torch.tensor([0, a, a + b]) for a, b in lengths)
    tokens_q, tokens_k = int(ends_q[-1]), int(ends_k[-1])
    query, key, value = (
        random(t, 2, w, dtype=torch.float64, seed=i)
        for i, (t, w) in enumerate(((tokens_q, 4), (tokens_k, 4), (tokens_k, 6)))
    )
    out = ops.varlen_attention(query, key, value, ends_q, ends_k, max(lengths[0]), max(lengths[1]))
    expected = reference.varlen_attention(query, key, value, ends_q, ends_k)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert all(t.grad.shape == t.shape for t in (query, key, value))
