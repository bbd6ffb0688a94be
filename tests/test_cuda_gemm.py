"""What the CUDA kernels of linear layers promise beyond parity of the ops, which is in the ops' own tests: every tile,
splits of K, the order of threads, banks, products, accesses, offsets, and what the private ops refuse."""

import math

import pytest
import torch

from bertfast import ops
from bertfast.activations import FORMULAS
from helpers import cuda_on_cpu
from helpers.op_cases import FeedForward, LinearGelu, QkvProjection, random, seed_tensor
from helpers.poison import contiguous, misaligned, poisoned_memory  # noqa: F401
from helpers.recorder import allocated
from helpers.tolerance import assert_parity, random_cotangents

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HALF = (torch.bfloat16, torch.float16)
OPS = torch.ops.bertfast


def apart(x):
    """Rows further apart than they are long, by a word of 16 bytes."""
    return torch.nn.functional.pad(x.detach(), (0, 8), value=torch.nan)[:, :-8].requires_grad_(x.requires_grad)


def linear_case(rows, width_out, width, dtype=torch.float16, bias=True, layout=contiguous, grad=True, **settings):
    inputs = {
        "x": layout(random(rows, width, dtype=dtype, seed=1, grad=grad)),
        "weight": layout(random(width_out, width, dtype=dtype, seed=2, scale=width**-0.5, grad=grad)),
        "bias": random(width_out, dtype=dtype, seed=3, grad=grad) if bias else None,
    }
    return LinearGelu(inputs, settings)


def feed_forward_case(rows, inner, width, dtype=torch.float16, **settings):
    shapes = {"x": (rows, width), "w_in": (inner, width), "b_in": (inner,), "w_out": (16, inner), "b_out": (16,)}
    inputs = {
        name: random(*shape, dtype=dtype, seed=i, scale=1.0 if name == "x" else shape[-1] ** -0.5)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return FeedForward(inputs, {"seed": seed_tensor(), **settings})


def qkv_case(rows, width_out, width, dtype=torch.float16, biases=True, layout=contiguous):
    inputs = {"x": random(rows, width, dtype=dtype, seed=1)}
    for seed, name in enumerate("qkv", start=2):
        inputs[f"w{name}"] = layout(random(width_out, width, dtype=dtype, seed=seed, scale=width**-0.5))
        inputs[f"b{name}"] = random(width_out, dtype=dtype, seed=seed + 3) if biases else None
    return QkvProjection(inputs)


def counted(call, *arguments):
    """What `call` returns, and what its launches did."""
    before = cuda_on_cpu.counters().all
    found = call(*arguments)
    return found, cuda_on_cpu.counters().all - before


def results_of(case):
    """Outputs and gradients on `cuda`."""
    inputs = {name: t if t is None else t.detach().requires_grad_() for name, t in case.inputs.items()}
    outputs = case.ours(inputs, "cuda")
    leaves = [t for t in inputs.values() if t is not None]
    cotangents = random_cotangents(outputs)
    return [*outputs.values(), *torch.autograd.grad(list(outputs.values()), leaves, list(cotangents.values()))]


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


ROWS = (1, 7, 64, 65, 130)
WIDTHS = (16, 48, 80, 384, 768, 1000)


@pytest.mark.parametrize("width_out", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", HALF)
def test_rows_and_columns(dtype, rows, width_out):
    for width in (48, 80):
        assert_parity(linear_case(rows, width_out, width, dtype), "cuda")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", HALF)
def test_rows_and_lengths_of_the_sum(dtype, rows, width):
    for width_out in (16, 80):
        assert_parity(linear_case(rows, width_out, width, dtype), "cuda")
    assert_parity(qkv_case(rows, 48, width, dtype), "cuda")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("width_out", WIDTHS)
@pytest.mark.parametrize("dtype", HALF)
def test_columns_and_lengths_of_the_sum(dtype, width_out, width):
    assert_parity(linear_case(7, width_out, width, dtype, grad=False), "cuda")


# Of the four multiprocessors of an emulated device each has a tile, or the tile is the smallest.
TILES = {
    "128 x 128": ((130, 384, 80), 6),
    "128 x 128, few": ((257, 200, 32), 6),
    "128 x 64": ((130, 80, 48), 4),
    "128 x 64, few": ((257, 100, 72), 6),
    "64 x 64": ((65, 80, 48), 4),
    "64 x 64, few rows": ((7, 80, 48), 2),
    "64 x 64, few columns": ((130, 40, 48), 3),
}


@pytest.mark.parametrize("name", TILES)
def test_tiles(name):
    sizes, blocks = TILES[name]
    case = linear_case(*sizes)
    _, did = counted(case.ours, case.inputs, "cuda")
    assert (did.launches, did.blocks) == (1, blocks)
    assert_parity(case, "cuda")


@pytest.mark.parametrize(
    ("rows", "width_out", "width", "splits"),
    # Of 256 or more but for the last, as many as multiprocessors: four.
    [(7, 48, 511, 1), (7, 48, 512, 2), (65, 48, 512, 2), (3, 17, 1000, 3), (7, 48, 1016, 3), (64, 64, 1320, 4)],
)
@pytest.mark.parametrize("dtype", HALF)
def test_splits_of_the_sum(dtype, rows, width_out, width, splits):
    """The last may be shorter, and end inside a step."""
    case = linear_case(rows, width_out, width, dtype)
    _, did = counted(case.ours, case.inputs, "cuda")
    if width % 8 == 0:
        assert did.launches == (1 if splits == 1 else 2)
        assert did.blocks - (rows if splits > 1 else 0) == splits * -(-rows // 64)
    assert_parity(case, "cuda")
    assert_parity(linear_case(rows, width_out, width, dtype, bias=False), "cuda")
    assert_parity(feed_forward_case(rows, width_out, width, dtype, dropout_p=0.3), "cuda")


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize(("rows", "width_out", "width"), [(65, 80, 48), (130, 40, 80), (130, 136, 32), (5, 7, 768)])
@pytest.mark.parametrize("dtype", HALF)
def test_three_weights(dtype, rows, width_out, width, biases):
    """No tile has columns of two of them."""
    for layout in (contiguous, apart, misaligned):
        assert_parity(qkv_case(rows, width_out, width, dtype, biases, layout), "cuda")


def test_an_equal_weight_gives_equal_bits_wherever_it_stands():
    x, weight, bias = (random(*s, dtype=torch.float16, seed=1, grad=False) for s in ((130, 72), (200, 72), (200,)))
    out = OPS.qkv_projection_fwd_cuda(x, weight, weight, weight, bias, None, bias)
    first, second, third = out.split(200, -1)
    assert torch.equal(first, third)
    assert torch.equal(first, OPS.linear_gelu_fwd_cuda(x, weight, bias, "linear", None, 0.0, False)[0])
    assert torch.equal(second, OPS.linear_gelu_fwd_cuda(x, weight, None, "linear", None, 0.0, False)[0])


CASES = {
    "128 x 128": lambda: linear_case(130, 384, 80),
    "128 x 64": lambda: linear_case(130, 80, 200),
    "64 x 64": lambda: linear_case(65, 80, 200),
    "splits": lambda: linear_case(7, 48, 600),
    "dropout": lambda: feed_forward_case(130, 384, 40, dropout_p=0.3),
    "three weights": lambda: qkv_case(130, 80, 48),
    "odd columns": lambda: linear_case(65, 77, 48),
}


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_threads_changes_nothing(name):
    found = []
    for seed in (1, 2, 3):
        with cuda_on_cpu.seed(seed):
            found.append(results_of(CASES[name]()))
    assert equal(found[0], found[1]) and equal(found[0], found[2])


@pytest.mark.parametrize("name", CASES)
def test_no_bank_conflicts(name):
    """In copies to shared memory, in fragments read from it, and in sums on their way out."""
    case = CASES[name]()
    _, did = counted(case.ours, case.inputs, "cuda")
    assert did.conflicts == 0 < did.requests


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ((128, 512, 96), (128, 128, 32)),
        ((256, 128, 40), (128, 64, 32)),
        ((64, 64, 128), (64, 64, 64)),
        ((1, 1, 72), (64, 64, 64)),
    ],
)
def test_products_are_those_of_whole_tiles_and_steps(sizes, tile):
    case = linear_case(*sizes)
    _, did = counted(case.ours, case.inputs, "cuda")
    of_tile = tile[0] // 16 * (tile[1] // 8) * (tile[2] // 16)
    assert did.products == math.prod(-(-size // part) for size, part in zip(sizes, tile, strict=True)) * of_tile


@pytest.mark.parametrize("need_pre", [True, False])
@pytest.mark.parametrize("sizes", [(130, 384, 80), (65, 77, 48), (7, 48, 600)])
def test_the_activations_input_is_the_product_with_bias(sizes, need_pre):
    x, weight, bias = (t.detach() for t in linear_case(*sizes, dtype=torch.bfloat16).inputs.values())
    out, pre = OPS.linear_gelu_fwd_cuda(x, weight, bias, "gelu", None, 0.0, need_pre)
    linear = OPS.linear_gelu_fwd_cuda(x, weight, bias, "linear", None, 0.0, False)[0]
    assert torch.equal(pre, linear) if need_pre else pre.numel() == 0
    # The activation sees it before it is rounded.
    exact = torch.nn.functional.gelu(x.double() @ weight.double().T + bias.double())
    torch.testing.assert_close(out.double(), exact, atol=1e-4, rtol=2**-8)


@pytest.mark.parametrize("name", sorted(set(FORMULAS.values())))
def test_every_activation(name):
    """The same, whether the product's kernel or the pass behind a split product computes it."""
    x, weight, bias = (t.detach() for t in linear_case(66, 40, 600, dtype=torch.bfloat16).inputs.values())
    of_splits, pre = OPS.linear_gelu_fwd_cuda(x[:3], weight, bias, name, None, 0.0, True)
    with_columns = torch.cat([weight] * 8)
    whole, whole_pre = OPS.linear_gelu_fwd_cuda(x, with_columns, torch.cat([bias] * 8), name, None, 0.0, True)
    torch.testing.assert_close(whole_pre[:3, :40], pre, atol=1e-3, rtol=2**-7)
    torch.testing.assert_close(whole[:3, :40], of_splits, atol=1e-2, rtol=2**-6)
    again = OPS.linear_gelu_bwd_cuda(torch.ones_like(pre), pre, name, None, 0.0, True, False)[1]
    torch.testing.assert_close(of_splits, again, atol=1e-2, rtol=2**-6)


@pytest.mark.parametrize("sizes", [(130, 384, 40), (130, 80, 40), (7, 48, 600), (65, 77, 48)])
def test_drops_what_other_kernels_drop(sizes):
    rows, inner, width = sizes
    x, weight = torch.ones(rows, width).half(), torch.ones(inner, width).half()
    out, pre = OPS.linear_gelu_fwd_cuda(x, weight, None, "linear", seed_tensor(-3), 0.4, True)
    assert pre.all()
    assert torch.equal(out.ne(0), ops.dropout_mask(seed_tensor(-3), (rows, inner), 0.4, "feed_forward"))


@pytest.mark.parametrize("layout", [contiguous, apart])
def test_accesses_are_of_16_bytes_where_they_fit(layout):
    """Biases and seeds apart."""
    case = linear_case(130, 384, 80, bias=False, layout=layout)
    _, did = counted(case.ours, case.inputs, "cuda")
    assert did.other_accesses == 0 < did.wide_accesses
    odd = linear_case(130, 77, 80, bias=False)
    _, did = counted(odd.ours, odd.inputs, "cuda")
    assert did.other_accesses == 2 * 130 * 77


UNFIT = {
    "one element off": lambda rows: misaligned(random(rows, 48, dtype=torch.bfloat16, seed=7, grad=False)),
    "an odd stride": lambda rows: random(rows, 49, dtype=torch.bfloat16, seed=7, grad=False)[:, 1:],
}


@pytest.mark.parametrize("layout", UNFIT)
@pytest.mark.parametrize("changed", ["x", "weight"])
def test_rows_that_16_bytes_do_not_fit_are_torchs_to_multiply(changed, layout):
    inputs = linear_case(9, 40, 48, torch.bfloat16).inputs
    inputs[changed] = UNFIT[layout](inputs[changed].shape[0])
    _, did = counted(LinearGelu(inputs).ours, inputs, "cuda")
    assert (did.products, did.launches) == (0, 1)
    assert_parity(LinearGelu(inputs), "cuda")


def test_a_transposed_weight_is_torchs_to_multiply():
    """A copy of it would cost more, in each call."""
    inputs = linear_case(9, 40, 48, torch.bfloat16).inputs
    inputs["weight"] = random(48, 40, dtype=torch.bfloat16, seed=7, grad=False).t()
    _, did = counted(LinearGelu(inputs).ours, inputs, "cuda")
    assert did.products == 0
    assert_parity(LinearGelu(inputs), "cuda")


@pytest.mark.parametrize("dtype", HALF)
def test_a_sum_of_nothing(dtype):
    """The views are aligned: the kernel takes them."""
    x, weight = torch.full((9, 8), torch.nan, dtype=dtype)[:, :0], torch.full((40, 8), torch.nan, dtype=dtype)[:, :0]
    bias = random(40, dtype=dtype, seed=1, grad=False)
    (out, pre), did = counted(OPS.linear_gelu_fwd_cuda, x, weight, bias, "linear", None, 0.0, True)
    assert torch.equal(out, bias.expand(9, 40)) and torch.equal(pre, out) and did.launches == did.blocks == 1


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize(("rows", "width_out", "tiles"), [(7, 48, 3), (70, 48, 6), (70, 17, 6), (7, 80, 6)])
def test_three_weights_in_splits_of_the_sum(rows, width_out, tiles, biases):
    case = qkv_case(rows, width_out, 1000, biases=biases)
    with cuda_on_cpu.library().multiprocessors(24):
        _, did = counted(case.ours, case.inputs, "cuda")
        assert did.launches == 2 and did.blocks == 3 * tiles + rows
        assert_parity(case, "cuda")


def test_three_weights_over_more_tiles_than_a_group_has():
    case = qkv_case(400, 16, 48)
    _, did = counted(case.ours, case.inputs, "cuda")
    assert did.launches == 1 and did.blocks > 8
    assert_parity(case, "cuda")


def test_rows_without_unit_stride_are_copied():
    inputs = linear_case(9, 40, 48, torch.bfloat16).inputs
    inputs["x"] = random(9, 1, dtype=torch.bfloat16, seed=7, grad=False).expand(9, 48)
    _, did = counted(LinearGelu(inputs).ours, inputs, "cuda")
    assert did.products > 0
    assert_parity(LinearGelu(inputs), "cuda")


def test_splits_of_the_sum_are_all_that_is_allocated_besides_outputs():
    x, weight, bias = (t.detach() for t in linear_case(7, 48, 600).inputs.values())
    for length, splits in ((600, 2), (80, 0)):
        arguments = x[:, :length].contiguous(), weight[:, :length].contiguous(), bias
        found = allocated(lambda a=arguments: OPS.linear_gelu_fwd_cuda(*a, "gelu", None, 0.0, False))
        assert found == 7 * 48 * (2 + 4 * splits)


class TestBeyond32Bits:
    """On virtual memory, of which only the rows that are looked at become real."""

    @pytest.fixture(autouse=True)
    def memory_as_it_comes(self, poisoned_memory):  # noqa: F811
        torch.utils.deterministic.fill_uninitialized_memory = False

    @staticmethod
    def far_rows(rows, width, seed):
        """Rows 2^30 elements apart, so that the third begins at 2^31."""
        stride = 2**30 + 8
        x = torch.empty((rows - 1) * stride + width, dtype=torch.float16).as_strided((rows, width), (stride, 1))
        return x.copy_(random(rows, width, dtype=torch.float16, seed=seed, grad=False))

    @pytest.mark.parametrize("width", [80, 600])
    def test_strides_of_inputs(self, width):
        x, weight = self.far_rows(3, width, 1), self.far_rows(4, width, 2)
        bias = random(4, dtype=torch.float16, seed=3, grad=False)
        far = OPS.linear_gelu_fwd_cuda(x, weight, bias, "gelu", None, 0.0, True)
        assert equal(far, OPS.linear_gelu_fwd_cuda(x.contiguous(), weight.contiguous(), bias, "gelu", None, 0.0, True))
        far = OPS.qkv_projection_fwd_cuda(x, weight, weight, weight, bias, bias, bias)
        near = weight.contiguous()
        assert torch.equal(far, OPS.qkv_projection_fwd_cuda(x.contiguous(), near, near, near, bias, bias, bias))

    def test_offsets_of_outputs(self):
        rows, width, width_out = 2**31 // 512 + 130, 32, 512
        x = torch.empty(rows, width, dtype=torch.float16)
        x[-130:] = random(130, width, dtype=torch.float16, seed=5, grad=False)
        weight, bias = (random(*s, dtype=torch.float16, seed=2, grad=False) for s in ((width_out, width), (width_out,)))
        # The last two rows of tiles are a group of their own.
        assert -(-rows // 128) % 8 == 2
        last = -(-rows // 128) * 4 - 8
        with cuda_on_cpu.only_blocks(last, 8):
            out, pre = OPS.linear_gelu_fwd_cuda(x, weight, bias, "gelu", None, 0.0, True)
        near_out, near_pre = OPS.linear_gelu_fwd_cuda(x[-130:], weight, bias, "gelu", None, 0.0, True)
        assert torch.equal(pre[-130:], near_pre) and torch.equal(out[-130:], near_out)


def test_more_tiles_than_a_grid_has_rows():
    """70,000 tiles of 128 rows lie along x, which takes 2^31."""
    rows = 128 * 70_000
    x, weight = torch.empty(rows, 16, dtype=torch.float16), torch.ones(8, 16).half()
    x[-128:] = 1
    with cuda_on_cpu.only_blocks(69_999, 1):
        out, _ = OPS.linear_gelu_fwd_cuda(x, weight, None, "linear", None, 0.0, False)
    assert out[-128:].eq(16).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, 8).double()}, "x: expected float32, bfloat16 or float16, got Double"),
        ({"x": torch.ones(()).half()}, r"x: expected at least 1 dimension\(s\), got shape \(\)"),
        ({"weight": torch.ones(5, 7).half()}, r"weight: expected shape \(N, 8\), got \(5, 7\)"),
        ({"weight": torch.ones(5, 8)}, "weight: expected the dtype of x, Half, got Float"),
        ({"bias": torch.ones(4).half()}, r"bias: expected shape \(5\), got \(4\)"),
        ({"bias": torch.ones(5)}, "bias: expected the dtype of x, Half, got Float"),
        ({"activation": "gleu"}, "activation: expected a formula of .*, got gleu"),
        ({"dropout_p": 0.5}, "seed: expected an int64 tensor of one element with dropout, got None"),
    ],
)
@pytest.mark.parametrize("op", ["linear_gelu_fwd_cuda", "linear_gelu_separate_fwd_cuda"])
def test_wrong_arguments_of_linear_gelu(op, change, message):
    arguments = {
        "x": torch.ones(3, 8).half(),
        "weight": torch.ones(5, 8).half(),
        "bias": None,
        "activation": "gelu",
        "seed": None,
        "dropout_p": 0.0,
        "need_pre": False,
    }
    with pytest.raises(RuntimeError, match=message):
        getattr(OPS, op)(*(arguments | change).values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: torch.ones(5, 8)}, "weight_q: expected the dtype of x, Half, got Float"),
        ({1: torch.ones(5).half()}, r"weight_q: expected shape \(N, 8\), got \(5\)"),
        ({3: torch.ones(4, 8).half()}, r"weight_v: expected shape \(5, 8\), got \(4, 8\)"),
        ({5: torch.ones(8).half()}, r"bias_k: expected shape \(5\), got \(8\)"),
        ({6: torch.ones(5)}, "bias_v: expected the dtype of x, Half, got Float"),
    ],
)
def test_wrong_arguments_of_qkv_projection(change, message):
    x, weight = torch.ones(3, 8).half(), torch.ones(5, 8).half()
    arguments = dict(enumerate((x, weight, weight, weight, None, None, None)))
    with pytest.raises(RuntimeError, match=message):
        OPS.qkv_projection_fwd_cuda(*(arguments | change).values())
