"""What attention's CUDA kernels promise beyond parity, which is in the ops' own tests: the order of threads, banks,
which blocks are multiplied, statistics, memory, and what the private ops refuse."""

import itertools

import pytest
import torch

from bertfast import ops, reference
from bertfast.ops.attention import CUDA_MAX_HEAD_DIM
from helpers import cuda_on_cpu
from helpers.op_cases import Attention, VarlenAttention, random, seed_tensor
from helpers.poison import contiguous, misaligned, padded_rows, poisoned_memory  # noqa: F401
from helpers.recorder import allocated
from helpers.tolerance import assert_parity, random_cotangents

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = (torch.bfloat16, torch.float16)
OPS = torch.ops.bertfast
HEAD_DIMS = (32, 64, 96, 128)


def padded_case(s_q, s_k, head_dim, mask=None, *, layout=contiguous, dtype=torch.float16, **settings):
    q, k, v = (layout(random(1, 2, n, head_dim, dtype=dtype, seed=n + i)) for i, n in enumerate((s_q, s_k, s_k)))
    return Attention({"query": q, "key": k, "value": v, "attn_mask": mask}, {"seed": seed_tensor(), **settings})


def packed_case(lengths_q, lengths_k, head_dim, *, layout=contiguous, dtype=torch.float16, **settings):
    counts = (sum(lengths_q), sum(lengths_k), sum(lengths_k))
    views = (layout(random(n, 2, head_dim, dtype=dtype, seed=i)) for i, n in enumerate(counts))
    ends = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
    return VarlenAttention(dict(zip(names, (*views, *ends), strict=True)), {"seed": seed_tensor(), **settings})


def results_of(case):
    """Output and gradients on `cuda`, and what the kernels did."""
    inputs = {name: t if t is None else t.detach().requires_grad_(t.requires_grad) for name, t in case.inputs.items()}
    before = cuda_on_cpu.counters().all
    outputs = case.ours(inputs, "cuda")
    forward = cuda_on_cpu.counters().all - before
    leaves = [t for t in inputs.values() if t is not None and t.requires_grad]
    cotangents = random_cotangents(outputs)
    gradients = torch.autograd.grad(list(outputs.values()), leaves, list(cotangents.values()))
    return [*outputs.values(), *gradients], forward, cuda_on_cpu.counters().all - before - forward


def bias(s_q, s_k, dtype=torch.float16):
    return random(1, 1, s_q, s_k, dtype=dtype, seed=9)


CASES = {
    "long": lambda d: padded_case(140, 150, d, is_causal=True),
    "dropout": lambda d: padded_case(70, 140, d, dropout_p=0.3),
    "keys masked": lambda d: padded_case(33, 100, d, torch.arange(100).remainder(3).ne(0).view(1, 1, 1, 100)),
    "a bias that learns": lambda d: padded_case(70, 65, d, bias(70, 65), dropout_p=0.3),
    "packed": lambda d: packed_case([3, 0, 140, 20], [5, 7, 130, 0], d, is_causal=True, dropout_p=0.2),
}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", CASES)
def test_the_order_of_threads_changes_nothing(name, head_dim):
    found = []
    for seed in (1, 2, 3):
        with cuda_on_cpu.seed(seed):
            found.append(results_of(CASES[name](head_dim))[0])
    assert all(torch.equal(first, other) for others in found[1:] for first, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", CASES)
def test_many_blocks(name, head_dim):
    assert_parity(CASES[name](head_dim), "cuda")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", list(itertools.product((1, 2), (1, 2), (1, 70), (1, 140))), ids=str)
def test_gradients_of_masks_of_every_shape(sizes, is_causal):
    """Each is a sum over what the mask is broadcast to: batch entries, heads, blocks of queries and of keys."""
    q, k, v = (random(2, 2, n, 32, dtype=torch.float16, seed=n + i) for i, n in enumerate((70, 140, 140)))
    inputs = {"query": q, "key": k, "value": v, "attn_mask": random(*sizes, dtype=torch.float16, seed=9)}
    assert_parity(Attention(inputs, {"is_causal": is_causal}), "cuda")


def test_a_negative_scale_is_that_of_negated_queries():
    q, k, v = (random(1, 2, 40, 32, dtype=torch.bfloat16, seed=seed, grad=False) for seed in range(3))
    assert torch.equal(
        ops.attention(q, k, v, scale=-0.25, backend="cuda"), ops.attention(-q, k, v, scale=0.25, backend="cuda")
    )


@pytest.mark.parametrize("of", ["no mask", "a mask by key", "packed"])
@pytest.mark.parametrize("factor", [100, 2000])
@pytest.mark.parametrize("scale", [0.125, -0.125])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_any_size(dtype, scale, factor, of):
    """Where the maximum and the score beside it, scaled each by itself, would be rounded apart."""
    mask = torch.arange(100).remainder(3).ne(0).view(1, 1, 1, 100) if of == "a mask by key" else None
    if of == "packed":
        case = packed_case([70], [100], 64, dtype=dtype, scale=scale)
    else:
        case = padded_case(70, 100, 64, mask, dtype=dtype, scale=scale)
    with torch.no_grad():
        case.inputs["query"] *= factor
        case.inputs["key"] *= factor
    assert_parity(case, "cuda")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", CASES)
def test_no_bank_conflicts(name, head_dim):
    """In copies to shared memory, in fragments, masks and statistics read from it, and on the way out."""
    _, forward, backward = results_of(CASES[name](head_dim))
    assert forward.conflicts == backward.conflicts == 0 < min(forward.requests, backward.requests)


@pytest.mark.parametrize("head_dim", [32, 40, 96])
def test_accesses_of_16_bytes_and_of_elements_give_the_same_bits(head_dim):
    for make in (padded_case, packed_case):
        lengths = (70, 90) if make is padded_case else ([70], [90])
        wide, of_wide, _ = results_of(make(*lengths, head_dim))
        for layout in (misaligned, padded_rows):
            found, of_found, _ = results_of(make(*lengths, head_dim, layout=layout))
            assert all(map(torch.equal, wide, found))
            assert of_wide.wide_accesses > 0 and of_wide.other_accesses < of_found.other_accesses


def test_products_of_blocks_that_are_seen():
    """Of a sequence of 128 in blocks of 64: each product of 64 x 64 x 32 is 4 * 8 * 2 of 16 x 8 x 16."""
    per_block = 4 * 8 * 2
    for is_causal, blocks in ((False, 4), (True, 3)):
        case = Attention(padded_case(128, 128, 32, torch.ones(1, 1, 128, 128, dtype=torch.bool)).inputs)
        case.settings["is_causal"] = is_causal
        _, forward, backward = results_of(case)
        assert forward.products == 2 * 2 * blocks * per_block
        assert backward.products == 2 * (3 + 4) * blocks * per_block


def test_warps_without_rows_make_no_products():
    """Of 17 queries or keys two warps have some; dk and dv take 32 queries a step, all others 64 keys."""
    _, forward, backward = results_of(padded_case(17, 17, 32))
    assert forward.products == 2 * 2 * 2 * 16
    assert backward.products == 2 * 2 * (3 * 16 + 4 * 8)


@pytest.mark.parametrize("head_dim", [32, 64])
def test_blocks_of_packed_sequences(head_dim):
    """Padded to the longest, 63 sequences of 5 and one of 300 would take 64 times the blocks of the longest."""
    lengths = [5] * 30 + [300] + [5] * 33
    _, forward, _ = results_of(packed_case(lengths, lengths, head_dim))
    assert forward.blocks == 2 * (sum(lengths) // 64 + 64)


LENGTHS = {
    "one": [1],
    "a block": [64],
    "more than a block": [65],
    "multiples": [64, 128],
    "zeros": [0, 5, 0, 0, 133, 0],
    "equal": [20] * 9,
    "one long": [4, 5, 6, 200, 4, 3],
    "more than lanes": [3, 70, *([2] * 40), 64, 0, 1],
    "twice the mean": [20, 5, 5, 10],
    "the last of many is long": [3] * 63 + [200],
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_sequences_of_every_kind_of_lengths(name, is_causal):
    lengths = LENGTHS[name]
    assert_parity(packed_case(lengths, lengths[::-1], 16, is_causal=is_causal), "cuda")


class TestBeyond32Bits:
    """On virtual memory, of which only what is looked at becomes real."""

    @pytest.fixture(autouse=True)
    def memory_as_it_comes(self, poisoned_memory):  # noqa: F811
        torch.utils.deterministic.fill_uninitialized_memory = False

    @staticmethod
    def far(x, dim):
        """`x` with 2^30 elements between what is next to each other in `dim`, so that the third begins at 2^31."""
        strides = [x[0, 0].numel() * 8, x[0, 0].numel(), x.shape[3], 1]
        strides[dim] = 2**30 + 8
        size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
        return torch.empty(size, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)

    @pytest.mark.parametrize("dim", [0, 1, 2])
    def test_strides(self, dim):
        near = [random(3, 3, 3, 16, dtype=torch.float16, seed=seed, grad=False) for seed in range(4)]
        mask = random(3, 3, 3, 3, dtype=torch.float16, seed=5, grad=False)
        settings = None, 0.0, False, 0.25

        def run(of, mask):
            q, k, v, dout = of
            out, stats = OPS.attention_fwd_cuda(q, k, v, mask, *settings)
            rest = OPS.attention_bwd_cuda(dout, q, k, v, mask, None, out, stats, *settings[1:])
            dmask = OPS.attention_mask_bwd_cuda(dout, q, k, v, mask, None, stats, rest[3], *settings[1:])
            return out, stats, *rest, dmask

        far = run([self.far(x, dim) for x in near], self.far(mask, dim))
        assert all(map(torch.equal, far, run(near, mask)))

    def test_blocks_beyond_a_grid_of_16_bits(self):
        batch = 2**16 + 3
        q, k, v = torch.empty(3, batch, 1, 2, 16, dtype=torch.float16).unbind(0)
        last = random(3, 2, 1, 2, 16, dtype=torch.float16, seed=1, grad=False)
        for whole, end in zip((q, k, v), last, strict=True):
            whole[-2:] = end
        with cuda_on_cpu.only_blocks(batch - 2, 2):
            out = ops.attention(q, k, v, backend="cuda")
        assert torch.equal(out[-2:], ops.attention(*last, backend="cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_statistics_add_up_to_lse(kind, is_causal, dtype):
    query, key, value = (random(2, 3, length, 16, dtype=dtype, seed=1, grad=False) for length in (9, 40, 40))
    mask = torch.rand(2, 1, 9, 40, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[0, 0, 3] = False
    mask = {"none": None, "bool": mask, "float": torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)}[kind]
    _, stats = OPS.attention_fwd_cuda(query, key, value, mask, None, 0.0, is_causal, 0.25)
    doubles = (query.double(), key.double(), value.double())
    mask = mask.double() if kind == "float" else mask
    lse = reference.attention(*doubles, mask, is_causal=is_causal, scale=0.25)[1]
    assert (kind == "none") == bool(lse.isfinite().all())
    # Maxima are those of scores, which with a mask by pair are scaled.
    maxima = stats[0].double() * (0.25 if kind == "none" else 1.0)
    torch.testing.assert_close(maxima + stats[1], lse, atol=1e-5, rtol=0)
    assert not stats[1][lse.isinf()].any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_statistics_of_packed_sequences(is_causal):
    query, key, value = (random(n, 2, 16, dtype=torch.float16, seed=n, grad=False) for n in (12, 45, 45))
    ends_q, ends_k = torch.tensor([0, 5, 5, 12]), torch.tensor([0, 40, 42, 45])
    _, stats = OPS.varlen_attention_fwd_cuda(query, key, value, ends_q, ends_k, None, 0.0, is_causal, 0.25)
    assert stats.shape == (2, 2, 12)
    for i in (0, 2):
        rows, columns = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        q, k, v = (t.double().transpose(0, 1)[None] for t in (query[rows], key[columns], value[columns]))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        mask = mask.tril(k.shape[2] - q.shape[2]) if is_causal else mask
        lse = reference.attention(q, k, v, mask, scale=0.25)[1][0]
        torch.testing.assert_close(0.25 * stats[0, :, rows].double() + stats[1, :, rows], lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_memory_grows_with_the_length(dropout_p, biased):
    def train(length):
        q, k, v = (random(1, 2, length, 16, dtype=torch.bfloat16, seed=seed) for seed in range(3))
        bias = random(1, 1, 1, length, dtype=torch.bfloat16, seed=4) if biased else None
        seed = seed_tensor()
        return lambda: ops.attention(q, k, v, bias, dropout_p, backend="cuda", _seed=seed).backward(torch.ones_like(q))

    train(64)()
    short, long = (allocated(train(length)) for length in (64, 256))
    assert 0 < long < 4.2 * short
    # out, its cotangent, three gradients and their copies in the order of the leaves; three rows of statistics; and the
    # mask's gradient.
    assert long <= 256 * 2 * (8 * 16 * 2 + 3 * 4) + 256 * 2 * biased


def test_inputs_are_taken_as_they_lie():
    """Views of one projection, a mask that is broadcast and a gradient that repeats its rows are not copied."""
    q, k, v = random(2, 24, 3, 2, 16, dtype=torch.float16, seed=1, grad=False).permute(2, 0, 3, 1, 4).unbind(0)
    mask = torch.ones(2, 1, 1, 24, dtype=torch.bool).expand(2, 2, 24, 24)
    dout = random(16, dtype=torch.float16, seed=2, grad=False).expand(2, 2, 24, 16)
    settings = None, 0.0, False, 0.25
    saved = []
    heads, row = 2 * 2 * 24 * 16 * 2, 2 * 2 * 24 * 4
    assert allocated(lambda: saved.extend(OPS.attention_fwd_cuda(q, k, v, mask, *settings))) == heads + 2 * row
    backward = dout, q, k, v, mask, None, *saved, *settings[1:]
    assert allocated(lambda: OPS.attention_bwd_cuda(*backward)) == 3 * heads + row


def packed_inputs(ends, *, head_dim=16, dtype=torch.float16):
    views = random(33, 3, 2, head_dim, dtype=dtype, seed=1, grad=False).unbind(1)
    return *views, ends, ends


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("ends", [[5, 3, 40], [-7, 10, 99], [0, 99, 20], [0, 0, 0], [33, 33, 33]])
def test_wrong_ends_stay_inside_the_tensor(ends, index):
    """Where nobody has looked at them, as in a CUDA graph. The emulator holds reads and writes to their memory."""
    inputs = packed_inputs(torch.tensor(ends, dtype=index))
    out, stats = OPS.varlen_attention_fwd_cuda(*inputs, None, 0.0, False, 0.25)
    dout = torch.ones_like(out)
    OPS.varlen_attention_bwd_cuda(dout, *inputs, None, out, stats, 0.0, False, 0.25)


@pytest.mark.parametrize("values", [0, 1])
def test_no_sequence_for_tokens_there_are(values):
    """As on a GPU, where the public function looks at no values."""
    inputs = packed_inputs(torch.zeros(values, dtype=torch.int32))
    message = f"cu_seqlens_q must hold the ends of a sequence or more, got {values} values"
    with pytest.raises(RuntimeError, match=message):
        OPS.varlen_attention_fwd_cuda(*inputs, None, 0.0, False, 0.25)
    out, stats = torch.empty_like(inputs[0]), torch.empty(2, 2, 33)
    with pytest.raises(RuntimeError, match=message):
        OPS.varlen_attention_bwd_cuda(out, *inputs, None, out, stats, 0.0, False, 0.25)


# Of inputs that fit: (2, 3, 5, 8) queries, (2, 3, 7, 8) keys and values; packed, 10 and 14 tokens.
def padded_arguments():
    query, key, value = (torch.ones(2, 3, length, 8, dtype=torch.float16) for length in (5, 7, 7))
    mask = torch.ones(5, 7, dtype=torch.float16)
    saved = {"out": query.clone(), "stats": torch.zeros(2, 2, 3, 5), "delta": torch.zeros(2, 3, 5)}
    return {"dout": query.clone(), "query": query, "key": key, "value": value, "attn_mask": mask, "seed": None, **saved}


def packed_arguments():
    query, key, value = (torch.ones(tokens, 3, 8, dtype=torch.float16) for tokens in (10, 14, 14))
    ends = {"cu_seqlens_q": torch.tensor([0, 4, 10]), "cu_seqlens_k": torch.tensor([0, 7, 14])}
    saved = {"out": query.clone(), "stats": torch.zeros(2, 3, 10)}
    return {"dout": query.clone(), "query": query, "key": key, "value": value, **ends, "seed": None, **saved}


def assert_refused(name, arguments, changes, message):
    """`changes` to what `name` takes of `arguments` are an error."""
    operator = getattr(OPS, name).default
    settings = {"dropout_p": 0.0, "is_causal": False, "scale": 0.25}
    taken = [argument.name for argument in operator._schema.arguments]
    every = {**arguments, **settings}
    operator(*(every[argument] for argument in taken))
    every |= changes
    with pytest.raises(RuntimeError, match=message):
        operator(*(every[argument] for argument in taken))


def half(*shape):
    return torch.ones(shape, dtype=torch.float16)


def long_heads(*shape):
    """Of more positions, or heads, than memory has."""
    return {name: half(1, 1, 1, 8).expand(shape) for name in ("query", "key", "value")}


OF_HEADS = [
    ({"query": torch.ones(2, 3, 5, 8)}, "query: expected bfloat16 or float16, got Float"),
    ({"query": half(3, 5, 8)}, r"query: expected shape \(B, H, S, D\), got \(3, 5, 8\)"),
    ({"key": half(2, 3, 7, 8).bfloat16()}, "key: expected the dtype of query, Half, got BFloat16"),
    (
        {"key": half(2, 3, 7, 9)},
        r"key: expected the shape of query, \(2, 3, 5, 8\), but for the number of keys, got \(2, 3, 7, 9\)",
    ),
    ({"key": half(1, 3, 7, 8)}, r"key: expected the shape of query, .* got \(1, 3, 7, 8\)"),
    ({"key": half(2, 1, 7, 8)}, r"key: expected the shape of query, .* got \(2, 1, 7, 8\)"),
    ({"key": half(3, 7, 8)}, r"key: expected the shape of query, .* got \(3, 7, 8\)"),
    ({"value": torch.ones(2, 3, 7, 8)}, "value: expected the dtype of query, Half, got Float"),
    ({"value": half(2, 3, 5, 8)}, r"value: expected the shape of key, \(2, 3, 7, 8\), got \(2, 3, 5, 8\)"),
    ({"attn_mask": half(5, 7).double()}, "attn_mask: expected .*float32, bfloat16 or float16, got Double"),
    ({"attn_mask": half(5, 7).byte()}, "attn_mask: expected .*float32, bfloat16 or float16, got Byte"),
    ({"attn_mask": half(5, 6)}, r"attn_mask: expected a shape that broadcasts to \(2, 3, 5, 7\), got \(5, 6\)"),
    ({"attn_mask": half(2, 1, 3, 5, 7)}, r"attn_mask: expected a shape that broadcasts to .* got \(2, 1, 3, 5, 7\)"),
    ({"dropout_p": 0.1}, "seed: expected an int64 tensor of one element with dropout, got None"),
    ({"dropout_p": 0.1, "seed": torch.zeros(2).long()}, "seed: expected an int64 tensor of one element"),
    ({"dropout_p": 1.1, "seed": torch.zeros(1).long()}, r"dropout_p: expected a probability in \[0, 1\], got 1.1"),
    (
        {**long_heads(1, 1, 2**31, 8), "attn_mask": half(1, 1)},
        "query: expected at most 2147483520 positions, got 2147483648",
    ),
    (
        {**long_heads(2**16, 2**15, 1, 8), "attn_mask": half(1, 1)},
        "query: expected at most 2147483520 heads of all sequences, got 2147483648",
    ),
]
OF_BACKWARD = [
    ({"dout": half(2, 3, 5, 8).float()}, "dout: expected the dtype of query, Half, got Float"),
    ({"dout": half(2, 3, 7, 8)}, r"dout: expected the shape of query, \(2, 3, 5, 8\), got \(2, 3, 7, 8\)"),
    ({"stats": torch.zeros(2, 2, 3, 4)}, r"stats: expected two values per row, 60, got shape \(2, 2, 3, 4\)"),
    ({"stats": torch.zeros(2, 2, 3, 5).half()}, "stats: expected float32, got Half"),
]


@pytest.mark.parametrize(("changes", "message"), OF_HEADS)
@pytest.mark.parametrize("name", ["attention_fwd_cuda", "attention_bwd_cuda", "attention_mask_bwd_cuda"])
def test_wrong_arguments(name, changes, message):
    assert_refused(name, padded_arguments(), changes, message)


@pytest.mark.parametrize(("changes", "message"), OF_BACKWARD)
@pytest.mark.parametrize("name", ["attention_bwd_cuda", "attention_mask_bwd_cuda"])
def test_wrong_arguments_of_backward_passes(name, changes, message):
    assert_refused(name, padded_arguments(), changes, message)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("attention_bwd_cuda", {"out": half(2, 3, 5, 9)}, "out: expected the shape of query"),
        ("attention_mask_bwd_cuda", {"delta": torch.zeros(2, 3, 4)}, "delta: expected one value per row, 30, got"),
        ("attention_mask_bwd_cuda", {"delta": half(2, 3, 5)}, "delta: expected float32, got Half"),
        (
            "attention_mask_bwd_cuda",
            {"attn_mask": half(5, 7).bool()},
            "attn_mask: expected float32, bfloat16 or float16, got Bool",
        ),
    ],
)
def test_wrong_arguments_of_one_backward_pass(name, changes, message):
    assert_refused(name, padded_arguments(), changes, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": half(2, 10, 3, 8)}, r"query: expected shape \(T, H, D\), got \(2, 10, 3, 8\)"),
        ({"query": torch.ones(10, 3, 8)}, "query: expected bfloat16 or float16, got Float"),
        ({"key": half(14, 2, 8)}, r"key: expected the shape of query, \(10, 3, 8\), but for .* got \(14, 2, 8\)"),
        ({"value": half(10, 3, 8)}, "value: expected the shape of key"),
        ({"cu_seqlens_q": torch.tensor([0.0, 4, 10])}, "cu_seqlens_q: expected int32 or int64, got Float"),
        ({"cu_seqlens_k": torch.tensor([0, 7, 14]).short()}, "cu_seqlens_k: expected int32 or int64, got Short"),
        ({"cu_seqlens_q": torch.tensor([[0, 10]])}, r"cu_seqlens_q: expected shape \(sequences \+ 1\), got \(1, 2\)"),
        (
            {"cu_seqlens_k": torch.tensor([0, 14])},
            r"cu_seqlens_k: expected the shape of cu_seqlens_q, \(3\), got \(2\)",
        ),
        (
            dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.zeros(1, dtype=torch.int32).expand(2**31)),
            "cu_seqlens_q: expected at most 2147483520 ends, got 2147483648",
        ),
    ],
)
@pytest.mark.parametrize("name", ["varlen_attention_fwd_cuda", "varlen_attention_bwd_cuda"])
def test_wrong_arguments_of_packed_attention(name, changes, message):
    assert_refused(name, packed_arguments(), changes, message)


def test_the_widest_head():
    """The declaration is what the kernels have."""
    ends = torch.tensor([0, 33])
    out, _ = OPS.varlen_attention_fwd_cuda(*packed_inputs(ends, head_dim=CUDA_MAX_HEAD_DIM), None, 0.0, False, 0.25)
    assert out.isfinite().all()
    wider = packed_inputs(ends, head_dim=CUDA_MAX_HEAD_DIM + 1)
    message = f"head dim: expected at most {CUDA_MAX_HEAD_DIM}, got {CUDA_MAX_HEAD_DIM + 1}"
    with pytest.raises(RuntimeError, match=message):
        OPS.varlen_attention_fwd_cuda(*wider, None, 0.0, False, 0.25)
    views = (t.transpose(0, 1)[None] for t in wider[:3])
    with pytest.raises(RuntimeError, match=message):
        OPS.attention_fwd_cuda(*views, None, None, 0.0, False, 0.25)
