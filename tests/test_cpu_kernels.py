"""What only the C++ kernels can get wrong: conversions, threads, the dropout stream, argument checks."""

from __future__ import annotations

import math

import pytest
import torch

from bertfast import _extension, ops
from helpers.tolerance import assert_within, eps_of

pytestmark = pytest.mark.skipif(
    _extension.STATUS.state == "not_built", reason=f"no extension was built: {_extension.STATUS.reason}"
)

HALVES = [torch.float16, torch.bfloat16]


def forward(x, residual=None, weight=None, bias=None, *, seed=None, eps=1e-5, dropout_p=0.0, need_sum=True):
    n = x.shape[-1] if x.dim() else 1
    weight = torch.ones(n) if weight is None else weight
    bias = torch.zeros(n) if bias is None else bias
    return torch.ops.bertfast.add_layer_norm_fwd_cpu(x, residual, weight, bias, None, seed, eps, dropout_p, need_sum)


def equal_with_nans(a, b):
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_value_is_read_as_torch_reads_it(dtype):
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).reshape(64, 1024)
    _, total, _, _ = forward(values, torch.zeros(64, 1024))
    assert equal_with_nans(total, values.float())


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_rounded_as_torch_rounds_them(dtype):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=generator).to(torch.int32).view(torch.float32)
    # Everything around fp16's range, from below its denormals to above its largest value, and ties.
    spread = (torch.rand(48, 512, generator=generator) + 1) * 2.0 ** torch.arange(-30, 18)[:, None]
    halves = torch.arange(2**15, dtype=torch.int16).view(dtype).float()
    ties = (halves[:-1] + halves[1:]) / 2
    values = torch.cat([bits, spread.flatten(), -spread.flatten(), ties, -ties])
    # Normalising zeros with weight 0 leaves the bias, in fp32, to be stored in the dtype of x.
    out, _, _, _ = forward(torch.zeros(1, len(values), dtype=dtype), weight=torch.zeros(len(values)), bias=values)
    assert equal_with_nans(out[0], values.to(dtype))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345, -(2**63)])
@pytest.mark.parametrize("dropout_p", [1e-10, 0.1, 0.5, 1 - 2**-32])
def test_dropout_follows_the_shared_stream(seed, dropout_p):
    seed = torch.tensor([seed])
    x = torch.ones(5, 33)
    _, total, _, _ = forward(x, seed=seed, dropout_p=dropout_p)
    expected = ops.dropout_mask(seed, (5, 33), dropout_p) * torch.tensor(1 / (1 - dropout_p), dtype=torch.float32)
    assert torch.equal(total, expected)


def test_dropout_of_everything_drops_nan_too():
    x = torch.full((3, 33), float("nan"))
    _, total, _, _ = forward(x, torch.ones(3, 33), seed=torch.tensor([7]), dropout_p=1.0)
    assert torch.equal(total, torch.ones(3, 33))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000, 5000])
def test_results_do_not_depend_on_the_number_of_threads(rows, threads):
    x, dout, weight = torch.randn(rows, 40), torch.randn(rows, 40), torch.randn(40)
    seed = torch.tensor([3])
    results = []
    for count in (1, 2, 5):
        threads(count)
        out, total, mean, rstd = forward(x, x, weight, seed=seed, dropout_p=0.1)
        gradients = torch.ops.bertfast.add_layer_norm_bwd_cpu(
            dout, dout, total, mean, rstd, weight, seed, 0.1, True, True
        )
        results.append((out, total, mean, rstd, *gradients))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 1000, 5000])
def test_gradients_of_an_activation_do_not_depend_on_the_number_of_threads(rows, dtype, threads):
    pre, dout = torch.randn(rows, 40, dtype=dtype), torch.randn(rows, 40, dtype=dtype)
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(torch.ops.bertfast.linear_gelu_bwd_cpu(dout, pre, "gelu", torch.tensor([3]), 0.1, True, True))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("tokens", [(1, 1), (3, 33), (9, 500)])
def test_embeddings_do_not_depend_on_the_number_of_threads(tokens, threads):
    word, position, token_type = (torch.randn(rows, 40) for rows in (30, 500, 2))
    weight, dout, seed = torch.randn(40), torch.randn(*tokens, 40), torch.tensor([3])
    ids = torch.randint(0, 30, tokens)
    results = []
    for count in (1, 2, 5):
        threads(count)
        out, total, mean, rstd = torch.ops.bertfast.embed_layer_norm_fwd_cpu(
            ids, ids % 2, None, None, word, position, token_type, weight, weight, seed, 1e-5, 0.1, word.dtype, True
        )
        gradients = torch.ops.bertfast.embed_layer_norm_bwd_cpu(dout, total, mean, rstd, weight, seed, 0.1)
        results.append((out, total, mean, rstd, *gradients))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 100, 1023, 1025, 20000])
def test_sums_over_rows(rows):
    """Of one sign, where a long chain of additions would lose most: not above the error of torch's sum and one rounding
    of each of its stages."""
    dout = torch.rand(rows, 33)
    dpre, out, dbias = torch.ops.bertfast.linear_gelu_bwd_cpu(dout, dout, "linear", None, 0.0, False, True)
    assert torch.equal(dpre, dout) and out.shape == (0,)
    exact = dout.double().sum(0)
    assert_within(dbias, [dout.sum(0)], exact, 3 * eps_of(torch.float32) * exact, f"{rows} rows")


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345])
def test_dropout_of_the_feed_forward_has_its_own_stream(seed, activation):
    seed, x = torch.tensor([seed]), torch.ones(5, 33)
    keep = ops.dropout_mask(seed, (5, 33), 0.3, "feed_forward") * torch.tensor(1 / 0.7, dtype=torch.float32)
    out = torch.ops.bertfast.activation_fwd_cpu(x, "linear", seed, 0.3)
    dpre, again, _ = torch.ops.bertfast.linear_gelu_bwd_cpu(x, x, "linear", seed, 0.3, True, False)
    through, pre = torch.ops.bertfast.linear_gelu_fwd_cpu(x, torch.eye(33), None, "linear", seed, 0.3, True)
    for dropped in (out, dpre, again, through):
        assert torch.equal(dropped, keep)
    assert torch.equal(pre, x)
    lost = torch.ops.bertfast.activation_fwd_cpu(x * math.nan, activation, seed, 1.0)
    assert torch.equal(lost, torch.zeros(5, 33))


def test_activations_of_nothing():
    for shape in ((2, 0, 5), (3, 0)):
        pre = torch.empty(shape)
        assert torch.ops.bertfast.activation_fwd_cpu(pre, "gelu", None, 0.0).shape == shape
        dpre, out, dbias = torch.ops.bertfast.linear_gelu_bwd_cpu(pre, pre, "gelu", None, 0.0, True, True)
        assert dpre.shape == out.shape == shape and torch.equal(dbias, torch.zeros(shape[-1]))


def test_inputs_of_the_feed_forward_are_not_written():
    x, weight, bias, dout = torch.randn(4, 8), torch.randn(5, 8), torch.randn(5), torch.randn(5, 4).t()
    before = [t.clone() for t in (x, weight, bias, dout)]
    _, pre = torch.ops.bertfast.linear_gelu_fwd_cpu(x, weight, bias, "gelu", None, 0.0, True)
    torch.testing.assert_close(pre, torch.nn.functional.linear(x, weight, bias))
    kept = pre.clone()
    torch.ops.bertfast.activation_fwd_cpu(pre, "gelu", None, 0.0)
    torch.ops.bertfast.linear_gelu_bwd_cpu(dout, pre, "gelu", torch.tensor([1]), 0.5, True, True)
    assert all(torch.equal(*pair) for pair in zip((x, weight, bias, dout, pre), (*before, kept), strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: torch.ones(2, 3)}, "input_ids: expected int32 or int64, got Float"),
        ({0: None}, "input_ids and inputs_embeds: expected exactly one of them"),
        ({0: None, 3: torch.ones(2, 3, 5)}, r"inputs_embeds: expected width 4, got \(2, 3, 5\)"),
        ({5: torch.ones(6, 3)}, r"position: expected shape \(rows, 4\), got \(6, 3\)"),
        ({7: torch.ones(3)}, r"weight: expected shape \(4\), got \(3\)"),
        ({11: 0.5}, "seed: expected an int64 tensor of one element with dropout, got None"),
        ({12: torch.float64}, "dtype: expected float32, bfloat16 or float16, got Double"),
    ],
)
def test_errors_of_embeddings_name_the_argument(changes, message):
    ids, ones = torch.zeros(2, 3, dtype=torch.int64), torch.ones(4)
    tables = torch.ones(9, 4), torch.ones(6, 4), torch.ones(2, 4)
    arguments = [ids, ids, None, None, *tables, ones, ones, None, 1e-5, 0.0, torch.float32, True]
    for place, value in changes.items():
        arguments[place] = value
    with pytest.raises(RuntimeError, match=message):
        torch.ops.bertfast.embed_layer_norm_fwd_cpu(*arguments)


def test_no_rows():
    out, total, mean, rstd = forward(torch.empty(2, 0, 5))
    assert out.shape == total.shape == (2, 0, 5) and mean.shape == rstd.shape == (2, 0)
    dx, dresidual, *sums = torch.ops.bertfast.add_layer_norm_bwd_cpu(
        out, None, total, mean, rstd, torch.ones(5), None, 0.0, True, True
    )
    assert dx.shape == (2, 0, 5) and dresidual.shape == (0,)
    assert all(torch.equal(s, torch.zeros(5)) for s in sums)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_no_columns(dropout_p):
    x = torch.zeros(5, 0, requires_grad=True)
    weight, bias, x_bias = (torch.zeros(0, requires_grad=True) for _ in range(3))
    options = {"x_bias": x_bias, "dropout_p": dropout_p, "return_sum": True, "backend": "cpu"}
    out, total = ops.add_layer_norm(x, x, weight, bias, **options)
    (out.sum() + total.sum()).backward()
    assert out.shape == total.shape == x.grad.shape == (5, 0)
    assert weight.grad.shape == bias.grad.shape == x_bias.grad.shape == (0,)


def test_inputs_of_any_strides_are_read_and_not_written():
    x = torch.randn(6, 4, 5).transpose(0, 1)
    residual = torch.randn(1, 1, 5).expand(4, 6, 5)
    before = x.clone(), residual.clone()
    out, total, _, _ = forward(x, residual)
    torch.testing.assert_close(out, torch.nn.functional.layer_norm(x + residual, (5,)))
    assert torch.equal(total, x + residual) and total.is_contiguous() and out.is_contiguous()
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(x=torch.ones(2, 3).double()), "x: expected float32, bfloat16 or float16, got Double"),
        (dict(x=torch.tensor(1.0)), r"x: expected at least 1 dimension\(s\), got shape \(\)"),
        (dict(residual=torch.ones(3, 2)), r"residual: expected the shape of x, \(2, 3\), got \(3, 2\)"),
        (dict(weight=torch.ones(4)), r"weight: expected shape \(3\), got \(4\)"),
        (dict(bias=torch.ones(3, dtype=torch.int32)), "bias: expected float32, bfloat16 or float16, got Int"),
        (dict(dropout_p=1.5), r"dropout_p: expected a probability in \[0, 1\], got 1.5"),
        (dict(dropout_p=0.5), "seed: expected an int64 tensor of one element with dropout, got None"),
        (dict(dropout_p=0.5, seed=torch.tensor([1, 2])), r"seed: .* got Long of shape \(2\)"),
    ],
)
def test_errors_name_the_argument_what_was_expected_and_what_came(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        forward(**{"x": torch.ones(2, 3), **arguments})


def test_the_feed_forward_checks_its_arguments():
    x = torch.ones(2, 3)
    backward = torch.ops.bertfast.linear_gelu_bwd_cpu
    for arguments, message in (
        ((x.t(), x, "gelu", None, 0.0), r"dout: expected the shape of pre, \(2, 3\), got \(3, 2\)"),
        ((x, x.double(), "gelu", None, 0.0), "pre: expected float32, bfloat16 or float16, got Double"),
        ((x, x, "gleu", None, 0.0), "activation: expected a formula of bertfast.activations.FORMULAS, got gleu"),
        ((x, x, "gelu", None, 1.5), r"dropout_p: expected a probability in \[0, 1\], got 1.5"),
        ((x, x, "gelu", None, 0.5), "seed: expected an int64 tensor of one element with dropout, got None"),
    ):
        with pytest.raises(RuntimeError, match=message):
            backward(*arguments, True, True)
    with pytest.raises(RuntimeError, match=r"weight: expected shape \(N, 3\), got \(5, 4\)"):
        torch.ops.bertfast.linear_gelu_fwd_cpu(x, torch.ones(5, 4), None, "gelu", None, 0.0, True)
    with pytest.raises(RuntimeError, match=r"pre: expected at least 1 dimension"):
        torch.ops.bertfast.activation_fwd_cpu(torch.tensor(1.0), "gelu", None, 0.0)


def test_backward_checks_its_arguments():
    x = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match=r"dout: expected the shape of sum, \(2, 3\), got \(3, 2\)"):
        torch.ops.bertfast.add_layer_norm_bwd_cpu(
            x.t(), None, x, torch.ones(2), torch.ones(2), torch.ones(3), None, 0.0, False, False
        )
    with pytest.raises(RuntimeError, match=r"rstd: expected one value per row, 2, got shape \(3\)"):
        torch.ops.bertfast.add_layer_norm_bwd_cpu(
            x, None, x, torch.ones(2), torch.ones(3), torch.ones(3), None, 0.0, False, False
        )
