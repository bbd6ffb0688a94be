"""What only the CUDA kernels have: the order of threads, widths of accesses, blocks that walk, offsets beyond 2^31.
Their parity with float64 is in the tests of the ops."""

import pytest
import torch

from bertfast import ops
from bertfast.dropout import STREAMS, philox
from helpers import cuda_on_cpu
from helpers.op_cases import DTYPES, AddLayerNorm, EmbedLayerNorm, FeedForward, backends_for, random, seed_tensor
from helpers.poison import contiguous, misaligned, padded_rows, poisoned_memory  # noqa: F401
from helpers.tolerance import assert_parity, random_cotangents

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HALF = torch.bfloat16


def _add_layer_norm(rows, width, dtype, layout=contiguous):
    shapes = {"x": (rows, width), "residual": (rows, width), "weight": (width,), "bias": (width,), "x_bias": (width,)}
    inputs = {name: layout(random(*shape, dtype=dtype, seed=i)) for i, (name, shape) in enumerate(shapes.items())}
    return AddLayerNorm(inputs, {"dropout_p": 0.3, "seed": seed_tensor(), "return_sum": True, "eps": 1e-5})


def _feed_forward(rows, width, dtype, layout=contiguous):
    shapes = {"x": (rows, 8), "w_in": (width, 8), "b_in": (width,), "w_out": (8, width), "b_out": (8,)}
    inputs = {name: layout(random(*shape, dtype=dtype, seed=i)) for i, (name, shape) in enumerate(shapes.items())}
    return FeedForward(inputs, {"activation": "gelu", "dropout_p": 0.3, "seed": seed_tensor()})


class Separate(FeedForward):
    """By torch's GEMM and a pass over memory behind it, in half precision as well."""

    def ours(self, inputs, backend):
        with cuda_on_cpu.separate_gemm():
            return super().ours(inputs, backend)


def _separate_feed_forward(rows, width, dtype, layout=contiguous):
    whole = _feed_forward(rows, width, dtype, layout)
    return Separate(whole.inputs, whole.settings)


def _embed_layer_norm(rows, width, dtype, layout=contiguous):
    tables = {"word": (11, width), "position": (rows, width), "token_type": (2, width)}
    shapes = {**tables, "weight": (width,), "bias": (width,)}
    inputs = {name: layout(random(*shape, dtype=dtype, seed=i)) for i, (name, shape) in enumerate(shapes.items())}
    ids = torch.arange(2 * rows).view(2, rows) % 11
    every = {"input_ids": ids, "token_type_ids": (ids % 2).int(), "position_ids": None, "inputs_embeds": None, **inputs}
    return EmbedLayerNorm(every, {"dropout_p": 0.3, "seed": seed_tensor(), "eps": 1e-5})


CASES = {f.__name__.strip("_"): f for f in (_add_layer_norm, _embed_layer_norm, _separate_feed_forward)}


def _results(case):
    """Outputs and gradients on `cuda`."""
    leaves = {
        name: t.detach().requires_grad_() if t is not None and t.dtype.is_floating_point else t
        for name, t in case.inputs.items()
    }
    outputs = case.ours(leaves, "cuda")
    upstream = random_cotangents(outputs)
    torch.autograd.backward([outputs[name] for name in upstream], list(upstream.values()))
    return [*outputs.values(), *(t.grad for t in leaves.values() if t is not None and t.grad is not None)]


def _equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("width", [24, 37, 1040])
@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_order_of_threads(name, width):
    case = CASES[name](29, width, HALF)
    found = []
    for seed in (1, 2, 3):
        with cuda_on_cpu.seed(seed):
            found.append(_results(case))
    assert _equal(found[0], found[1]) and _equal(found[0], found[2])


def _counted(call, *arguments):
    """What `call` returns, and what its launches did."""
    before = cuda_on_cpu.counters().all
    found = call(*arguments)
    return found, cuda_on_cpu.counters().all - before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 768, 1024])
@pytest.mark.parametrize("name", ["add_layer_norm", "embed_layer_norm"])
def test_accesses_of_16_bytes_and_of_elements_give_the_same_bits(name, width, dtype):
    """Wider rows are shared out in another way where they are read by elements."""
    wide, of_wide = _counted(_results, CASES[name](9, width, dtype))
    narrow, of_narrow = _counted(_results, CASES[name](9, width, dtype, misaligned))
    assert _equal(wide, narrow)
    assert of_wide.wide_accesses > 0 and of_narrow.wide_accesses == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 768, 1032, 1040, 2056])
def test_activations_by_16_bytes_and_by_elements_give_the_same_bits(width, dtype):
    def forward(layout):
        x, weight, bias = (random(*s, dtype=dtype, seed=9, grad=False) for s in ((9, 8), (width, 8), (width,)))
        # The product's bits may depend on where its factors lie.
        bias = layout(bias)
        return torch.ops.bertfast.linear_gelu_separate_fwd_cuda(x, weight, bias, "gelu", seed_tensor(), 0.3, True)

    def backward(layout):
        dout, pre = (layout(random(9, width, dtype=dtype, seed=seed, grad=False)) for seed in (1, 2))
        return torch.ops.bertfast.linear_gelu_bwd_cuda(dout, pre, "gelu", seed_tensor(), 0.3, True, True)

    for run in (forward, backward):
        wide, of_wide = _counted(run, contiguous)
        narrow, of_narrow = _counted(run, misaligned)
        assert _equal(wide, narrow)
        assert of_wide.wide_accesses > 0
        # The product is a tensor of its own. In half precision its GEMM has taken the bias.
        assert of_narrow.wide_accesses == 0 or (run is forward and dtype != torch.float32)


@pytest.mark.parametrize("layout", [contiguous, misaligned, padded_rows])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("width", [1032, 4096, 8191, 8192])
@pytest.mark.parametrize("name", ["add_layer_norm", "embed_layer_norm"])
def test_wide_rows(name, width, dtype, layout):
    assert_parity(CASES[name](3, width, dtype, layout), "cuda")


@pytest.mark.parametrize("vector", [HALF, torch.float32])
@pytest.mark.parametrize("residual", DTYPES)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("width", [40, 1030, 1040])
def test_mixed_dtypes(x, residual, vector, width):
    dtypes = {"x": x, "residual": residual, "weight": vector, "bias": torch.float32, "x_bias": torch.float16}
    case = _add_layer_norm(7, width, torch.float64)
    inputs = {name: t.detach().to(dtypes[name]).requires_grad_() for name, t in case.inputs.items()}
    assert_parity(AddLayerNorm(inputs, case.settings), "cuda")


@pytest.mark.parametrize("width", [7, 40, 1040])
def test_mixed_rows_are_normalised_as_they_are_stored(width):
    """The sum is rounded before its statistics are taken, whatever the weight's dtype."""
    x, x_bias = (random(*shape, dtype=HALF, seed=i, grad=False) for i, shape in enumerate([(5, width), (width,)]))
    weight, bias = torch.ones(width), torch.zeros(width)
    arguments = None, weight, bias, 100 * x_bias, None, 1e-5, 0.0, True
    out, total, mean, rstd = torch.ops.bertfast.add_layer_norm_fwd_cuda(x, *arguments)
    assert out.dtype == total.dtype == HALF
    of_stored = total.double()
    torch.testing.assert_close(mean.double(), of_stored.mean(-1), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(rstd.double(), (of_stored.var(-1, correction=0) + 1e-5).rsqrt(), atol=0, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "width", "blocks"),
    [
        # Forward a block has four rows up to a width of 1,024, else one. Backward three blocks to each of the four
        # multiprocessors of an emulated device, or one where rows are wide. Then 32 columns of each sum to a block.
        ("add_layer_norm", 40, (33, 12, 3 * 2)),
        ("add_layer_norm", 1040, (131, 4, 3 * 33)),
        ("embed_layer_norm", 40, (66, 12, 2 * 2)),
        ("embed_layer_norm", 1040, (262, 4, 2 * 33)),
        # Forward a block has four rows of 512 columns, backward 32 blocks share out the stripes.
        ("separate_feed_forward", 40, (33, 32, 2)),
        ("separate_feed_forward", 512, (33, 32, 16)),
        ("separate_feed_forward", 1040, (33 * 3, 30, 33)),
    ],
)
def test_blocks_walk_over_many_rows(name, width, blocks):
    case = CASES[name](131, width, torch.float32)
    _, forward = _counted(case.ours, case.inputs, "cuda")
    _, every = _counted(_results, case)
    sums = cuda_on_cpu.counters().last
    assert (forward.launches, every.launches) == (1, 3)
    assert (forward.blocks, every.blocks - forward.blocks - sums.blocks, sums.blocks) == blocks
    assert_parity(case, "cuda")


def _mask(shape, backend, op):
    """What an op keeps of ones."""
    width = shape[-1]
    ones = torch.ones(shape)
    if op == "add_layer_norm":
        one = torch.ones(width)
        arguments = torch.zeros(shape), one, one
        return ops.add_layer_norm(
            ones, *arguments, dropout_p=0.4, return_sum=True, _seed=seed_tensor(-3), backend=backend
        )[1].ne(0)
    if op == "embed_layer_norm":
        # LayerNorm makes the bias of rows without variance.
        zeros, one = torch.zeros(shape), torch.ones(width)
        arguments = None, None, None, zeros, zeros, None, one, one
        settings = dict(inputs_embeds=zeros[None], dropout_p=0.4, _seed=seed_tensor(-3), backend=backend)
        return ops.embed_layer_norm(*arguments, **settings)[0].ne(0)
    weight = torch.eye(width)
    out = ops.feed_forward(
        ones, weight, None, weight, None, "linear", dropout_p=0.4, _seed=seed_tensor(-3), backend=backend
    )
    return out.ne(0)


@pytest.mark.parametrize("op", ["add_layer_norm", "embed_layer_norm", "feed_forward"])
@pytest.mark.parametrize("shape", [(7, 33), (70, 128), (3, 1030)])
def test_drops_what_the_triton_kernel_drops(shape, op):
    mask = _mask(shape, "cuda", op)
    assert torch.equal(mask, ops.dropout_mask(seed_tensor(-3), shape, 0.4, op))
    if "triton" in {backend for backend, _ in backends_for(op)}:
        assert torch.equal(mask, _mask(shape, "triton", op))


def test_the_threshold_of_dropout_is_exact():
    """Of the first word w, p = (w + 1) / 2^32 drops the element and p = w / 2^32 keeps it."""
    zero = torch.zeros((), dtype=torch.int64)
    counter = zero, zero, zero, torch.tensor(STREAMS["add_layer_norm"])
    word = int(philox(seed_tensor(-3), counter)[0])
    x, none, one = torch.ones(1, 8), torch.zeros(1, 8), torch.ones(8)
    for count, kept in ((word + 1, False), (word, True)):
        settings = {"dropout_p": count / 2**32, "return_sum": True, "_seed": seed_tensor(-3), "backend": "cuda"}
        assert bool(ops.add_layer_norm(x, none, one, one, **settings)[1][0, 0]) == kept


class TestBeyond32Bits:
    """On virtual memory, of which only the rows that are looked at become real."""

    @pytest.fixture(autouse=True)
    def memory_as_it_comes(self, poisoned_memory):  # noqa: F811
        torch.utils.deterministic.fill_uninitialized_memory = False

    @staticmethod
    def far_rows(rows, width):
        """Rows 2^30 elements apart, so that the third begins at 2^31."""
        stride = 2**30 + 8
        x = torch.empty((rows - 1) * stride + width, dtype=HALF).as_strided((rows, width), (stride, 1))
        return x.copy_(random(rows, width, dtype=HALF, seed=5, grad=False))

    @pytest.mark.parametrize("width", [24, 37, 1040])
    def test_strides_of_inputs(self, width):
        x = self.far_rows(3, width)
        weight, bias = (random(width, dtype=HALF, seed=seed, grad=False) for seed in (1, 2))
        arguments = x, weight, bias, None, None, 1e-5, 0.0, False
        out, _, mean, rstd = torch.ops.bertfast.add_layer_norm_fwd_cuda(x, None, *arguments[1:])
        near = torch.ops.bertfast.add_layer_norm_fwd_cuda(x.contiguous(), None, *arguments[1:])
        assert _equal((out, mean, rstd), (near[0], *near[2:]))
        dout = random(3, width, dtype=HALF, seed=9, grad=False)
        rest = mean, rstd, weight, None, 0.0, False, False
        far = torch.ops.bertfast.add_layer_norm_bwd_cuda(dout, None, x, *rest)
        assert _equal(far, torch.ops.bertfast.add_layer_norm_bwd_cuda(dout, None, x.contiguous(), *rest))
        far = torch.ops.bertfast.embed_layer_norm_bwd_cuda(dout, x, mean, rstd, weight, None, 0.0)
        near = torch.ops.bertfast.embed_layer_norm_bwd_cuda(dout, x.contiguous(), mean, rstd, weight, None, 0.0)
        assert _equal(far, near)
        far = torch.ops.bertfast.linear_gelu_bwd_cuda(dout, x, "gelu", None, 0.0, True, True)
        assert _equal(far, torch.ops.bertfast.linear_gelu_bwd_cuda(dout, x.contiguous(), "gelu", None, 0.0, True, True))

    @pytest.mark.parametrize("width", [24, 1040])
    def test_rows_of_a_table(self, width):
        word = self.far_rows(3, width)
        position, weight, bias = (random(n, dtype=HALF, seed=n, grad=False) for n in (width,) * 3)
        ids = torch.tensor([[2, 0, 1]])
        rest = position.view(1, width).expand(3, width), None, weight, bias, None, 1e-5, 0.0, HALF, False
        far = torch.ops.bertfast.embed_layer_norm_fwd_cuda(ids, None, None, None, word, *rest)
        near = torch.ops.bertfast.embed_layer_norm_fwd_cuda(ids, None, None, None, word.contiguous(), *rest)
        assert _equal((far[0], *far[2:]), (near[0], *near[2:]))

    @pytest.mark.parametrize("width", [1024, 4096])
    def test_offsets_of_outputs(self, width):
        rows = 2**31 // width + 2
        x = torch.empty(rows, width, dtype=HALF)
        x[-2:] = random(2, width, dtype=HALF, seed=5, grad=False)
        weight, bias = (random(width, dtype=HALF, seed=seed, grad=False) for seed in (1, 2))
        blocks = -(-rows // 4) if width == 1024 else rows
        with cuda_on_cpu.only_blocks(blocks - 2, 2):
            last = ops.add_layer_norm(x, None, weight, bias, backend="cuda")[-2:]
        assert torch.equal(last, ops.add_layer_norm(x[-2:], None, weight, bias, backend="cuda"))
        ids = torch.zeros(rows, 1, dtype=torch.int32)
        ids[-2:, 0] = torch.tensor([2, 1])
        tables = (random(n, width, dtype=HALF, seed=n, grad=False) for n in (3, 1))
        arguments = None, None, *tables, None, weight, bias
        with cuda_on_cpu.only_blocks(blocks - 2, 2):
            last = ops.embed_layer_norm(ids, *arguments, backend="cuda")[-2:]
        assert torch.equal(last, ops.embed_layer_norm(ids[-2:], *arguments, backend="cuda"))


def test_what_is_too_wide_or_of_another_dtype_is_an_error():
    x, ones = torch.ones(2, 8193), torch.ones(8193)
    settings = None, None, 1e-5, 0.0, False
    with pytest.raises(RuntimeError, match="width: expected at most 8192, got 8193"):
        torch.ops.bertfast.add_layer_norm_fwd_cuda(x, None, ones, ones, *settings)
    with pytest.raises(RuntimeError, match="weight: expected float32, bfloat16 or float16, got Double"):
        torch.ops.bertfast.add_layer_norm_fwd_cuda(x[:, :8], None, ones[:8].double(), ones[:8], *settings)
    with pytest.raises(RuntimeError, match=r"residual: expected the shape of x, \(2, 8\), got \(2, 9\)"):
        torch.ops.bertfast.add_layer_norm_fwd_cuda(x[:, :8], x[:, :9], ones[:8], ones[:8], *settings)


def _embeddings(ids, embeds=None, types=None, dtype=torch.float32):
    word, weight = torch.ones(3, 8), torch.ones(8)
    kinds = None if types is None else torch.zeros_like(ids)
    arguments = ids, kinds, None, embeds, word, word, types, weight, weight, None, 1e-5, 0.0, dtype, True
    return torch.ops.bertfast.embed_layer_norm_fwd_cuda(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.tensor(1),), r"input_ids: expected at least 1 dimension\(s\), got shape \(\)"),
        ((None, torch.ones(8)), r"inputs_embeds: expected at least 2 dimension\(s\), got shape \(8\)"),
        ((torch.tensor([1]), None, None, torch.float64), "dtype: expected float32, bfloat16 or float16, got Double"),
        ((torch.tensor([1]), None, None, torch.int8), "dtype: expected float32, bfloat16 or float16, got Char"),
        ((torch.tensor([1.0]),), "input_ids: expected int32 or int64, got Float"),
    ],
)
def test_wrong_arguments_of_the_private_embeddings(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        _embeddings(*arguments)


@pytest.mark.parametrize(("word_id", "type_id", "place"), [(9, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 3)])
@pytest.mark.parametrize("width", [1, 8])
def test_one_id_outside_its_table_makes_a_row_nan(word_id, type_id, place, width):
    """One value is its own mean, whatever it is: only the id can make it NaN."""
    word, weight = torch.ones(3, width), torch.ones(width)
    ids = torch.tensor([word_id, 1]), torch.tensor([type_id, 0]), torch.tensor([place, 1])
    rest = None, word, word, torch.ones(1, width), weight, weight, None, 1e-5, 0.0, torch.float32, False
    out = torch.ops.bertfast.embed_layer_norm_fwd_cuda(*ids, *rest)[0]
    assert out[0].isnan().all() and not out[1].isnan().any()


def test_blocks_of_several_stripes_walk_over_all_rows():
    assert_parity(_feed_forward(70, 1040, HALF), "cuda")
    assert_parity(_feed_forward(70, 520, torch.float32), "cuda")


def test_every_id_is_outside_a_table_without_rows():
    assert _embeddings(torch.tensor([0, 1]), types=torch.ones(0, 8))[0].isnan().all()


@pytest.mark.parametrize("name", ["add_layer_norm", "embed_layer_norm"])
def test_bank_conflicts_of_backward_passes(name):
    def conflicts(width):
        case = CASES[name](4, width, HALF)
        _, counts = _counted(_results, case)
        assert counts.requests > 0
        return counts.conflicts

    # Neighbours in neighbouring banks.
    assert conflicts(4096) == conflicts(8192) == 0
    # On the way out neighbours are 8 banks apart, so that 8 lanes of a warp meet in one: 7 conflicts for each of 8
    # values, in 4 warps with their first packet and 2 with their second; two rows to a block.
    blocks, sums = (2, 3) if name == "add_layer_norm" else (4, 2)
    assert conflicts(768) == blocks * sums * 7 * 8 * (4 + 2)
