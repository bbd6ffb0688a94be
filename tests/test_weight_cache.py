"""Packed weights: what changes them is seen, what need not know of them does not, and the kernel that holds them."""

import copy
import gc
import importlib
import io
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bertfast
from bertfast import ops, prepacked, use_backend, weight_cache
from bertfast.kernels import tiles
from bertfast.nn import FusedSelfAttention
from bertfast.ops._library import INTERPRETED
from helpers.op_cases import random
from helpers.poison import LAYOUTS, poisoned_memory  # noqa: F401

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WIDTH = 40
NAMES = ("query", "key", "value")
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs interpreted kernels")


@pytest.fixture(autouse=True)
def empty_cache():
    weight_cache._entries.clear()
    prepacked._entries.clear()
    yield
    weight_cache._entries.clear()
    prepacked._entries.clear()


@pytest.fixture(params=["torch", pytest.param("kernel", marks=needs_interpreter)])
def held_by(request, monkeypatch):
    """What compares values: torch as on the CPU, or the kernel as on a GPU."""
    if request.param == "kernel":
        monkeypatch.setattr(
            weight_cache._Entry,
            "_compare",
            lambda self, *parameters: weight_cache._UPDATE(*sum(parameters, ()), *self.pack),
        )
    return request.param


@pytest.fixture
def counted(monkeypatch):
    """The calls that found or made a pack."""
    found = []
    original = weight_cache.packed

    def packed(weights, biases):
        pack = original(weights, biases)
        found.append(pack)
        return pack

    monkeypatch.setattr(weight_cache, "packed", packed)
    return found


@pytest.fixture
def packing(monkeypatch):
    """Every call without gradients is one that packs, as large ones do on an H100."""
    module = importlib.import_module("bertfast.ops.qkv_projection")
    describe = module.describe
    monkeypatch.setattr(module, "describe", lambda *args, **facts: describe(*args, **facts)._replace(compute=(9, 0)))
    monkeypatch.setattr(tiles, "qkv_weights_are_packed", lambda *arguments: True)


def attention_module(seed=0, dtype=torch.bfloat16, **options):
    torch.manual_seed(seed)
    return FusedSelfAttention(WIDTH, 4, dtype=dtype, **options).eval()


def parameters_of(module):
    linears = [getattr(module, name) for name in NAMES]
    return tuple(m.weight for m in linears), tuple(m.bias for m in linears)


def pack_of(module):
    with torch.no_grad():
        return weight_cache.packed(*parameters_of(module))


def assert_fresh(module):
    """The pack of the module holds its weights, bit by bit."""
    pack = pack_of(module)
    weights, biases = parameters_of(module)
    assert torch.equal(pack.weight, torch.cat(weights)) and pack.weight.dtype == weights[0].dtype
    assert (pack.bias is None and biases[0] is None) or torch.equal(pack.bias, torch.cat(biases))
    assert not pack.weight.requires_grad and not pack.weight.is_inference()
    assert_reordered_copies_are_fresh(weights, biases)
    return pack


def assert_reordered_copies_are_fresh(weights, biases):
    """Whatever changes a weight is seen by both kinds of copies."""
    x = random(3, weights[0].shape[1], dtype=weights[0].dtype, seed=9, grad=False)
    with torch.no_grad():
        found = [prepacked.linear(x, weights, biases), prepacked.linear(x, weights[:1], biases[:1])]
        expected = [
            F.linear(x, torch.cat(weights[:n]), None if biases[0] is None else torch.cat(biases[:n])) for n in (3, 1)
        ]
    for got, of in zip(found, expected, strict=True):
        if got is not None:
            torch.testing.assert_close(got, of, rtol=2e-2, atol=2e-2)


def test_packs_are_made_once(held_by):
    module = attention_module()
    first = assert_fresh(module)
    assert assert_fresh(module) is first and len(weight_cache._entries) == 1


def _load_state_dict(module):
    module.load_state_dict(attention_module(seed=1).state_dict())


def _load_state_dict_by_assignment(module):
    module.load_state_dict(attention_module(seed=1).state_dict(), assign=True)


def _step(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def _fused_step(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5, foreach=True)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def _step_of_one_bias(module):
    with torch.no_grad():
        module.key.bias += 1.0


def _average_through_data(module):
    other = attention_module(seed=1)
    for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
        ours.data.copy_(0.9 * ours.data + 0.1 * theirs.data)


def _average_of_one_weight(module):
    module.value.weight.data.mul_(0.5)


def _average_of_one_bias(module):
    module.value.bias.data[3] += 0.5


def _merge_adapter(module):
    for name in ("query", "value"):
        linear = getattr(module, name)
        a, b = random(2, WIDTH, dtype=linear.weight.dtype, seed=1), random(WIDTH, 2, dtype=linear.weight.dtype, seed=2)
        linear.weight.data += (b @ a).detach()


def _merge_and_unmerge(module):
    delta = random(WIDTH, WIDTH, dtype=module.query.weight.dtype, seed=3).detach()
    module.query.weight.data += delta
    assert_fresh(module)
    module.query.weight.data -= delta


def _swap_data(module):
    module.query.weight.data = random(WIDTH, WIDTH, dtype=module.query.weight.dtype, seed=3).detach()


def _swap_back_and_forth(module):
    kept = module.query.weight.data
    module.query.weight.data = torch.zeros_like(kept)
    assert_fresh(module)
    module.query.weight.data = kept


def _half(module):
    module.half()


def _half_and_back(module):
    module.half()
    assert_fresh(module)
    module.bfloat16()


def _to_float(module):
    module.to(torch.float32)


def _new_parameter(module):
    module.query.weight = nn.Parameter(module.query.weight.detach() + 1.0)


def _new_module(module):
    module.key = attention_module(seed=4).key


def _resize(module):
    for name in NAMES:
        setattr(module, name, nn.Linear(WIDTH, 8, dtype=torch.bfloat16))


def _other_strides(module):
    for name in NAMES:
        weight = getattr(module, name).weight
        weight.data = weight.data.t().contiguous().t()


def _transpose_in_place(module):
    for name in NAMES:
        weight = getattr(module, name).weight
        weight.data = weight.data.t()


def _normalise(module):
    nn.init.trunc_normal_(module.query.weight)


def _average_model(module):
    averaged = torch.optim.swa_utils.AveragedModel(module)
    for p in module.parameters():
        p.data.add_(1.0)
    averaged.update_parameters(module)


def _write_under_inference_mode(module):
    with torch.inference_mode():
        module.query.weight.data.mul_(2.0)
        module.key.weight.mul_(2.0)


CHANGES = [
    _load_state_dict,
    _load_state_dict_by_assignment,
    _step,
    _fused_step,
    _step_of_one_bias,
    _average_through_data,
    _average_of_one_weight,
    _average_of_one_bias,
    _merge_adapter,
    _merge_and_unmerge,
    _swap_data,
    _swap_back_and_forth,
    _half,
    _half_and_back,
    _to_float,
    _new_parameter,
    _new_module,
    _resize,
    _other_strides,
    _transpose_in_place,
    _normalise,
    _average_model,
    _write_under_inference_mode,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_changes_are_seen(change, held_by):
    module = attention_module()
    assert_fresh(module)
    change(module)
    assert_fresh(module)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_outputs_follow_changes(change, packing, counted):
    module = attention_module()
    x = random(2, 5, WIDTH, dtype=torch.bfloat16, seed=9, grad=False)
    for step in (lambda module: None, change):
        step(module)
        weights, biases = parameters_of(module)
        x = x.to(weights[0].dtype)
        found = len(counted)
        with torch.no_grad():
            outputs = ops.qkv_projection(x, weights, biases, backend="triton")
            expected = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        for ours, stock in zip(outputs, expected, strict=True):
            torch.testing.assert_close(ours, stock)
        packs = counted[found:]
        assert packs == [] if x.dtype == torch.float32 else len(packs) == 1 and packs[0] is not None


def test_an_edit_of_part_of_a_weight_needs_refresh(held_by):
    """Of a row that no sample looks at."""
    module = attention_module()
    pack = assert_fresh(module)
    weight = module.key.weight
    for column in range(WIDTH):
        weight.data[7, column] += 1.0
        if not torch.equal(pack_of(module).weight[WIDTH : 2 * WIDTH], weight):
            break
    else:
        pytest.fail("every column of a row is looked at")
    other, other_pack = attention_module(seed=1), None
    other_pack = pack_of(other)
    bertfast.refresh(module)
    assert assert_fresh(module) is pack, "in the same memory"
    assert pack_of(other) is other_pack
    weight.data[7, column] += 1.0
    bertfast.refresh([weight])
    assert_fresh(module)


def test_refresh_of_a_model_without_packs():
    bertfast.refresh(attention_module())
    assert weight_cache._entries == {}


def test_refresh_takes_parameters_and_says_what_it_does_not():
    module = attention_module()
    pack = pack_of(module)
    weight = next(module.parameters())
    weight.data.mul_(0.5)
    bertfast.refresh(weight)
    assert torch.equal(pack.weight[:WIDTH], weight)
    with pytest.raises(TypeError, match="model must be a module or parameters, got dict"):
        bertfast.refresh({"weight": weight})


def test_a_graph_under_capture_gets_no_pack(monkeypatch):
    module = attention_module()
    pack_of(module)
    monkeypatch.setattr(weight_cache, "_is_capturing", lambda weight: True)
    assert weight_cache.packed(*parameters_of(module)) is None
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        bertfast.refresh(module)


def test_a_change_of_values_keeps_the_memory():
    """New memory with every optimizer step would take the allocator apart."""
    module = attention_module()
    pointer = assert_fresh(module).weight.data_ptr()
    for change in (_load_state_dict, _step, _average_through_data, _swap_data):
        change(module)
        assert assert_fresh(module).weight.data_ptr() == pointer


def test_nothing_is_packed_with_gradients(packing, counted):
    module, x = attention_module(), random(2, 5, WIDTH, dtype=torch.bfloat16, seed=9, grad=False)
    weights, biases = parameters_of(module)
    ops.qkv_projection(x, weights, biases, backend="triton")[0].sum().backward()
    assert counted == [] and weight_cache._entries == {}
    with torch.no_grad():
        ops.qkv_projection(x, weights, biases, backend="triton")
    module.requires_grad_(False)
    ops.qkv_projection(x, weights, biases, backend="triton")
    assert len(counted) == 2 and None not in counted
    ops.qkv_projection(x.requires_grad_(), weights, biases, backend="triton")
    assert len(counted) == 2


def test_nothing_is_packed_in_a_trace(packing, counted):
    module, x = attention_module(), random(2, 5, WIDTH, dtype=torch.bfloat16, seed=9, grad=False)
    weights, biases = parameters_of(module)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: ops.qkv_projection(x, weights, biases, backend="triton"), backend="aot_eager", fullgraph=True
    )
    with torch.no_grad():
        outputs = compiled(x)
        for ours, stock in zip(
            outputs, (F.linear(x, *pair) for pair in zip(weights, biases, strict=True)), strict=True
        ):
            torch.testing.assert_close(ours, stock)
    assert counted == [] and weight_cache._entries == {}
    torch._dynamo.reset()


def test_packs_made_in_inference_mode_serve_outside_it(held_by):
    module = attention_module()
    with torch.inference_mode():
        first = weight_cache.packed(*parameters_of(module))
    assert not first.weight.is_inference()
    assert assert_fresh(module) is first
    x = random(2, WIDTH, dtype=torch.bfloat16, seed=9)
    F.linear(x, *first).sum().backward()
    module.query.weight.data.mul_(2.0)
    with torch.inference_mode():
        weight_cache.packed(*parameters_of(module))
    assert torch.equal(first.weight[:WIDTH], module.query.weight)


def test_parameters_made_in_inference_mode():
    """Their versions are not tracked."""
    with torch.inference_mode():
        module = attention_module()
    assert_fresh(module)
    with torch.inference_mode():
        module.query.weight.mul_(2.0)
    assert_fresh(module)


def test_what_is_no_parameter_is_not_packed():
    """As in the replicas of DataParallel, whose weights are made anew for each call."""
    weights, biases = parameters_of(attention_module())
    assert weight_cache.packed([w.detach() for w in weights], biases) is None
    assert weight_cache.packed(weights, [b.detach() for b in biases]) is None

    class Special(nn.Parameter):
        pass

    assert weight_cache.packed([weights[0], weights[1], Special(weights[2].detach())], biases) is None
    assert weight_cache._entries == {}


def _replica(module):
    """What torch.nn.parallel.replicate makes of a module, on one device."""
    replica = module._replicate_for_data_parallel()
    for name in NAMES:
        linear = getattr(module, name)._replicate_for_data_parallel()
        for parameter in ("weight", "bias"):
            setattr(linear, parameter, getattr(getattr(module, name), parameter).detach().clone())
        linear._former_parameters = {}
        setattr(replica, name, linear)
    return replica


def test_replicas_of_data_parallel(packing, counted):
    module, x = attention_module(), random(2, 5, WIDTH, dtype=torch.bfloat16, seed=9, grad=False)
    replica = _replica(module)
    with torch.no_grad(), use_backend("triton", "torch"):
        torch.testing.assert_close(replica(x), module(x))
    assert [pack is not None for pack in counted] == [False, True], "of the module itself alone"


def test_modules_are_served_and_know_nothing_of_it(packing, counted):
    module, x = attention_module(), random(2, 5, WIDTH, dtype=torch.bfloat16, seed=9, grad=False)
    before, keys = dict(vars(module)), list(module.state_dict())
    with torch.no_grad(), use_backend("triton", "torch"):
        out = module(x)
    assert len(counted) == 1 and counted[0] is not None
    assert vars(module) == before and list(module.state_dict()) == keys
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    assert buffer.tell() < 3 * 2 * WIDTH * (WIDTH + 1) + 8192
    twins = {"deepcopy": copy.deepcopy(module), "pickle": pickle.loads(pickle.dumps(module))}
    for twin in twins.values():
        with torch.no_grad(), use_backend("triton", "torch"):
            assert torch.equal(twin(x), out)
            twin.query.weight.mul_(2.0)
            assert not torch.equal(twin(x), out) and torch.equal(module(x), out)
            assert_fresh(twin)
    assert len(weight_cache._entries) == 3


def test_packs_go_with_their_parameters():
    module = attention_module()
    kept = module.value
    pack = pack_of(module)
    reference = weakref.ref(pack.weight)
    del module, pack
    gc.collect()
    assert weight_cache._entries == {} and reference() is None
    assert kept.weight is not None


def test_a_replaced_parameter_takes_its_pack_with_it():
    module = attention_module()
    pack_of(module)
    _new_parameter(module)
    gc.collect()
    assert weight_cache._entries == {}
    assert_fresh(module)


def test_an_identity_that_is_used_again_is_another_parameter():
    """Ids of dead objects come back: entries look at the object."""
    module, other = attention_module(), attention_module(seed=1)
    pack_of(module)
    ((key, entry),) = weight_cache._entries.items()
    weight_cache._entries.clear()
    weight_cache._entries[tuple(id(p) for part in parameters_of(other) for p in part)] = entry
    assert_fresh(other)
    assert key not in weight_cache._entries


def test_one_parameter_for_several_places():
    module = attention_module()
    module.key.weight = module.query.weight
    assert_fresh(module)
    module.query.weight.data.mul_(3.0)
    assert_fresh(module)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (3, 2), (33, 5), (64, 130)])
def test_shapes(shape, bias, held_by):
    torch.manual_seed(0)
    weights = tuple(nn.Parameter(torch.randn(shape)) for _ in range(3))
    biases = tuple(nn.Parameter(torch.randn(shape[0])) if bias else None for _ in range(3))
    for change in (lambda t: None, lambda t: t.mul_(2.0), lambda t: t.add_(1.0)):
        for parameter in (*weights, *biases):
            if parameter is not None:
                change(parameter.data)
        pack = weight_cache.packed(weights, biases)
        assert torch.equal(pack.weight, torch.cat(weights))
        assert torch.equal(pack.bias, torch.cat(biases)) if bias else pack.bias is None


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_nothing_is_not_packed(shape):
    weights = tuple(nn.Parameter(torch.randn(shape)) for _ in range(3))
    assert weight_cache.packed(weights, (None,) * 3) is None


def test_threads_share_a_pack():
    module, found = attention_module(), []
    start = threading.Barrier(4)

    def ask():
        start.wait()
        found.extend(torch.equal(pack_of(module).weight, torch.cat(parameters_of(module)[0])) for _ in range(50))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200 and all(found) and len(weight_cache._entries) == 1


def _sampled(row, columns):
    """The columns that the kernel compares in a row."""
    return ((row * 37 + torch.arange(2) * ((columns + 1) // 2)) % columns).tolist()


@needs_interpreter
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_copies_rows_of_which_a_sample_differs(dtype, layout):
    """32 rows of one weight at a time, and no others."""
    rows, columns = 70, 150
    weights = [LAYOUTS[layout](random(rows, columns, dtype=dtype, seed=i, grad=False)) for i in range(3)]
    biases = [LAYOUTS[layout](random(rows, dtype=dtype, seed=3 + i, grad=False)) for i in range(3)]
    pack, bias_pack = torch.cat(weights), torch.zeros(3 * rows, dtype=dtype)
    sampled = _sampled(33, columns)
    others = [column for column in range(columns) if column not in sampled]
    weights[1][33, others] += 1.0
    # In the last block, which reaches beyond the rows.
    weights[1][69, [column for column in range(columns) if column not in _sampled(69, columns)]] += 1.0
    before = pack.clone()
    torch.ops.bertfast.update_pack_triton(*weights, *biases, pack, bias_pack)
    assert torch.equal(pack, before) and torch.equal(bias_pack, torch.cat(biases))
    for column in sampled:
        weights[1][33, column] += 1.0
        torch.ops.bertfast.update_pack_triton(*weights, *biases, pack, bias_pack)
        assert torch.equal(pack[rows + 32 : rows + 64], weights[1][32:64])
    weights[1][69] += 1.0
    weights[2][69] += 1.0
    torch.ops.bertfast.update_pack_triton(*weights, *biases, pack, bias_pack)
    assert torch.equal(pack, torch.cat(weights))
    weights[0][:32] += 1.0
    weights[0][34, 5] += 1.0
    assert 5 not in _sampled(34, columns)
    torch.ops.bertfast.update_pack_triton(*weights, *biases, pack, bias_pack)
    assert torch.equal(pack[:32], weights[0][:32]) and not torch.equal(pack[32:64], weights[0][32:64])


@needs_interpreter
def test_the_kernel_compares_64_values_a_program():
    tile = tiles.update_pack()
    assert 2 * tile.block_m == weight_cache.SAMPLES
