"""What becomes of a whole model with encoders of torch.nn: reports, hooks, copies, restore, compile and export."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrizations

import bertfast
from bertfast.swap import torch_nn
from helpers.models import assert_close, assert_same_gradients
from helpers.swap import traces_of_swap, types_of
from helpers.swap_torch_nn import (
    BATCH,
    LENGTH,
    WIDTH,
    encoder_of,
    kept,
    layer_of,
    padding,
    pair_mask,
    slow_path,
    source,
    swapped,
)
from helpers.tolerance import assert_error_within, eps_of, stock_error

PACKED, PADDED = (1, 12, WIDTH), (BATCH, LENGTH, WIDTH)


class Classifier(nn.Module):
    def __init__(self, dropout=0.0, **form):
        super().__init__()
        self.encoder = encoder_of(dropout=dropout, **form)
        self.head = nn.Linear(WIDTH, 2).double()

    def forward(self, src, mask=None):
        return self.head(self.encoder(src, src_key_padding_mask=mask)[:, 0])


class Sublayer(nn.TransformerEncoderLayer):
    pass


def test_the_report_names_what_was_swapped():
    model = Classifier()
    report = bertfast.accelerate(model)
    assert list(report.swapped) == ["encoder", "encoder.layers.0", "encoder.layers.1"]
    assert not report.left
    assert type(model.encoder) is torch_nn.TransformerEncoder
    assert type(model.encoder.layers[0]) is torch_nn.TransformerEncoderLayer
    assert isinstance(model.encoder.layers[0], nn.TransformerEncoderLayer)
    assert bertfast.accelerate(model).notes
    assert list(bertfast.restore(model).swapped) == list(report.swapped)
    assert not traces_of_swap(model)


def test_decoders_are_left_with_a_reason(fused_shapes):
    stock = nn.Transformer(WIDTH, 4, 1, 1, 32, dropout=0.0, batch_first=True).double()
    model = copy.deepcopy(stock)
    report = bertfast.accelerate(model)
    assert set(report.swapped) == {"encoder", "encoder.layers.0"}
    assert {name: reason for name, (_, reason) in report.left.items()} == {
        "decoder": "decoders are not fused",
        "decoder.layers.0": "decoders are not fused",
    }
    mask = padding("right")
    masks = {"src_key_padding_mask": mask, "memory_key_padding_mask": mask}
    got, wanted = (one(source(), source(seed=2), **masks) for one in (model, stock))
    assert fused_shapes == [PACKED]
    assert_close(got, wanted, "output")
    got.square().sum().backward(), wanted.square().sum().backward()
    assert_same_gradients(model, stock)
    with pytest.raises(bertfast.SwapError, match="decoders"):
        bertfast.accelerate(copy.deepcopy(stock), strict=True)


def with_attention(layer, **options):
    layer.self_attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True, **options).double()


def frozen_norm(layer):
    layer.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False).double()


def own_activation(layer):
    layer.activation = nn.ReLU()
    layer.activation.forward = lambda x: x.clamp(-0.5, 1.0)


UNUSUAL = {
    "kdim": (lambda layer: with_attention(layer, kdim=WIDTH - 1), "kdim"),
    "bias_k": (lambda layer: with_attention(layer, add_bias_kv=True), "bias_k"),
    "add_zero_attn": (lambda layer: with_attention(layer, add_zero_attn=True), "add_zero_attn"),
    "no weight": (frozen_norm, "norm1.weight"),
    "other norm": (lambda layer: setattr(layer, "norm2", nn.RMSNorm(WIDTH).double()), "norm2 is RMSNorm"),
    "other dropout": (lambda layer: setattr(layer, "dropout1", nn.Identity()), "dropout1 is Identity"),
    "weight norm": (lambda layer: parametrizations.weight_norm(layer.linear1), "linear1 is ParametrizedLinear"),
    "attention": (
        lambda layer: parametrizations.weight_norm(layer.self_attn, "in_proj_weight"),
        "self_attn is ParametrizedMultiheadAttention",
    ),
    "hook": (lambda layer: layer.linear2.register_forward_hook(lambda m, a, o: o * 2), "linear2 has hooks"),
    "out_proj": (lambda layer: layer.self_attn.out_proj.register_forward_hook(print), "self_attn.out_proj has hooks"),
    "activation": (own_activation, "activation has a forward of its own"),
    "forward": (lambda layer: setattr(layer.linear1, "forward", layer.linear1.forward), "forward of its own"),
}


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.parametrize("when", ["before", "after"])
def test_unusual_layers_run_as_stock(name, when, fused_shapes):
    change, reason = UNUSUAL[name]
    stock = encoder_of()
    model = copy.deepcopy(stock)
    if when == "after":
        bertfast.accelerate(model)
    for one in (stock, model):
        change(one.layers[1])
    randomise_new(stock, model)
    report = bertfast.accelerate(model)
    if when == "before":
        assert reason in report.left["layers.1"][1]
        assert set(report.swapped) == {"", "layers.0"}
    if name == "kdim":
        return
    for mask in (None, padding("right")):
        for one in (stock, model):
            one.zero_grad()
        got, wanted = (one(source(), src_key_padding_mask=mask) for one in (model, stock))
        assert_close(got, wanted, name)
        got.square().sum().backward(), wanted.square().sum().backward()
        assert_same_gradients(model, stock)
    assert fused_shapes == [PADDED] * 2


def randomise_new(stock, model):
    with torch.no_grad():
        for theirs, ours in zip(stock.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)


def test_custom_layers_keep_the_encoder_stock(fused_shapes):
    stock = encoder_of()
    stock.layers[1] = Sublayer(WIDTH, 4, 32, dropout=0.0, batch_first=True).double()
    model = copy.deepcopy(stock)
    report = bertfast.accelerate(model)
    assert list(report.swapped) == ["layers.0"]
    assert "Sublayer" in report.left[""][1]
    assert report.left["layers.1"][1] == "a subclass of torch.nn's TransformerEncoderLayer"
    for mask in (None, padding("right")):
        assert_close(model(source(), None, mask), stock(source(), None, mask), "output")
    assert fused_shapes == [PADDED] * 2


@pytest.mark.filterwarnings("ignore")
def test_quantised_layers_stay_stock(fused_shapes):
    stock = torch.ao.quantization.quantize_dynamic(encoder_of().float().eval(), {nn.Linear})
    model = copy.deepcopy(stock)
    report = bertfast.accelerate(model)
    assert "linear1 is Linear, not torch.nn's" in report.left["layers.0"][1]
    x = source(dtype=torch.float32)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert torch.equal(model(x), stock(x))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert not fused_shapes


HOOKED = ["layers.0", "layers.1.self_attn", "layers.0.linear1", "layers.1.norm2", "layers.0.activation"]


@pytest.mark.parametrize("where", HOOKED)
def test_hooks_see_what_they_see_in_stock(where, fused_shapes):
    stock = encoder_of(nn.ReLU())
    model = swapped(stock)
    shapes = []
    for one in (stock, model):
        one.get_submodule(where).register_forward_hook(
            lambda module, args, output: shapes.append((output[0] if isinstance(output, tuple) else output).shape)
        )
    mask = padding("right")
    got, wanted = (one(source(), src_key_padding_mask=mask) for one in (model, stock))
    assert_close(got, wanted, "padded rows included")
    assert len(shapes) == 2
    assert shapes[0] == shapes[1]
    inside = where != "layers.0"
    assert fused_shapes == [PADDED] * (1 if inside else 2)


def test_hooks_on_the_encoder_and_around_it_do_not_keep_padding(fused_shapes):
    model = Classifier()
    bertfast.accelerate(model)
    calls = []
    model.encoder.register_forward_hook(lambda *_: calls.append("encoder"))
    model.encoder.norm.register_forward_hook(lambda module, args, output: calls.append(tuple(output.shape)))
    model.head.register_forward_hook(lambda *_: calls.append("head"))
    model(source(), padding("right"))
    assert calls == [PADDED, "encoder", "head"]
    assert fused_shapes == [PACKED] * 2


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_global_hooks_run_on_every_child(kind, fused_shapes):
    model = swapped(encoder_of())
    called = set()
    handle = getattr(global_hooks, f"register_module_{kind}_hook")(lambda module, *_: called.add(module))
    try:
        model(source(), None, padding("right")).sum().backward()
    finally:
        handle.remove()
    assert {model.layers[0].linear1, model.layers[1].norm2, model.layers[0].self_attn} <= called
    assert not fused_shapes


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_stay_swapped(way, fused_shapes):
    model = swapped(Classifier(), unpad=True)
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert types_of(other) == types_of(model)
    wanted = model(source(), padding("right"))
    assert torch.equal(other(source(), padding("right")), wanted)
    assert fused_shapes == [PACKED] * 4
    bertfast.restore(other)
    assert not traces_of_swap(other)
    assert traces_of_swap(model)


def test_pickles_load_in_another_process(tmp_path):
    torch.save({"model": swapped(layer_of().eval()), "x": source()}, tmp_path / "model.pt")
    code = (
        "import torch\n"
        f"saved = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "with torch.no_grad(): print(saved['model'](saved['x']).sum().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    with torch.no_grad():
        assert float(done.stdout) == pytest.approx(swapped(layer_of().eval())(source()).sum().item())


def test_state_and_parameters_are_the_same_objects():
    model = Classifier().eval()
    model.encoder.layers[0].train()
    before, types = dict(model.state_dict(keep_vars=True)), types_of(model)
    training = [m.training for m in model.modules()]
    wanted = model(source(), padding("right"))
    bertfast.accelerate(model)
    after = dict(model.state_dict(keep_vars=True))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert [m.training for m in model.modules()] == training
    bertfast.restore(model)
    assert types_of(model) == types
    assert torch.equal(model(source(), padding("right")), wanted)


def test_swapping_one_model_leaves_the_other():
    one, other = encoder_of(), encoder_of()
    bertfast.accelerate(one)
    assert type(other) is nn.TransformerEncoder
    assert nn.TransformerEncoder.forward is not type(one).forward
    bertfast.accelerate(other)
    bertfast.restore(one)
    assert type(other) is torch_nn.TransformerEncoder


def test_an_optimizer_made_before_trains_the_swapped_model(fused_shapes):
    stock = Classifier(norm_first=True)
    model = copy.deepcopy(stock)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, stock)]
    bertfast.accelerate(model)
    for _ in range(3):
        for one, optimizer in zip((model, stock), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(one(source(), padding("right")), torch.tensor([0, 1, 1])).backward()
            optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert_close(ours, theirs, name)
    assert fused_shapes


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("train", [True, False])
def test_compiled_encoders_give_what_eager_gives(norm_first, train, fresh_dynamo):
    model = swapped(encoder_of(norm_first=norm_first, layers=1)).train(train)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    arguments = [
        {},
        {"src_key_padding_mask": padding("right")},
        {"src_key_padding_mask": padding("holes"), "mask": pair_mask("causal bool")},
        {"src_key_padding_mask": padding("left", "bias"), "mask": pair_mask("3-D bias")},
        {"mask": pair_mask("causal"), "is_causal": True},
    ]
    for masks in arguments:
        got, wanted = compiled(source(), **masks), model(source(), **masks)
        assert_close(got, wanted, str(list(masks)))
        for one, output in ((other, got), (model, wanted)):
            one.zero_grad()
            output.square().sum().backward()
        assert_same_gradients(other, model)


def test_compiled_layers_and_pinned_backends(fresh_dynamo):
    model = swapped(layer_of(batch_first=False), backend="torch")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = source(batch_first=False)
    assert_close(compiled(x, pair_mask("bool"), padding("right")), model(x, pair_mask("bool"), padding("right")), "x")


@pytest.mark.parametrize("padded", [False, True])
def test_lengths_and_batches_do_not_recompile(padded, fresh_dynamo):
    model = swapped(encoder_of(layers=1)).eval()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    counts = []
    for rows, length in ((3, 7), (4, 9), (2, 5), (5, 11), (6, 128), (7, 512)):
        x = source(batch=rows, length=length)
        mask = (torch.arange(length) >= torch.arange(rows)[:, None] + 1) if padded else None
        with torch.no_grad():
            assert_close(compiled(x, None, mask), model(x, None, mask), f"{rows} x {length}")
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2, 2, 2]


@pytest.mark.slow
def test_inductor(fresh_dynamo):
    stock = Classifier(layers=1).double()
    model = swapped(stock)
    compiled = torch.compile(model, fullgraph=True)
    x, mask = source(), padding("right")
    got, wanted = compiled(x, mask), stock(x, mask)
    assert_close(got, wanted, "scores")
    got.square().sum().backward(), wanted.square().sum().backward()
    assert_same_gradients(model, stock)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_exported_programs_serve_other_sizes(strict, batch_first):
    model = swapped(encoder_of(layers=1, batch_first=batch_first)).eval()
    x, mask = source(batch_first), padding("right")
    rows, length = torch.export.Dim("rows", min=2, max=64), torch.export.Dim("length", min=2, max=128)
    shape = {0: rows, 1: length} if batch_first else {0: length, 1: rows}
    shapes = {"src": shape, "src_key_padding_mask": {0: rows, 1: length}}
    arguments = {"src": x, "src_key_padding_mask": mask}
    with torch.no_grad():
        program = torch.export.export(model, (), arguments, dynamic_shapes=shapes, strict=strict)
    assert "_transformer_encoder_layer_fwd" not in str(program.graph)
    for size in ((3, 7), (5, 20), (2, 2), (64, 3)):
        arguments["src"] = source(batch_first, batch=size[0], length=size[1])
        arguments["src_key_padding_mask"] = torch.arange(size[1]) >= torch.arange(size[0])[:, None] % size[1] + 1
        with torch.no_grad():
            assert_close(program.module()(**arguments), model(**arguments), str(size))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("packed", [True, False])
def test_autocast_gives_the_dtype_of_stock(norm_first, packed):
    stock = encoder_of(norm_first=norm_first).float()
    model = swapped(stock)
    x = source(dtype=torch.float32)
    mask = padding("right") if packed else None
    for train in (False, True):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(train):
            got = model.train(train)(x, src_key_padding_mask=mask)
            with slow_path():  # the fast one knows CUDA's autocast only: on the CPU it gives bf16 or fails
                wanted = stock.train(train)(x, src_key_padding_mask=mask)
        assert got.dtype == wanted.dtype
        exact = copy.deepcopy(stock).double()(x.double(), src_key_padding_mask=mask)
        got_rows, wanted_rows, exact = (kept(one, mask) for one in (got, wanted, exact.detach()))
        noise = eps_of(torch.bfloat16) * exact.abs().max().item()
        assert_error_within(got_rows, exact, stock_error([wanted_rows], exact, "stock"), noise, "autocast")
    got.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_inference_mode(fused_shapes):
    stock = encoder_of().eval()
    model = swapped(stock)
    for mask in (None, padding("right")):
        with torch.inference_mode():
            got = model(source(), src_key_padding_mask=mask)
            assert got.is_inference()
        assert_close(kept(got, mask), kept(stock(source(), src_key_padding_mask=mask), mask), "output")
    assert fused_shapes == [PADDED, PADDED, PACKED, PACKED]


def test_functional_calls_and_gradients_of_each_sample():
    stock = Classifier()
    model = swapped(stock)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    doubled = {name: 2 * p for name, p in parameters.items()}
    call = torch.func.functional_call
    arguments = (source(), padding("right"))
    assert_close(call(model, doubled, arguments), call(stock, doubled, arguments), "functional call")

    def loss(one):
        def of(parameters, x, mask):
            return call(one, parameters, (x.unsqueeze(0), mask.unsqueeze(0))).square().sum()

        return torch.func.vmap(torch.func.grad(of), in_dims=(None, 0, 0))

    got, wanted = (loss(one)(parameters, *arguments) for one in (model, stock))
    for name in wanted:
        assert_close(got[name], wanted[name], name)


def test_vmap_without_gradients():
    stock = encoder_of().eval()
    model = swapped(stock)
    inputs = torch.stack([source(seed=seed) for seed in range(2)])
    with torch.no_grad():
        got = torch.func.vmap(model)(inputs)
    assert_close(got.flatten(0, 1), stock(inputs.flatten(0, 1)), "output")


def test_checkpointing_gives_the_same_gradients(fused_shapes):
    stock = encoder_of(dropout=0.0)
    model = swapped(stock)
    x = source().requires_grad_()
    for use_reentrant in (True, False):
        model.zero_grad(), stock.zero_grad()
        run = torch.utils.checkpoint.checkpoint
        run(model, x, None, padding("right"), use_reentrant=use_reentrant)[:, 0].square().sum().backward()
        stock(x, None, padding("right"))[:, 0].square().sum().backward()
        assert_same_gradients(model, stock)
    assert set(fused_shapes) == {PACKED}


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["ddp", "fully_shard", "swapped behind fully_shard"])
def test_distributed_wrappers(wrapper, process_group, fused_shapes):
    stock = encoder_of()
    model = copy.deepcopy(stock)
    if wrapper != "swapped behind fully_shard":
        assert bertfast.accelerate(model)
    if wrapper == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        wrapped = model
        mesh = dist.init_device_mesh("cpu", (1,))
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
        report = bertfast.accelerate(model) if "behind" in wrapper else bertfast.restore(model)
        assert not report
        assert list(report.left) == ["", "layers.0", "layers.1"]
    mask = padding("right")
    got, wanted = (one(source(), src_key_padding_mask=mask) for one in (wrapped, stock))
    assert_close(kept(got, mask), kept(wanted, mask), "output")
    kept(got, mask).square().sum().backward(), kept(wanted, mask).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        gradient = ours.grad if wrapper == "ddp" else ours.grad.full_tensor()
        assert_close(gradient, theirs.grad, name)
    assert fused_shapes == {"ddp": [PACKED] * 2, "fully_shard": [PADDED] * 2}.get(wrapper, [])
