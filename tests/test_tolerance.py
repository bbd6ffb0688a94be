"""The tolerance helper itself: what it must refuse and what it must accept."""

import copy

import pytest
import torch
import torch.nn.functional as F

from bertfast.backends import OPS
from helpers import poison, tolerance
from helpers.op_cases import (
    DTYPES,
    AddLayerNorm,
    Attention,
    EmbedLayerNorm,
    FeedForward,
    LinearGelu,
    QkvProjection,
    VarlenAttention,
    random,
)
from helpers.tolerance import (
    Order,
    assert_models_within,
    assert_parity,
    assert_within,
    random_cotangents,
    run,
    to_double,
)


def _case(op, dtype, seed=0):
    def numbers(*shape, **options):
        numbers.count += 1
        return random(*shape, dtype=dtype, seed=1000 * seed + numbers.count, **options)

    numbers.count = 0
    if op == "attention":
        q, k, v = numbers(2, 3, 40, 32), numbers(2, 3, 50, 32), numbers(2, 3, 50, 32)
        return Attention({"query": q, "key": k, "value": v, "attn_mask": None})
    if op == "varlen_attention":
        ends = torch.tensor([0, 7, 7, 40], dtype=torch.int32)
        q, k, v = numbers(40, 2, 32), numbers(40, 2, 32), numbers(40, 2, 32)
        return VarlenAttention({"query": q, "key": k, "value": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends})
    if op == "add_layer_norm":
        x, residual, weight, bias, x_bias = (numbers(*s) for s in ((40, 96), (40, 96), (96,), (96,), (96,)))
        inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias, "x_bias": x_bias}
        return AddLayerNorm(inputs, {"return_sum": True})
    if op == "linear_gelu":
        return LinearGelu({"x": numbers(40, 96), "weight": numbers(130, 96, scale=0.1), "bias": numbers(130)})
    if op == "feed_forward":
        w_in, w_out = numbers(130, 96, scale=0.1), numbers(96, 130, scale=0.1)
        return FeedForward({"x": numbers(40, 96), "w_in": w_in, "b_in": numbers(130), "w_out": w_out, "b_out": None})
    if op == "qkv_projection":
        weights = {f"w{name}": numbers(130, 96, scale=0.1) for name in "qkv"}
        return QkvProjection({"x": numbers(40, 96), **weights, **{f"b{name}": numbers(130) for name in "qkv"}})
    ids = torch.randint(0, 30, (3, 12), generator=torch.Generator().manual_seed(seed))
    tables = {"word": numbers(30, 96), "position": numbers(16, 96), "token_type": numbers(2, 96)}
    norm = {"weight": numbers(96), "bias": numbers(96)}
    inputs = {"input_ids": ids, "token_type_ids": ids % 2, "position_ids": None, "inputs_embeds": None}
    return EmbedLayerNorm({**inputs, **tables, **norm})


class _Replaced:
    """A case whose `ours` is another function: an implementation to judge."""

    def __init__(self, case, implementation):
        self._case, self.ours = case, lambda inputs, backend: implementation(inputs)

    def __getattr__(self, name):
        return getattr(self._case, name)


def judge(case, implementation):
    assert_parity(_Replaced(case, implementation), "torch")


def in_order(case, seed):
    """Stock in an order of summation that the helper does not look at."""
    order = Order(seed)
    if hasattr(case, "_stock"):
        from helpers.op_cases import _eager_attention, _sdpa

        way = _sdpa if seed % 2 else _eager_attention
        return lambda inputs: {"out": case._stock(way, order, inputs)}
    return lambda inputs: case.stock(inputs, order)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_stock_in_any_order_is_accepted(op, dtype):
    for seed in range(4):
        case = _case(op, dtype, seed)
        for order in (3, 4):
            judge(case, in_order(case, order))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_stock_in_any_order_is_accepted_on_many_seeds(op, dtype):
    for seed in range(4, 40):
        case = _case(op, dtype, seed)
        for order in (3, 4, 5):
            judge(case, in_order(case, order))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_five_times_the_error_of_stock_is_refused(op, dtype):
    case = _case(op, dtype)
    outputs = case.stocks()[0](case.inputs)
    upstream = random_cotangents(outputs)
    stocks = [run(stock, case.inputs, upstream) for stock in case.stocks()]
    inputs, wide = to_double(case.inputs), to_double(upstream)
    exact = run(case.exact, inputs, wide)
    noise = case.noise(inputs, wide, exact, stocks[0])
    refused = {}
    for name, value in exact.items():
        results = [stock[name] for stock in stocks]
        assert_within(results[0], results, value, noise[name], name)
        error = torch.stack([result.double() - value for result in results])
        worst = error.abs().amax((0, *range(1, error.dim())))
        typical = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).sign()
        five = (value + 5 * worst * typical).to(results[0].dtype)
        with pytest.raises(AssertionError, match="too far off"):
            assert_within(five, results, value, noise[name], name)
        refused[name] = True
    assert len(refused) == len(exact)


def test_a_dropped_scale_is_refused():
    case = _case("attention", torch.bfloat16)

    def unscaled(inputs):
        return {"out": F.scaled_dot_product_attention(inputs["query"], inputs["key"], inputs["value"], scale=1.0)}

    with pytest.raises(AssertionError, match="too far off"):
        judge(case, unscaled)


def test_a_slightly_wrong_scale_is_refused():
    case = _case("attention", torch.float32)

    def wrong(inputs):
        scale = 1.00001 * 32**-0.5
        return {"out": F.scaled_dot_product_attention(inputs["query"], inputs["key"], inputs["value"], scale=scale)}

    with pytest.raises(AssertionError, match="too far off"):
        judge(case, wrong)


def test_one_missing_row_of_a_weight_gradient_is_refused():
    case = _case("add_layer_norm", torch.bfloat16)

    class Forgets(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return grad.clone().index_fill(0, torch.tensor([17]), 0.0)

    def forgetful(inputs):
        total = inputs["residual"] + (inputs["x"] + inputs["x_bias"])
        normalised = F.layer_norm(total, (96,), eps=1e-12)
        weighted = normalised * Forgets.apply(inputs["weight"].expand(40, 96))
        return {"out": weighted + inputs["bias"], "sum": total}

    with pytest.raises(AssertionError, match="dweight"):
        judge(case, forgetful)


def test_a_wrong_row_is_refused():
    case = _case("linear_gelu", torch.bfloat16)

    def swapped(inputs):
        rows = torch.arange(40)
        rows[[3, 4]] = torch.tensor([4, 3])
        return {"out": F.gelu(F.linear(inputs["x"], inputs["weight"], inputs["bias"])).index_select(0, rows)}

    with pytest.raises(AssertionError, match=r"worst at \([34], "):
        judge(case, swapped)


def test_the_tanh_form_of_gelu_is_refused():
    case = _case("linear_gelu", torch.float32)
    with pytest.raises(AssertionError, match="too far off"):
        judge(case, lambda i: {"out": F.gelu(F.linear(i["x"], i["weight"], i["bias"]), approximate="tanh")})


def test_accumulation_in_half_precision_is_refused():
    case = _case("linear_gelu", torch.bfloat16)

    def sloppy(inputs):
        out = torch.zeros(40, 130, dtype=torch.bfloat16)
        for k in range(96):
            out = out + inputs["x"][:, k, None] * inputs["weight"][None, :, k]
        return {"out": F.gelu(out + inputs["bias"])}

    with pytest.raises(AssertionError, match="too far off"):
        judge(case, sloppy)


def _tensors():
    exact = random(5, 7, dtype=torch.float64, seed=0, grad=False)
    return exact.float(), exact


def test_nan_is_refused():
    ours, exact = _tensors()
    broken = ours.clone()
    broken[2, 3] = float("nan")
    with pytest.raises(AssertionError, match=r"not finite .* first at \(2, 3\)"):
        assert_within(broken, [ours], exact, 0.0, "x")
    broken[2, 3] = float("inf")
    with pytest.raises(AssertionError, match="not finite"):
        assert_within(broken, [ours], exact, 0.0, "x")


def test_nan_of_stock_allows_nothing():
    ours, exact = _tensors()
    poor = ours.clone()
    poor[0, 0] = float("nan")
    with pytest.raises(AssertionError, match="too far off"):
        assert_within(ours + 1.0, [poor, ours], exact, 0.0, "x")
    with pytest.raises(AssertionError, match="no stock variant is finite"):
        assert_within(ours, [poor], exact, 0.0, "x")


def test_infinity_must_be_where_exact_has_it():
    ours, exact = _tensors()
    exact[1, 1] = -float("inf")
    with pytest.raises(AssertionError, match="differs from the exact result where that is not finite"):
        assert_within(ours, [ours], exact, 0.0, "lse")
    ours[1, 1] = -float("inf")
    assert_within(ours, [ours], exact, 0.0, "lse")


def test_another_dtype_or_shape_is_refused():
    ours, exact = _tensors()
    with pytest.raises(AssertionError, match="dtype is torch.bfloat16, stock gives torch.float32"):
        assert_within(ours.bfloat16(), [ours], exact, 1.0, "x")
    with pytest.raises(AssertionError, match=r"shape is \(7, 5\), expected \(5, 7\)"):
        assert_within(ours.mT, [ours], exact, 1.0, "x")
    with pytest.raises(AssertionError, match="must be float64"):
        assert_within(ours, [ours], exact.float(), 1.0, "x")


def test_the_message_tells_what_and_where():
    ours, exact = _tensors()
    wrong = ours.clone()
    wrong[4, 6] += 0.5
    message = r"dx \(torch.float32, shape \(5, 7\)\): 1 elements are too far off; worst at \(4, 6\): got .*, exact .*, "
    with pytest.raises(AssertionError, match=message + r"error 0\.5, allowed"):
        assert_within(wrong, [ours], exact, 0.0, "dx")


def test_writing_to_an_input_and_aliasing_one_are_refused():
    case = _case("add_layer_norm", torch.float32)
    with pytest.raises(AssertionError, match="sum aliases x"):
        judge(case, lambda i: {"out": F.layer_norm(i["x"], (96,)), "sum": i["x"]})

    def writes(inputs):
        inputs["residual"].detach().zero_()
        return case.stock(inputs, Order(0))

    with pytest.raises(AssertionError, match=r"wrote to its input|differs"):
        judge(case, writes)


def test_a_backend_that_declares_less_must_refuse_the_rest(monkeypatch):
    case = _case("linear_gelu", torch.float32)
    monkeypatch.setattr(LinearGelu, "served", lambda self, backend, grad: False)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        assert_parity(case, "torch")


@pytest.fixture(scope="module")
def tiny():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    real = (torch.arange(9) < torch.tensor([[9], [5]])).long()
    return model, {"input_ids": ids, "attention_mask": real}, real


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stock_model_is_accepted(tiny, dtype):
    model, inputs, real = tiny
    ours = copy.deepcopy(model)
    ours.set_attn_implementation("sdpa")
    results = assert_models_within(ours, model, inputs, dtype=dtype, real=real)
    assert {"last_hidden_state", "pooler_output", "gradients.embeddings.word_embeddings.weight"} <= results.keys()
    assert all(parameter.grad is None for parameter in model.parameters())


def _break(name):
    def scale(model):
        model.encoder.layer[1].attention.self.scaling *= 1.001

    def swap_gelu(model):
        model.encoder.layer[0].intermediate.intermediate_act_fn = torch.nn.GELU(approximate="tanh")

    def lose_bias(model):
        model.encoder.layer[0].output.dense.forward = lambda x: F.linear(x, model.encoder.layer[0].output.dense.weight)

    def one_row(model):
        model.embeddings.register_forward_hook(lambda module, args, out: out.index_fill(1, torch.tensor([3]), 0.0))

    def no_key_gradient(model):
        model.encoder.layer[0].attention.self.key.register_forward_hook(lambda module, args, out: out.detach())

    return {f.__name__: f for f in (scale, swap_gelu, lose_bias, one_row, no_key_gradient)}[name]


@pytest.mark.parametrize("fault", ["scale", "swap_gelu", "lose_bias", "one_row", "no_key_gradient"])
def test_a_broken_model_is_refused(tiny, fault):
    model, inputs, real = tiny
    ours = copy.deepcopy(model)
    _break(fault)(ours)
    with pytest.raises(AssertionError, match=r"too far off|results differ"):
        assert_models_within(ours, model, inputs, real=real)


def test_padded_rows_count_only_when_asked(tiny):
    model, inputs, real = tiny
    ours = copy.deepcopy(model)

    def zero_padding(module, args, out):
        out.last_hidden_state = out.last_hidden_state * real.unsqueeze(-1)
        return out

    ours.register_forward_hook(zero_padding)
    assert_models_within(ours, model, inputs, real=real)
    with pytest.raises(AssertionError, match="last_hidden_state"):
        assert_models_within(ours, model, inputs)


def test_orders_undo_themselves():
    x = torch.arange(30.0).view(5, 6)
    for order in (*tolerance.ORDERS, Order(7)):
        assert torch.equal(order.undo(order(x, 0, -1), 0, -1), x)
    assert not torch.equal(Order(2)(x, 0), x)


def test_poison_reaches_fresh_memory_and_is_lifted_again():
    with poison.poisoned():
        for dtype in (*DTYPES, torch.float64):
            assert torch.empty(3, dtype=dtype).isnan().all()
            assert torch.ones(2, dtype=dtype).new_empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("layout", poison.LAYOUTS)
def test_layouts_keep_values_and_surround_them_with_nan(layout):
    x = random(6, 8, dtype=torch.float16, seed=0)
    laid = poison.LAYOUTS[layout](x)
    assert torch.equal(laid, x) and laid.requires_grad
    storage = torch.as_strided(laid.detach(), (laid.untyped_storage().nbytes() // 2,), (1,), 0)
    assert storage.isnan().sum() == storage.numel() - x.numel() > 0
