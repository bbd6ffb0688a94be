"""torch.library.opcheck on every private op of every backend: schema, fake, dynamic shapes; strided, optional and empty
arguments."""

import pytest
import torch
from torch.library import opcheck

from bertfast.backends import BACKENDS
from bertfast.ops import _library
from helpers.op_cases import backends_for, random, seed_tensor
from helpers.poison import LAYOUTS

DTYPES = (torch.float32, torch.bfloat16)


def _operators():
    """Every operator of ours that has a kernel for the CPU."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("bertfast::")]
    found = sorted(name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"))
    return [name for name in found if not name.endswith("_triton") or _library.triton_unavailable() is None]


def _present(op):
    """Operators of `op` by backend: those that have a kernel for the CPU."""
    operators = _operators()
    present = (backend for backend in BACKENDS if f"bertfast::{op}_{backend}" in operators)
    return {backend: getattr(torch.ops.bertfast, f"{op}_{backend}") for backend in present}


def _each(op):
    """Parametrises over the backends that have a kernel of `op` for the CPU; a test without one is skipped."""
    present = _present(op)
    return pytest.mark.parametrize("operator", list(present.values()), ids=list(present))


def _each_dtype(op):
    """`_each` of a forward op, with the dtypes that each backend serves."""
    present = _present(op)
    served = [pair for pair in backends_for(op.removesuffix("_fwd"), DTYPES) if pair[0] in present]
    cases = [(present[backend], dtype) for backend, dtype in served]
    return pytest.mark.parametrize(("operator", "dtype"), cases, ids=[f"{b}-{dtype}" for b, dtype in served])


def _forward_arguments(
    shape, dtype=torch.float32, layout="contiguous", residual=True, x_bias=True, dropout_p=0.0, need_sum=True
):
    def numbers(seed, *size):
        return LAYOUTS[layout](random(*size, dtype=dtype, seed=seed, grad=False))

    width = shape[-1]
    return (
        numbers(1, *shape),
        numbers(2, *shape) if residual else None,
        numbers(3, width),
        numbers(4, width),
        numbers(5, width) if x_bias else None,
        seed_tensor() if dropout_p else None,
        1e-12,
        dropout_p,
        need_sum,
    )


def _backward_arguments(
    shape, dtype=torch.float32, layout="contiguous", residual=True, x_bias=True, dropout_p=0.0, dsum=True
):
    forward = _forward_arguments(shape, dtype, layout, residual, x_bias, dropout_p)
    total = forward[0].contiguous()
    mean, rstd = (random(*shape[:-1], dtype=torch.float32, seed=seed, grad=False).abs() for seed in (6, 7))
    out = total
    dout = LAYOUTS[layout](torch.randn_like(out))
    extra = LAYOUTS[layout](torch.randn_like(out)) if dsum else None
    return dout, extra, total, mean, rstd, forward[2], forward[5], dropout_p, residual, x_bias


CASES = [
    {"shape": (6, 33)},
    {"shape": (6, 33), "dtype": torch.bfloat16},
    {"shape": (2, 3, 17), "residual": False},
    {"shape": (5, 8), "x_bias": False},
    {"shape": (6, 33), "dropout_p": 0.3},
    {"shape": (6, 33), "dropout_p": 0.3, "residual": False, "x_bias": False},
    {"shape": (0, 33)},
    {"shape": (0, 33), "dropout_p": 0.3},
    {"shape": (33,)},
    *({"shape": (4, 5, 33), "layout": layout} for layout in LAYOUTS if layout != "contiguous"),
]


@_each("add_layer_norm_fwd")
@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_add_layer_norm_fwd(operator, arguments):
    for need_sum in (True, False):
        opcheck(operator, _forward_arguments(need_sum=need_sum, **arguments))


@_each("add_layer_norm_bwd")
@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_add_layer_norm_bwd(operator, arguments):
    for dsum in (True, False):
        opcheck(operator, _backward_arguments(dsum=dsum, **arguments))


@_each("add_layer_norm_fwd")
def test_mixed_dtypes(operator):
    x, _, weight, bias, *rest = _forward_arguments((6, 33), torch.bfloat16)
    residual = random(6, 33, dtype=torch.float32, seed=9, grad=False)
    opcheck(operator, (x, residual, weight.float(), bias.half(), *rest))


LINEAR = [((6, 33), "contiguous"), ((2, 3, 8), "transposed"), ((0, 8), "contiguous"), ((6, 512), "contiguous")]


@_each("linear_gelu_fwd")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize(("shape", "layout"), LINEAR)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gelu_fwd(operator, dtype, shape, layout, activation, bias):
    x = LAYOUTS[layout](random(*shape, dtype=dtype, seed=1, grad=False))
    weight = random(7, shape[-1], dtype=dtype, seed=2, grad=False)
    bias = random(7, dtype=dtype, seed=3, grad=False) if bias else None
    opcheck(operator, (x, weight, bias, activation, None, 0.0, False))
    opcheck(operator, (x, weight, bias, activation, seed_tensor(), 0.3, True))


@_each("activation_fwd")
@pytest.mark.parametrize(("shape", "layout"), LINEAR)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_fwd(operator, dtype, shape, layout):
    pre = LAYOUTS[layout](random(*shape, dtype=dtype, seed=1, grad=False))
    for dropout_p in (0.0, 0.3):
        opcheck(operator, (pre, "gelu", seed_tensor() if dropout_p else None, dropout_p))


@_each("linear_gelu_bwd")
@pytest.mark.parametrize(("shape", "layout"), LINEAR)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gelu_bwd(operator, dtype, shape, layout):
    pre, dout = (LAYOUTS[layout](random(*shape, dtype=dtype, seed=seed, grad=False)) for seed in (1, 2))
    for dropout_p, need_out, has_bias in ((0.0, False, True), (0.3, True, True), (0.3, True, False)):
        opcheck(operator, (dout, pre, "gelu", seed_tensor() if dropout_p else None, dropout_p, need_out, has_bias))


def _tables(dtype, layout="contiguous"):
    return [LAYOUTS[layout](random(*size, dtype=dtype, seed=1, grad=False)) for size in ((9, 33), (12, 33), (2, 33))]


EMBEDDINGS = [
    {},
    {"dropout_p": 0.3, "dtype": torch.bfloat16},
    {"embeds": True, "token_type": False},
    {"tokens": (0, 4)},
    {"tokens": (6,), "layout": "padded_rows"},
    {"layout": "every_other"},
]


@_each("embed_layer_norm_fwd")
@pytest.mark.parametrize("arguments", EMBEDDINGS, ids=str)
def test_embed_layer_norm_fwd(operator, arguments):
    for need_sum in (True, False):
        opcheck(operator, _embeddings(need_sum=need_sum, **arguments))


def _embeddings(
    tokens=(2, 5),
    dtype=torch.float32,
    layout="contiguous",
    embeds=False,
    token_type=True,
    dropout_p=0.0,
    out=None,
    need_sum=True,
):
    word, position, types = _tables(dtype, layout)
    ids = torch.arange(torch.Size(tokens).numel()).view(tokens)
    weight, bias = (random(33, dtype=torch.float32, seed=seed, grad=False) for seed in (4, 5))
    return (
        None if embeds else ids % 9,
        ids % 2 if token_type else None,
        ids % 12,
        random(*tokens, 33, dtype=dtype, seed=6, grad=False) if embeds else None,
        word,
        position,
        types if token_type else None,
        weight,
        bias,
        seed_tensor() if dropout_p else None,
        1e-5,
        dropout_p,
        out or dtype,
        need_sum,
    )


@_each("embed_layer_norm_fwd")
def test_embeddings_in_another_dtype(operator):
    opcheck(operator, _embeddings(dtype=torch.bfloat16, out=torch.float32))


@_each("embed_layer_norm_bwd")
@pytest.mark.parametrize("arguments", EMBEDDINGS, ids=str)
def test_embed_layer_norm_bwd(operator, arguments):
    _, _, position_ids, *_, weight, _, seed, _, dropout_p, dtype, _ = _embeddings(**arguments)
    tokens = position_ids.shape
    layout = LAYOUTS[arguments.get("layout", "contiguous")]
    dout = layout(random(*tokens, 33, dtype=dtype, seed=7, grad=False))
    total = random(*tokens, 33, dtype=dtype, seed=8, grad=False)
    mean, rstd = (random(*tokens, dtype=torch.float32, seed=seed, grad=False).abs() for seed in (9, 10))
    opcheck(operator, (dout, total, mean, rstd, weight, seed, dropout_p))


def _projections(dtype, layout="contiguous", bias=True, out_features=7, features=8):
    weights = [LAYOUTS[layout](random(out_features, features, dtype=dtype, seed=s, grad=False)) for s in range(3)]
    biases = [random(out_features, dtype=dtype, seed=s, grad=False) if bias else None for s in range(3, 6)]
    return *weights, *biases


@_each("qkv_projection_fwd")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "layout"), [((6, 8), "contiguous"), ((2, 3, 8), "padded_rows"), ((0, 8), "contiguous")]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_qkv_projection_fwd(operator, dtype, shape, layout, bias):
    x = LAYOUTS[layout](random(*shape, dtype=dtype, seed=9, grad=False))
    opcheck(operator, (x, *_projections(dtype, layout, bias)))


@_each("update_pack")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_update_pack(operator, dtype, bias):
    weights = _projections(dtype, bias=bias)
    bias_pack = torch.cat(weights[3:]) if bias else None
    opcheck(operator, (*weights, torch.zeros(21, 8, dtype=dtype), bias_pack))


def _attention_inputs(dtype, layout, s_q=5, s_k=7, heads=2, width=8):
    query, key, value = (
        LAYOUTS[layout](random(2, heads, length, width, dtype=dtype, seed=seed, grad=False))
        for seed, length in ((1, s_q), (2, s_k), (3, s_k))
    )
    return query, key, value


def _masks(dtype):
    keep = torch.tensor([True, False, True, True, True, False, True])
    return {"none": None, "bool": keep, "float": random(2, 1, 5, 7, dtype=dtype, seed=4, grad=False)}


ATTENTION = [("none", 0.0, "contiguous"), ("bool", 0.3, "transposed"), ("float", 0.3, "contiguous")]


@_each_dtype("attention_fwd")
@pytest.mark.parametrize(("mask", "dropout_p", "layout"), ATTENTION)
def test_attention(operator, dtype, mask, dropout_p, layout):
    inputs, mask = _attention_inputs(dtype, layout), _masks(dtype)[mask]
    seed = seed_tensor() if dropout_p else None
    settings = dropout_p, False, 0.25
    opcheck(operator, (*inputs, mask, seed, *settings))
    out, stats = operator(*inputs, mask, seed, *settings)
    suffix = operator.__name__.removeprefix("attention_fwd")
    backward = getattr(torch.ops.bertfast, f"attention_bwd{suffix}")
    dout = LAYOUTS[layout](torch.randn_like(out))
    opcheck(backward, (dout, *inputs, mask, seed, out, stats, *settings))
    if mask is not None and mask.dtype != torch.bool:
        delta = backward(dout, *inputs, mask, seed, out, stats, *settings)[-1]
        gradient = getattr(torch.ops.bertfast, f"attention_mask_bwd{suffix}")
        opcheck(gradient, (dout, *inputs, mask, seed, stats, delta, *settings))


@_each_dtype("attention_fwd")
def test_attention_of_nothing(operator, dtype):
    inputs = _attention_inputs(dtype, "contiguous", s_q=0)
    opcheck(operator, (*inputs, None, None, 0.0, False, 0.25))


@_each_dtype("varlen_attention_fwd")
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_varlen_attention(operator, dtype, dropout_p):
    inputs = random(9, 3, 2, 8, dtype=dtype, seed=1, grad=False).unbind(1)
    ends = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    seed = seed_tensor() if dropout_p else None
    settings = dropout_p, True, 0.25
    opcheck(operator, (*inputs, ends, ends, seed, *settings))
    out, stats = operator(*inputs, ends, ends, seed, *settings)
    backward = getattr(torch.ops.bertfast, operator.__name__.replace("_fwd", "_bwd"))
    opcheck(backward, (torch.randn_like(out), *inputs, ends, ends, seed, out, stats, *settings))


@_each("quantize_rows")
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 16), (9,), (0, 4)], ids=str)
def test_quantize_rows(operator, shape):
    opcheck(operator, (random(*shape, dtype=torch.bfloat16, seed=1, grad=False),))


def _int8_arguments(rows, bias):
    product, affine, *vectors = (
        random(*shape, dtype=torch.float32, seed=1, grad=False) for shape in ((rows, 16), (2, rows), (16,), (16,))
    )
    return product, affine, vectors[0], vectors[1] if bias else None


@_each("scale_rows")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [5, 0])
def test_scale_rows(operator, rows, bias):
    opcheck(operator, (*_int8_arguments(rows, bias), torch.bfloat16))


@_each("scale_rows_activation")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [5, 0])
def test_scale_rows_activation(operator, rows, bias):
    opcheck(operator, (*_int8_arguments(rows, bias), "gelu"))


CHECKED = {
    "add_layer_norm_fwd": ("triton", "cuda", "cpu"),
    "add_layer_norm_bwd": ("triton", "cuda", "cpu"),
    "linear_gelu_fwd": ("triton", "cuda", "cpu"),
    "linear_gelu_separate_fwd": ("cuda",),
    "activation_fwd": ("cpu",),
    "linear_gelu_bwd": ("triton", "cuda", "cpu"),
    "embed_layer_norm_fwd": ("triton", "cuda", "cpu"),
    "embed_layer_norm_bwd": ("triton", "cuda", "cpu"),
    "qkv_projection_fwd": ("triton", "cuda"),
    "update_pack": ("triton",),
    "attention_fwd": ("triton", "cuda", "cpu"),
    "attention_bwd": ("triton", "cuda", "cpu"),
    "attention_mask_bwd": ("triton", "cuda", "cpu"),
    "varlen_attention_fwd": ("triton", "cuda", "cpu"),
    "varlen_attention_bwd": ("triton", "cuda", "cpu"),
    "quantize_rows": ("cpu",),
    "scale_rows": ("cpu",),
    "scale_rows_activation": ("cpu",),
}


def test_every_operator_is_checked_here():
    here = {
        "triton": _library.INTERPRETED and _library.triton_unavailable() is None,
        "cuda": True,
        "cpu": _library.extension_unavailable() is None,
    }
    checked = {f"bertfast::{op}_{backend}" for op, backends in CHECKED.items() for backend in backends if here[backend]}
    assert set(_operators()) == checked


@pytest.mark.parametrize("backend", ["triton", "cuda", "cpu"])
def test_names_exist_without_kernels(backend):
    """A missing extension removes no name: schemas and fakes are Python's."""
    with torch._subclasses.FakeTensorMode():
        x, ones = torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(8)
        operator = getattr(torch.ops.bertfast, f"add_layer_norm_fwd_{backend}")
        out, total, mean, rstd = operator(x, None, ones, ones, None, None, 1e-5, 0.0, True)
    assert out.dtype == total.dtype == torch.bfloat16 and mean.dtype == rstd.dtype == torch.float32
    assert out.shape == total.shape == (4, 8) and mean.shape == rstd.shape == (4,)
