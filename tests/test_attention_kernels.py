"""What attention's Triton kernels promise beyond parity: which program takes what, memory, and launches."""

import importlib

import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

from bertfast import nn, ops, reference, use_backend
from bertfast.kernels import tiles
from helpers.op_cases import Attention, VarlenAttention, random, seed_tensor
from helpers.poison import every_other, padded_rows, poisoned_memory  # noqa: F401
from helpers.recorder import allocated
from helpers.tolerance import assert_parity

attention = importlib.import_module("bertfast.kernels.attention")
varlen_attention = importlib.import_module("bertfast.kernels.varlen_attention")
launch = importlib.import_module("bertfast.kernels.launch")

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is 0"),
]


@triton.jit
def sequence_of_kernel(out_ptr, cu_seqlens_ptr, sequences, total, BLOCK: tl.constexpr, SEQUENCES: tl.constexpr):
    i_block = tl.program_id(0)
    i_s, i_own = attention.sequence_of(cu_seqlens_ptr, i_block, sequences, total, BLOCK, SEQUENCES)
    tl.store(out_ptr + 2 * i_block, i_s)
    tl.store(out_ptr + 2 * i_block + 1, i_own)


def blocks_of(lengths, block=16, step=4):
    """(sequence, block) of every program, in their order."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    launched = tiles.attention_blocks(sum(lengths), block, len(lengths))
    out = torch.full((launched, 2), -9, dtype=torch.int32)
    sequence_of_kernel[(launched,)](out, ends, len(lengths), sum(lengths), block, step)
    return [tuple(row) for row in out.tolist()]


LENGTHS = {
    "one": [1],
    "a block": [16],
    "more than a block": [17],
    "multiples": [16, 32, 48],
    "zeros": [0, 5, 0, 0, 33, 0],
    "equal": [40] * 9,
    "one long": [4, 5, 6, 130, 4, 3],
    "several steps": [3, 70, *([5] * 8), 64, 0, 1],
    "twice the mean": [20, 5, 5, 10],
    "around twice the mean": [20, 9, 9, 9, 9, 40, 9, 9, 60, 3],
}


@pytest.mark.parametrize("name", LENGTHS)
def test_every_block_of_every_sequence_has_one_program(name):
    lengths = LENGTHS[name]
    found = [(sequence, block) for sequence, block in blocks_of(lengths) if block >= 0]
    assert sorted(found) == [(s, i) for s, length in enumerate(lengths) for i in range(-(-length // 16))]


@pytest.mark.parametrize("name", LENGTHS)
def test_long_sequences_come_first(name):
    lengths = LENGTHS[name]
    long = [lengths[s] > 2 * (sum(lengths) // len(lengths)) for s, block in blocks_of(lengths) if block >= 0]
    assert long == sorted(long, reverse=True)


def test_lengths_cost_what_their_tokens_cost():
    """511 sequences of 40 tokens and one of 512: padded to the longest, they would take 4,096 blocks of 64."""
    lengths = [40] * 300 + [512] + [40] * 211
    found = blocks_of(lengths, 64, 1024)
    useful = [item for item in found if item[1] >= 0]
    assert len(useful) == 511 + 8
    assert len(found) <= sum(lengths) // 64 + 512
    assert useful[:8] == [(300, i) for i in range(8)]


@pytest.mark.parametrize("ends", [[5, 3, 40], [-7, 10, 99], [0, 99, 20], [0, 0, 0], [33, 33, 33]])
def test_wrong_ends_stay_inside_the_tensor(ends):
    """Where nobody has looked at them, as in a CUDA graph. `helpers.bounds` holds reads and writes to their memory."""
    views = random(33, 3, 2, 16, dtype=torch.float32, seed=1, grad=False).unbind(1)
    ends = torch.tensor(ends, dtype=torch.int32)
    out, stats = varlen_attention.varlen_attention_fwd(*views, ends, ends, None, 0.0, False, 0.25)
    dout = torch.ones_like(out)
    varlen_attention.varlen_attention_bwd(dout, *views, ends, ends, None, out, stats, 0.0, False, 0.25)


@pytest.mark.parametrize("values", [0, 1])
def test_no_sequence_for_tokens_there_are(values):
    """As on a GPU, where the public function looks at no values."""
    views, ends = torch.ones(3, 5, 2, 16).unbind(0), torch.zeros(values, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"cu_seqlens_q must hold the ends of a sequence or more, got {values} values"):
        varlen_attention.varlen_attention_fwd(*views, ends, ends, None, 0.0, False, 0.25)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_statistics_add_up_to_lse(kind, is_causal):
    query, key, value = (random(2, 3, length, 16, dtype=torch.float32, seed=1, grad=False) for length in (9, 40, 40))
    mask = torch.rand(2, 1, 9, 40, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[0, 0, 3] = False
    mask = {"none": None, "bool": mask, "float": torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)}[kind]
    _, stats = attention.attention_fwd(query, key, value, mask, None, 0.0, is_causal, 0.25)
    doubles = (query.double(), key.double(), value.double())
    mask = mask.double() if kind == "float" else mask
    lse = reference.attention(*doubles, mask, is_causal=is_causal, scale=0.25)[1]
    assert (kind == "none") == bool(lse.isfinite().all())
    torch.testing.assert_close(stats.double().sum(0), lse, atol=1e-5, rtol=0)
    assert not stats[1][lse.isinf()].any()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_memory_grows_with_the_length(dropout_p, biased):
    def train(length):
        q, k, v = (random(1, 2, length, 16, dtype=torch.float32, seed=seed) for seed in range(3))
        bias = random(1, 1, 1, length, dtype=torch.float32, seed=4) if biased else None
        seed = seed_tensor()
        return lambda: ops.attention(q, k, v, bias, dropout_p, backend="triton", _seed=seed).backward(
            torch.ones_like(q)
        )

    train(64)()
    short, long = (allocated(train(length)) for length in (64, 256))
    assert 0 < long < 4.2 * short
    # q, k, v, out, their gradients and the cotangent's copy, and three rows of statistics.
    assert long <= 256 * 2 * (9 * 16 + 4) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_by_descriptor(packed, dtype, monkeypatch):
    """As on Hopper and Blackwell: several whole blocks, of views of one projection and beside each other's ends."""
    seen = []
    real = attention.descriptor_of
    monkeypatch.setattr(tiles, "attention_descriptors", lambda *facts: True)
    monkeypatch.setattr(attention, "descriptor_of", lambda *how: seen.append(real(*how)) or seen[-1])
    values = random(330, 3, 2, 16, dtype=dtype, seed=1, grad=False)
    if packed:
        names = ("query", "key", "value")
        ends = torch.tensor([0, 70, 100, 330], dtype=torch.int32)
        views = dict(zip(names, (view.requires_grad_() for view in values.unbind(1)), strict=True))
        case = VarlenAttention({**views, "cu_seqlens_q": ends, "cu_seqlens_k": ends})
    else:
        views = (view.requires_grad_() for view in values.view(2, 165, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0))
        case = Attention({**dict(zip(("query", "key", "value"), views, strict=True)), "attn_mask": None})
    assert_parity(case, "triton")
    assert seen and None not in seen


@pytest.fixture(params=[(16, 32), (32, 16)], ids=["16x32", "32x16"])
def small_tiles(request, monkeypatch):
    """So that a few dozen rows are many blocks."""
    block_m, block_n = request.param
    for name in ("attention_fwd", "attention_bwd_dq", "attention_bwd_dk_dv", "attention_mask_bwd"):
        monkeypatch.setattr(tiles, name, lambda *facts: tiles.AttentionTile(block_m, block_n, 16, 4, 1))


def padded_case(mask, dtype=torch.float32, **settings):
    batch, heads, s_q, s_k = 2, 2, 40, 60
    rows = (random(batch, heads, n, 8, dtype=dtype, seed=seed) for seed, n in ((1, s_q), (2, s_k), (3, s_k)))
    q, k, v = map(padded_rows, rows)
    return Attention({"query": q, "key": k, "value": v, "attn_mask": mask}, settings)


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("keys", [1, 60])
@pytest.mark.parametrize("by", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_gradient_of_a_bias_over_many_blocks(small_tiles, by, queries, keys):
    bias = random(*by, queries, keys, dtype=torch.float32, seed=4)
    assert_parity(padded_case(bias, dropout_p=0.2, seed=seed_tensor()), "triton")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("shape", "strided"),
    [(None, False), ((2, 1, 1, 60), True), ((1, 2, 1, 60), False), ((40, 60), False), ((2, 2, 40, 60), True)],
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_many_blocks(small_tiles, dropout_p, shape, strided, is_causal):
    mask = None if shape is None else torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.5
    mask = every_other(mask) if strided else mask
    dropout = {"dropout_p": dropout_p, "seed": seed_tensor()} if dropout_p else {}
    assert_parity(padded_case(mask, is_causal=is_causal, **dropout), "triton")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [([70, 3, 0, 40], [75, 20, 5, 35]), ([33, 64], [0, 70])])
def test_many_blocks_of_packed_sequences(small_tiles, lengths, is_causal):
    ends = [torch.tensor([0, *of]).cumsum(0).int() for of in lengths]
    sizes = [sum(of) for of in (lengths[0], lengths[1], lengths[1])]
    views = (random(n, 2, 8, dtype=torch.float32, seed=seed) for seed, n in enumerate(sizes, 1))
    inputs = dict(zip(("query", "key", "value"), views, strict=True))
    case = VarlenAttention({**inputs, "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}, {"is_causal": is_causal})
    assert_parity(case, "triton")


@pytest.mark.parametrize(("is_causal", "steps"), [(False, 16), (True, 10)])
@pytest.mark.parametrize("packed", [False, True])
def test_no_block_is_multiplied_that_nothing_sees(packed, is_causal, steps, monkeypatch):
    """Blocks of 16 of a sequence of 64: two matrix products a step forward, three for dq, four for dk and dv."""
    for name in ("attention_fwd", "attention_bwd_dq", "attention_bwd_dk_dv"):
        monkeypatch.setattr(tiles, name, lambda *facts: tiles.AttentionTile(16, 16, 16, 4, 1))
    products = []
    builder = triton.runtime.interpreter.interpreter_builder
    real = builder.create_dot
    monkeypatch.setattr(builder, "create_dot", lambda *of: products.append(of) or real(*of))
    if packed:
        views = [random(64, 1, 16, dtype=torch.float32, seed=seed) for seed in (1, 2, 3)]
        ends = torch.tensor([0, 64], dtype=torch.int32)
        out = ops.varlen_attention(*views, ends, ends, 64, 64, is_causal=is_causal, backend="triton")
    else:
        views = [random(1, 1, 64, 16, dtype=torch.float32, seed=seed) for seed in (1, 2, 3)]
        out = ops.attention(*views, is_causal=is_causal, backend="triton")
    assert len(products) == 2 * steps
    products.clear()
    out.sum().backward()
    assert len(products) == (3 + 4) * steps


class Launches(TorchDispatchMode):
    """Ops that write new memory: `names`, and the `bytes` of their outputs."""

    def __init__(self):
        super().__init__()
        self.names, self.bytes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func._opname not in ("view", "detach", "_unsafe_view", "empty", "t"):
            self.names.append(func._opname)
            results = out if isinstance(out, (tuple, list)) else (out,)
            self.bytes += sum(t.untyped_storage().nbytes() for t in results if isinstance(t, torch.Tensor))
        return out


def test_a_packed_layer_is_seven_launches_and_copies_nothing(monkeypatch):
    width, lengths = 64, [5, 9, 3]
    layer = nn.BertEncoderLayer(width, 4, 4 * width).eval()
    tokens = sum(lengths)
    x = random(1, tokens, width, dtype=torch.float32, seed=1, grad=False)
    ends = torch.tensor([0, 5, 14, 17], dtype=torch.int32)
    counted = []
    real = launch.Launcher.__call__
    monkeypatch.setattr(launch.Launcher, "__call__", lambda self, *a, **o: counted.append(self) or real(self, *a, **o))
    with torch.no_grad(), use_backend("triton", "torch"), Launches() as record:
        layer(x, cu_seqlens=ends, max_seqlen=9)
    kernels = [name for name in record.names if not name.endswith("_triton")]
    assert len(record.names) == 7 and len(kernels) == 2 and len(counted) == 5, record.names
    # qkv, context, its projection, sum, intermediate, its projection, sum; and statistics.
    statistics = tokens * (2 * 4 + 2 * 2)
    assert record.bytes == 4 * (tokens * width * (3 + 1 + 1 + 1 + 4 + 1 + 1) + statistics)
