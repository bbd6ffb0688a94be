"""embed_layer_norm on every backend: gathers, padding rows, optional ids, dropout, errors."""

import importlib
import types

import pytest
import torch
import torch.nn.functional as F

from bertfast import BackendError, ops
from bertfast.ops._checks import values_are_checked
from helpers import poison
from helpers.op_cases import ALL_DTYPES, EmbedLayerNorm, backends_for, random, seed_tensor
from helpers.poison import LAYOUTS, poisoned_memory  # noqa: F401
from helpers.tolerance import assert_parity, random_cotangents

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SERVED = backends_for("embed_layer_norm")
EVERY = backends_for("embed_layer_norm", ALL_DTYPES)
BACKENDS = sorted({backend for backend, _ in SERVED})


def ids(*shape, high, dtype=torch.int64, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(*shape, width, dtype, layout=poison.contiguous, without=(), positions=False, index=torch.int64, **settings):
    def numbers(seed, *size, **options):
        return layout(random(*size, dtype=dtype, seed=seed, **options))

    inputs = {
        "input_ids": ids(*shape, high=30, dtype=index),
        "token_type_ids": ids(*shape, high=2, dtype=index, seed=1),
        "position_ids": ids(*shape, high=40, dtype=index, seed=2) if positions else None,
        "word": numbers(1, 30, width),
        "position": numbers(2, 40, width),
        "token_type": numbers(3, 2, width),
        "weight": numbers(4, width, shift=1.0),
        "bias": numbers(5, width),
        "inputs_embeds": None,
    }
    if "ids" in without:
        inputs |= {"input_ids": None, "inputs_embeds": numbers(6, *shape, width)}
    if "types" in without:
        inputs |= {"token_type_ids": None, "token_type": None}
    if "type_ids" in without:
        inputs |= {"token_type_ids": None}
    return EmbedLayerNorm(inputs, settings)


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("without", [(), ("types",), ("type_ids",), ("ids",), ("ids", "types")], ids=str)
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_parity(backend, dtype, without, positions, index):
    assert_parity(case(2, 9, width=48, dtype=dtype, without=without, positions=positions, index=index), backend)


@pytest.mark.parametrize("width", [3, 17, 384, 768, 1000, 1025])
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (7,), (2, 2, 5)])
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_shapes(backend, dtype, shape, width):
    if backend == "triton" and width > 17:
        shape = tuple(min(size, 5) for size in shape)  # interpreted, a program is a row or a few
    assert_parity(case(*shape, width=width, dtype=dtype, eps=1e-5), backend)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
@pytest.mark.parametrize("without", [(), ("ids",)])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_no_tokens(backend, dtype, shape, without):
    results = assert_parity(case(*shape, width=48, dtype=dtype, without=without), backend)
    assert results["out"].shape == (*shape, 48) and not results["dweight"].any()


@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_padding_rows_get_no_gradient(backend, dtype):
    whole = case(3, 9, width=24, dtype=dtype, positions=True, padding_idx=4, position_padding_idx=1)
    whole.inputs["input_ids"][0, :3] = 4
    whole.inputs["position_ids"][1, :3] = 1
    results = assert_parity(whole, backend)
    assert not results["dword"][4].any() and not results["dposition"][1].any()
    assert results["dword"].any() and results["dposition"].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_that_broadcast(backend):
    whole = case(3, 9, width=24, dtype=torch.float32)
    types, positions = ids(9, high=2, seed=1), ids(1, 9, high=40, seed=2)
    assert_parity(EmbedLayerNorm({**whole.inputs, "token_type_ids": types, "position_ids": positions}), backend)


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_of_any_strides(backend, index):
    """Broadcast over a dimension in the middle, every other one of a longer tensor, and stored by columns."""
    whole = case(2, 3, 5, width=24, dtype=torch.float32, index=index)
    changed = {
        "input_ids": poison.every_other(whole.inputs["input_ids"]),
        "token_type_ids": poison.transposed(ids(2, 3, 5, high=2, dtype=index, seed=1)),
        "position_ids": ids(2, 1, 5, high=40, dtype=index, seed=2),
    }
    assert_parity(EmbedLayerNorm({**whole.inputs, **changed}), backend)


@pytest.mark.parametrize("layout", [poison.every_other, poison.transposed])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_of_any_strides_without_a_copy(backend, layout):
    """Of two dimensions, which kernels take as they lie."""
    whole = case(3, 5, width=24, dtype=torch.float32, positions=True)
    changed = {name: layout(whole.inputs[name]) for name in ("input_ids", "token_type_ids", "position_ids")}
    assert_parity(EmbedLayerNorm({**whole.inputs, **changed}), backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize(("backend", "dtype"), SERVED)
def test_layouts(backend, dtype, layout, grad_layout):
    strided = case(3, 5, width=24, dtype=dtype, layout=LAYOUTS[layout])
    assert_parity(strided, backend, cotangents=lambda out: {"out": LAYOUTS[grad_layout](random_cotangents(out)["out"])})


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_normalises_the_sum_as_stored(backend):
    """257, 258 and 261 are 256, 258 and 260 in bfloat16: backward reads those, so forward has to."""
    word, position = torch.full((1, 24), 256.0).bfloat16(), torch.zeros(1, 24).bfloat16()
    types = torch.tensor([[1.0, 2.0, 5.0] * 8]).bfloat16()
    one, zero = torch.ones(24).bfloat16(), torch.zeros(24).bfloat16()
    out = ops.embed_layer_norm(torch.zeros(1, 1).long(), None, None, word, position, types, one, zero, backend=backend)
    expected = F.layer_norm(torch.tensor([256.0, 258.0, 260.0] * 8), (24,))
    torch.testing.assert_close(out[0, 0].float(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize(("backend", "dtype"), EVERY)
def test_dropout_replays_the_mask_of_the_seed(backend, dtype, dropout_p):
    settings = {"dropout_p": dropout_p, "seed": seed_tensor(), "eps": 1e-5}
    assert_parity(case(3, 7, width=37, dtype=dtype, **settings), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_falls_behind_the_norm(backend):
    whole = case(3, 7, width=37, dtype=torch.float32, dropout_p=0.4, seed=seed_tensor())
    with torch.no_grad():
        out = whole.ours(whole.inputs, backend)["out"]
    assert torch.equal(out != 0, ops.dropout_mask(seed_tensor(), (3, 7, 37), 0.4, "embed_layer_norm"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_follows_manual_seed(backend):
    whole = case(3, 7, width=37, dtype=torch.float32, dropout_p=0.5)
    torch.manual_seed(1)
    first, second = (whole.ours(whole.inputs, backend)["out"] for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, whole.ours(whole.inputs, backend)["out"]) and not torch.equal(first, second)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("row", "padding_idx"), [(0, -9), (8, -1), (8, 8)])
def test_padding_rows_may_be_counted_from_the_end(row, padding_idx, backend):
    word = random(9, 4, dtype=torch.float32, seed=0)
    indices = torch.tensor([[row, 3, row]])
    arguments = _arguments(word=word, input_ids=indices, token_type_ids=None, padding_idx=padding_idx, backend=backend)
    ops.embed_layer_norm(**arguments).backward(random(1, 3, 4, dtype=torch.float32, seed=1, grad=False))
    assert not word.grad[row].any() and word.grad[3].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_of_several_dtypes(backend):
    whole = case(3, 7, width=16, dtype=torch.bfloat16)
    wide = {name: whole.inputs[name].detach().float().requires_grad_() for name in ("position", "weight", "bias")}
    results = assert_parity(EmbedLayerNorm({**whole.inputs, **wide}), backend)
    assert results["out"].dtype == torch.float32 and results["dword"].dtype == torch.bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("learned", ["word", "position", "token_type", "weight", "bias"])
def test_only_what_is_learned_gets_a_gradient(learned, backend):
    whole = case(3, 7, width=24, dtype=torch.float32, positions=True)
    frozen = {name: None if t is None else t.detach() for name, t in whole.inputs.items()}
    assert_parity(EmbedLayerNorm({**frozen, learned: whole.inputs[learned]}), backend)


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"torch"}))
@pytest.mark.parametrize("name", ["word", "position", "token_type", "weight", "bias"])
def test_no_second_derivative_of_a_fused_backend_is_left_out(name, backend):
    inputs = case(2, 3, width=8, dtype=torch.float32).inputs
    leaf = torch.ones((), requires_grad=True)
    arguments = {key: None if t is None else t.detach() for key, t in inputs.items()}
    out = ops.embed_layer_norm(**{**arguments, name: arguments[name] * leaf}, backend=backend)
    grad = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(grad * leaf, leaf)


def test_half_precision_tables_where_layer_norm_returns_float32(monkeypatch):
    """As under CUDA's autocast: nothing is rounded on the way."""
    half = case(2, 5, width=24, dtype=torch.bfloat16).inputs
    wide = {name: t if t is None or not t.is_floating_point() else t.detach().float() for name, t in half.items()}
    expected = ops.embed_layer_norm(**wide, backend="triton")
    monkeypatch.setattr(
        importlib.import_module("bertfast.ops.embed_layer_norm"), "normalises_in_float32", lambda tensor: True
    )
    out = ops.embed_layer_norm(**half, backend="triton")
    assert torch.equal(out, expected)
    out.backward(torch.ones_like(out))
    assert half["word"].grad.dtype == torch.bfloat16


def _arguments(**changes):
    tables = {"word": torch.ones(9, 4), "position": torch.ones(6, 4), "token_type": torch.ones(2, 4)}
    indices = {"input_ids": ids(2, 5, high=9), "token_type_ids": ids(2, 5, high=2), "position_ids": None}
    return {**indices, **tables, "weight": torch.ones(4), "bias": torch.ones(4), **changes}


def _one(value):
    return torch.tensor([[value] * 5] * 2)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input_ids": _one(9)}, IndexError, "input_ids has the value 9, expected 0 <= value < 9"),
        ({"input_ids": _one(-1)}, IndexError, "input_ids has the value -1"),
        ({"token_type_ids": _one(2)}, IndexError, "token_type_ids has the value 2, expected 0 <= value < 2"),
        ({"token_type_ids": _one(-7)}, IndexError, "token_type_ids has the value -7"),
        ({"position_ids": _one(6)}, IndexError, "position_ids has the value 6, expected 0 <= value < 6"),
        (
            {"input_ids": ids(2, 7, high=9), "token_type_ids": None},
            IndexError,
            "7 tokens, but position has only 6 rows",
        ),
        ({"input_ids": None}, ValueError, "exactly one of input_ids and inputs_embeds"),
        ({"inputs_embeds": torch.ones(2, 5, 4)}, ValueError, "exactly one of input_ids and inputs_embeds"),
        (
            {"input_ids": None, "inputs_embeds": torch.ones(2, 5, 3)},
            ValueError,
            r"inputs_embeds must have shape \(..., S, 4\)",
        ),
        ({"input_ids": _one(1.0)}, TypeError, "input_ids must be int32 or int64, got torch.float32"),
        ({"input_ids": _one(1).short()}, TypeError, "input_ids must be int32 or int64, got torch.int16"),
        ({"position": torch.ones(6, 3)}, ValueError, r"position must have shape \(rows, 4\), got \(6, 3\)"),
        ({"padding_idx": 9}, ValueError, "padding_idx must be a row of a table of 9, got 9"),
        ({"position_padding_idx": -7}, ValueError, "position_padding_idx must be a row of a table of 6, got -7"),
        ({"weight": torch.ones(5)}, ValueError, r"weight must have shape \(4,\), got \(5,\)"),
        ({"token_type": None}, ValueError, "token_type_ids were given, but there is no token_type table"),
        ({"token_type_ids": ids(2, 4, high=2)}, ValueError, r"token_type_ids must broadcast to \(2, 5\), got \(2, 4\)"),
        (
            {"position_ids": ids(3, 2, 5, high=2)},
            ValueError,
            r"position_ids must broadcast to \(2, 5\), got \(3, 2, 5\)",
        ),
        ({"word": torch.ones(9, 4, device="meta")}, ValueError, "meta"),
        ({"dropout_p": 7.0}, ValueError, "dropout_p must be between 0 and 1"),
        ({"eps": -1.0}, ValueError, "eps must be 0 or more, got -1.0"),
        ({"eps": float("nan")}, ValueError, "eps must be 0 or more"),
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids must be a tensor, got list"),
        ({"token_type": torch.ones(0, 4), "token_type_ids": None}, ValueError, "token_type has no row 0"),
        ({"weight": torch.ones(4).double(), "backend": "cuda"}, BackendError, "cuda: dtype float64"),
    ],
)
def test_wrong_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        ops.embed_layer_norm(**_arguments(**changes))


def look_at_no_values(monkeypatch):
    for module in ("_checks", "embed_layer_norm"):
        name = f"bertfast.ops.{module}"
        monkeypatch.setattr(importlib.import_module(name), "values_are_checked", lambda tensor: False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("argument", ["input_ids", "token_type_ids", "position_ids"])
@pytest.mark.parametrize("value", [-1, 9])
def test_where_values_are_not_looked_at_a_wrong_id_makes_its_row_nan(argument, value, backend, monkeypatch):
    """As on a GPU: the table is not read outside, and no other row changes."""
    good = _arguments(position_ids=ids(2, 5, high=6, seed=3), backend=backend)
    expected = ops.embed_layer_norm(**good)
    look_at_no_values(monkeypatch)
    wrong = good[argument].clone()
    wrong[1, 3] = value
    out = ops.embed_layer_norm(**{**good, argument: wrong})
    assert out[1, 3].isnan().all()
    out[1, 3] = expected[1, 3]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("argument", "table"), [("input_ids", "word"), ("token_type_ids", "token_type"), ("position_ids", "position")]
)
@pytest.mark.parametrize("value", [-1, 9, 10, 2**31 - 1])
def test_a_wrong_id_adds_to_no_row(argument, table, value, backend, monkeypatch):
    arguments = _arguments(position_ids=ids(2, 5, high=6, seed=3), backend=backend)
    leaf = arguments[table] = random(*arguments[table].shape, dtype=torch.float32, seed=7)
    upstream = random(2, 5, 4, dtype=torch.float32, seed=8, grad=False)
    upstream[1, 3] = 0.0
    expected = torch.autograd.grad(ops.embed_layer_norm(**arguments), leaf, upstream)[0]
    look_at_no_values(monkeypatch)
    wrong = arguments[argument].clone()
    wrong[1, 3] = value
    grad = torch.autograd.grad(ops.embed_layer_norm(**{**arguments, argument: wrong}), leaf, upstream)[0]
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize(
    ("device", "switch", "checked"),
    [("cpu", None, True), ("cpu", "0", True), ("cuda", None, False), ("cuda", "0", False), ("cuda", "1", True)],
)
def test_the_validation_switch(device, switch, checked, monkeypatch):
    monkeypatch.delenv("BERTFAST_VALIDATE", raising=False)
    if switch is not None:
        monkeypatch.setenv("BERTFAST_VALIDATE", switch)
    tensor = types.SimpleNamespace(device=torch.device(device), is_meta=False)
    assert values_are_checked(tensor) is checked
