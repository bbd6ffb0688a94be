"""add_layer_norm on every backend: parity forward and backward, layouts, dtypes, dropout, errors."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from bertfast import BackendError, ops, use_backend
from helpers import poison
from helpers.op_cases import ALL_DTYPES, AddLayerNorm, backends_for, random, seed_tensor
from helpers.poison import LAYOUTS, poisoned_memory  # noqa: F401
from helpers.saved import saved_bytes
from helpers.tolerance import assert_parity, random_cotangents

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SERVED = backends_for("add_layer_norm")
EVERY = backends_for("add_layer_norm", ALL_DTYPES)
BACKENDS = sorted({backend for backend, _ in SERVED})
WIDTHS = (1, 2, 3, 17, 48, 127, 384, 768, 1000, 1024, 1025, 4096)
ROWS = (1, 7, 63, 127, 129, 130)


def case(*shape, dtype, residual=True, x_bias=True, layout=poison.contiguous, shift=0.0, scale=1.0, **settings):
    def numbers(seed, *size, **options):
        return layout(random(*size, dtype=dtype, seed=seed, **options))

    width = shape[-1]
    inputs = {
        "x": numbers(1, *shape, shift=shift, scale=scale),
        "residual": numbers(2, *shape, shift=shift, scale=scale) if residual else None,
        "weight": numbers(3, width, shift=1.0),
        "bias": numbers(4, width),
        "x_bias": numbers(5, width) if x_bias else None,
    }
    return AddLayerNorm(inputs, settings)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_widths(backend, dtype, width):
    for shift in (0.0, 3.0):
        assert_parity(case(5, width, dtype=dtype, shift=shift, return_sum=True), backend)


@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_the_widest_rows_in_one_pass(backend, dtype):
    assert_parity(case(3, 8192, dtype=dtype, dropout_p=0.2, seed=seed_tensor(), return_sum=True), backend)


def test_wider_rows_than_a_kernel_takes_go_to_the_next_backend():
    whole = case(2, 8193, dtype=torch.float32)
    if "triton" in BACKENDS:
        with pytest.raises(BackendError, match="triton: width is 8193, at most 8192"):
            whole.ours(whole.inputs, "triton")
    with use_backend("triton", "torch"):
        assert torch.equal(whole.ours(whole.inputs, None)["out"], whole.ours(whole.inputs, "torch")["out"])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_rows(backend, dtype, rows):
    assert_parity(case(rows, 48, dtype=dtype, return_sum=True), backend)


@pytest.mark.parametrize(("residual", "x_bias", "return_sum"), itertools.product((True, False), repeat=3))
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_optional_arguments(backend, dtype, residual, x_bias, return_sum):
    assert_parity(case(2, 9, 33, dtype=dtype, residual=residual, x_bias=x_bias, return_sum=return_sum), backend)


@pytest.mark.parametrize("shape", [(48,), (1, 48), (2, 3, 4, 17), (1, 1, 1)])
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_ranks(backend, dtype, shape):
    assert_parity(case(*shape, dtype=dtype), backend)


@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48), (0,) * 2 + (768,)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_no_rows(backend, dtype, shape, dropout_p):
    results = assert_parity(case(*shape, dtype=dtype, dropout_p=dropout_p, seed=seed_tensor()), backend)
    assert results["dweight"].shape == results["dx_bias"].shape == (shape[-1],)
    assert not any(results[name].any() for name in ("dweight", "dbias", "dx_bias"))


@pytest.mark.parametrize("shift", [3.0, 1e3])
@pytest.mark.parametrize("width", [17, 768, 1000, 1025])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_data_far_from_zero(backend, dtype, width, shift):
    assert_parity(case(6, width, dtype=dtype, residual=False, x_bias=False, shift=shift, scale=shift / 3), backend)
    if dtype.itemsize > 2:
        assert_parity(case(6, width, dtype=dtype, residual=False, x_bias=False, shift=shift), backend)


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-3])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_eps_is_used(backend, dtype, eps):
    results = assert_parity(case(4, 64, dtype=dtype, residual=False, x_bias=False, scale=1e-3, eps=eps), backend)
    if eps == 1e-3:
        assert results["out"].float().sub(case(4, 64, dtype=dtype).inputs["bias"].float()).abs().max() < 0.5


@pytest.mark.parametrize("width", [768, 1000, 41])
@pytest.mark.parametrize("constant", [0.0, 0.5, 0.1, 5.1, 100.1])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_constant_rows_give_the_bias_and_no_gradient(backend, dtype, constant, width):
    """Their sum is rounded, and with eps = 1e-12 so is 1e6 times what that makes of the mean. Stock's gradient is exact
    at some widths only."""
    width = 768 if backend == "torch" else width
    x = torch.full((3, width), constant, dtype=dtype, requires_grad=True)
    weight, bias = torch.ones(width, dtype=dtype), torch.full((width,), 0.25, dtype=dtype)
    out = ops.add_layer_norm(x, None, weight, bias, 1e-12, backend=backend)
    out.backward(torch.full_like(out, 0.25))
    assert torch.equal(out, torch.full_like(out, 0.25))
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize(("backend", "dtype"), [pair for pair in SERVED if pair[1] != torch.float32])
def test_rows_that_are_constant_but_for_rounding(backend, dtype):
    """0.1 + 0.2 rounds when it is stored, and rstd = 1e6 would make that a gradient of millions."""
    x, residual = (torch.full((3, 48), value, dtype=dtype, requires_grad=True) for value in (0.1, 0.2))
    weight, bias = torch.ones(48, dtype=dtype), torch.full((48,), 0.25, dtype=dtype)
    out = ops.add_layer_norm(x, residual, weight, bias, 1e-12, backend=backend)
    out.backward(torch.full_like(out, 0.25))
    assert torch.equal(out, torch.full_like(out, 0.25))
    assert torch.equal(x.grad, torch.zeros_like(x)) and torch.equal(residual.grad, torch.zeros_like(x))


@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_the_output_is_the_norm_of_the_sum_that_is_returned(backend, dtype):
    whole = case(5, 48, dtype=dtype, return_sum=True)
    with torch.no_grad():
        results = whole.ours(whole.inputs, backend)
        norm = {name: whole.inputs[name] for name in ("weight", "bias")}
        assert torch.equal(results["out"], ops.add_layer_norm(results["sum"], None, **norm, backend=backend))


@pytest.mark.parametrize(("backend", "dtype"), [pair for pair in SERVED if pair[1] == torch.float16])
def test_squares_beyond_the_range_of_fp16(backend, dtype):
    assert_parity(case(9, 1024, dtype=dtype, scale=300.0, x_bias=False), backend)


GRADS = {**LAYOUTS, "expanded": poison.expanded}
del GRADS["misaligned"]


@pytest.mark.parametrize("grad_layout", GRADS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_layouts(backend, dtype, layout, grad_layout):
    def cotangents(outputs):
        return {name: GRADS[grad_layout](t) for name, t in random_cotangents(outputs).items()}

    strided = case(5, 6, 33, dtype=dtype, layout=LAYOUTS[layout], return_sum=True)
    assert_parity(strided, backend, cotangents=cotangents)


@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_expanded_inputs(backend, dtype):
    one = random(1, 33, dtype=dtype, seed=0)
    scalar = random(1, dtype=dtype, seed=1)
    inputs = {
        "x": one.detach().expand(5, 33).requires_grad_(),
        "residual": random(5, 1, dtype=dtype, seed=2, grad=False).expand(5, 33).requires_grad_(),
        "weight": scalar.detach().expand(33).requires_grad_(),
        "bias": scalar.detach().expand(33).requires_grad_(),
        "x_bias": scalar.detach().expand(33).requires_grad_(),
    }
    assert_parity(AddLayerNorm(inputs, {"return_sum": True}), backend)


MIXES = [
    ("bfloat16", "float32", "float32", "float32"),
    ("float16", "float32", "float32", "float32"),
    ("bfloat16", None, "float32", "float32"),
    ("float16", None, "float32", "float32"),
    ("float32", "bfloat16", "bfloat16", "float32"),
    ("bfloat16", "bfloat16", "float32", "float32"),
    ("float16", "float16", "float32", "float16"),
    ("float32", None, "float16", "bfloat16"),
    ("bfloat16", "float16", "float32", "bfloat16"),
]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(map(str, mix)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_dtypes(backend, mix, dropout_p):
    x, residual, weight, x_bias = (None if name is None else getattr(torch, name) for name in mix)
    inputs = {
        "x": random(6, 33, dtype=x, seed=1),
        "residual": None if residual is None else random(6, 33, dtype=residual, seed=2),
        "weight": random(33, dtype=weight, seed=3),
        "bias": random(33, dtype=weight, seed=4),
        "x_bias": random(33, dtype=x_bias, seed=5),
    }
    mixed = AddLayerNorm(inputs, {"return_sum": True, "dropout_p": dropout_p, "seed": seed_tensor()})
    results = assert_parity(mixed, backend)
    assert results["out"].dtype == results["sum"].dtype == (x if residual is None else torch.promote_types(x, residual))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_under_autocast_the_dtype_is_that_of_stock(backend, dtype):
    x, weight, bias = (random(*s, dtype=torch.float32, seed=0) for s in ((3, 8), (8,), (8,)))
    with torch.autocast("cpu", dtype):
        for value in (x, x.to(dtype)):
            stock = F.layer_norm(value, (8,), weight.to(value.dtype), bias.to(value.dtype))
            ours = ops.add_layer_norm(value, None, weight, bias, backend=backend)
            assert ours.dtype == stock.dtype
            ours.sum().backward()
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("requires", [("x",), ("residual",), ("weight",), ("bias",), ("x_bias",), ("x", "bias")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_some_inputs_only(backend, requires):
    full = case(6, 33, dtype=torch.float32, return_sum=True)
    inputs = {name: t.detach().requires_grad_(name in requires) for name, t in full.inputs.items()}
    results = assert_parity(AddLayerNorm(inputs, full.settings), backend)
    assert {f"d{name}" for name in requires} == {name for name in results if name.startswith("d")}


@pytest.mark.parametrize("used", ["out", "sum"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_of_one_output_only(backend, used):
    whole = case(6, 33, dtype=torch.float32, return_sum=True)
    assert_parity(whole, backend, cotangents=lambda outputs: random_cotangents({used: outputs[used]}))


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_dropout_replays_the_mask_of_the_seed(backend, dtype, dropout_p, residual):
    settings = {"dropout_p": dropout_p, "seed": seed_tensor(-7), "return_sum": True, "eps": 1e-5}
    assert_parity(case(13, 37, dtype=dtype, residual=residual, **settings), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_drops_what_the_mask_says(backend):
    x = torch.ones(17, 1000)
    keep = ops.dropout_mask(seed_tensor(), (17, 1000), 0.3)
    zero = torch.zeros_like(x)
    weight = torch.ones(1000)
    settings = {"dropout_p": 0.3, "return_sum": True, "_seed": seed_tensor(), "backend": backend}
    total = ops.add_layer_norm(x, zero, weight, weight, **settings)[1]
    assert torch.equal(total != 0, keep)
    torch.testing.assert_close(total[keep], torch.full_like(total[keep], 1 / 0.7))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropped_values_are_zero_whatever_they_were(backend):
    x = torch.full((2, 8), float("nan"))
    ones = torch.ones(8)
    settings = {"dropout_p": 1.0, "_seed": seed_tensor(), "return_sum": True, "backend": backend}
    out, total = ops.add_layer_norm(x, x.new_zeros(2, 8), ones, ones, **settings)
    assert torch.equal(total, torch.zeros(2, 8)) and torch.equal(out, torch.ones(2, 8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_follows_manual_seed(backend):
    x, ones = random(20, 64, dtype=torch.float32, seed=0, grad=False), torch.ones(64)

    def once():
        return ops.add_layer_norm(x, x, ones, ones, dropout_p=0.5, backend=backend)

    torch.manual_seed(3)
    first, second = once(), once()
    torch.manual_seed(3)
    elsewhere = x.clone()
    assert torch.equal(first, ops.add_layer_norm(elsewhere, elsewhere, ones, ones, dropout_p=0.5, backend=backend))
    assert torch.equal(second, once()) and not torch.equal(first, second)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_dropout_leaves_the_generator_alone_and_equals_eval(backend):
    x, ones = random(4, 8, dtype=torch.float32, seed=0, grad=False), torch.ones(8)
    state = torch.get_rng_state()
    plain = ops.add_layer_norm(x, x, ones, ones, backend=backend)
    assert torch.equal(plain, ops.add_layer_norm(x, x, ones, ones, dropout_p=0.0, backend=backend))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpointing_redraws_the_same_mask(backend, reentrant):
    from torch.utils.checkpoint import checkpoint

    ones = torch.ones(64)
    grads = []
    for checkpointed in (False, True):
        x = random(20, 64, dtype=torch.float32, seed=0)
        torch.manual_seed(3)

        def layer(x):
            return ops.add_layer_norm(x, None, ones, ones, dropout_p=0.3, backend=backend)

        out = checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
        out.backward(random_cotangents({"out": out})["out"])
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_over_many_rows(backend):
    """A running sum in bf16 stalls at 0.5 where 65.5 is right."""
    width = 16 if backend in ("triton", "cuda") else 768  # interpreted or emulated, a program takes milliseconds
    x = random(65536, width, dtype=torch.bfloat16, seed=0)
    weight, bias, x_bias = (torch.ones(width, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = ops.add_layer_norm(x, None, weight, bias, backend=backend, x_bias=x_bias)
    out.backward(torch.full((), 1e-3, dtype=torch.bfloat16).expand_as(out))
    assert (bias.grad.float() / (65536 * float(torch.tensor(1e-3).bfloat16())) - 1).abs().max() < 0.01


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"torch"}))
def test_gradients_are_bitwise_the_same_each_time_and_with_any_number_of_threads(backend):
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 1, 2, 3):
            torch.set_num_threads(count)
            rows = 515 if backend == "triton" else 4099
            big = case(rows, 130, dtype=torch.float32, return_sum=True, dropout_p=0.1, seed=seed_tensor())
            leaves = {name: t.detach().requires_grad_() for name, t in big.inputs.items()}
            outputs = big.ours(leaves, backend)
            upstream = random_cotangents(outputs)
            torch.autograd.backward([outputs[n] for n in upstream], list(upstream.values()))
            found.append([*outputs.values(), *(t.grad for t in leaves.values())])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_stay_in_fp32(backend):
    """What backward needs is saved at most once per value, and nothing of the size of a row in half precision."""
    x = random(4, 64, dtype=torch.float16, seed=0)
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ops.add_layer_norm(x, None, torch.ones(64).half(), torch.ones(64).half(), backend=backend)
    statistics = [t for t in saved if t.numel() == 4]
    assert len(statistics) == 2 and all(t.dtype == torch.float32 for t in statistics)


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"torch"}))
def test_a_plain_layer_norm_keeps_its_input_and_no_copy(backend):
    whole = case(5, 64, dtype=torch.float32, residual=False, x_bias=False)
    statistics = 2 * 5 * 4
    assert saved_bytes(whole.inputs, lambda: whole.ours(whole.inputs, backend)["out"]) == statistics
    summed = case(5, 64, dtype=torch.float32)
    kept = saved_bytes(summed.inputs, lambda: summed.ours(summed.inputs, backend)["out"])
    assert kept == statistics + 5 * 64 * 4


def test_the_torch_backend_is_twice_differentiable():
    x, residual, weight, bias = (
        random(*s, dtype=torch.float64, seed=i) for i, s in enumerate(((3, 5), (3, 5), (5,), (5,)))
    )
    assert torch.autograd.gradgradcheck(
        lambda *args: ops.add_layer_norm(*args, 1e-5, backend="torch"), (x, residual, weight, bias)
    )


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"torch"}))
def test_fused_backends_say_that_they_are_differentiable_once(backend):
    x, ones = random(3, 8, dtype=torch.float32, seed=0), torch.ones(8)
    out = ops.add_layer_norm(x, None, ones, ones, backend=backend)
    grad = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.square().sum().backward()


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"torch"}))
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("name", ["x", "residual", "weight", "bias", "x_bias"])
def test_no_second_derivative_of_a_fused_backend_is_left_out(name, dropout_p, backend):
    """Also where other paths lead to the leaf, and autograd would take what they give for the whole."""
    inputs = case(3, 8, dtype=torch.float32, x_bias=True).inputs
    leaf = torch.ones((), requires_grad=True)
    arguments = {key: t.detach() * leaf if key == name else t.detach() for key, t in inputs.items()}
    out, total = ops.add_layer_norm(**arguments, dropout_p=dropout_p, return_sum=True, backend=backend)
    grad = torch.autograd.grad(out.square().sum() + total.square().sum(), leaf, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(grad * leaf, leaf)


def _arguments(**changes):
    arguments = {"x": torch.ones(2, 8), "residual": torch.ones(2, 8), "weight": torch.ones(8), "bias": torch.ones(8)}
    return {**arguments, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"residual": torch.ones(3, 8)}, ValueError, r"residual must have shape \(2, 8\), got \(3, 8\)"),
        ({"residual": torch.ones(8)}, ValueError, r"residual must have shape \(2, 8\)"),
        ({"weight": torch.ones(7)}, ValueError, r"weight must have shape \(8,\), got \(7,\)"),
        ({"bias": torch.ones(1, 8)}, ValueError, r"bias must have shape \(8,\), got \(1, 8\)"),
        ({"x_bias": torch.ones(9)}, ValueError, r"x_bias must have shape \(8,\)"),
        ({"x": torch.ones(2, 8, dtype=torch.int64)}, TypeError, "x must be a floating point tensor"),
        ({"x": torch.ones(())}, ValueError, "x must have at least 1"),
        ({"weight": torch.ones(8, device="meta")}, ValueError, "weight is on meta, expected cpu"),
        ({"x": None}, TypeError, "x must be a tensor, got NoneType"),
        ({"weight": None}, TypeError, "weight must be a tensor, got NoneType"),
        ({"bias": 0.0}, TypeError, "bias must be a tensor, got float"),
        ({"residual": 1.0}, TypeError, "residual must be a floating point tensor, got float"),
        ({"x_bias": [0.0] * 8}, TypeError, "x_bias must be a floating point tensor, got list"),
        ({"eps": -1e-5}, ValueError, "eps must be 0 or more, got -1e-05"),
        ({"eps": float("nan")}, ValueError, "eps must be 0 or more"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p must be between 0 and 1, got -0.1"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, got 1.5"),
        ({"dropout_p": float("nan")}, ValueError, "dropout_p must be between 0 and 1"),
        ({"weight": torch.ones(8, dtype=torch.float64), "backend": "cuda"}, BackendError, "cuda: dtype float64"),
        ({"backend": "tpu"}, ValueError, "backend must be 'auto' or any of"),
    ],
)
def test_wrong_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        ops.add_layer_norm(**_arguments(**changes))


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) & {"cpu"}))
def test_poison_reaches_what_kernels_allocate(backend):
    """Rows of width 0 have no statistics: the one result of the kernel that nobody writes."""
    empty = torch.empty(3, 0)
    none = torch.empty(0)
    mean = torch.ops.bertfast.add_layer_norm_fwd_cpu(empty, None, none, none, None, None, 1e-5, 0.0, True)[2]
    assert mean.shape == (3,) and mean.isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_every_combination(backend, dtype):
    # Interpreted, a case takes a second, and programs of many rows or columns take no other way than these.
    rows, widths = ((7, 63), (3, 127, 768)) if backend == "triton" else (ROWS, WIDTHS)
    sizes = itertools.product(rows, widths, (0.0, 0.3), (True, False), (poison.contiguous, poison.every_other))
    for m, n, dropout_p, residual, layout in sizes:
        settings = {"dropout_p": dropout_p, "seed": seed_tensor(), "eps": 1e-5, "return_sum": True}
        assert_parity(case(m, n, dtype=dtype, residual=residual, layout=layout, shift=3.0, **settings), backend)
