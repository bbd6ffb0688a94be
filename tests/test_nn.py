"""The drop-in modules against torch.nn, padded and packed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from bertfast.nn import (
    BertEncoder,
    BertEncoderLayer,
    FusedAddLayerNorm,
    FusedBertEmbeddings,
    FusedFeedForward,
    FusedSelfAttention,
)
from bertfast.nn.names import BERT_LAYER, DISTILBERT_LAYER, ParameterGroup
from bertfast.nn.plain import any_hooks, is_plain
from bertfast.packing import Packing
from helpers.models import assert_close, mask_of

WIDTH, HEADS, INNER = 24, 3, 40


def random_(module, seed=0):
    """The module in float64 and eval mode, with random parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.05)
    return module.double().eval()


def randn(*shape, seed=3):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients_of(module, output, *inputs):
    cotangent = randn(*output.shape, seed=9)
    return torch.autograd.grad(output, [*inputs, *module.parameters()], cotangent)


def as_torch(attention):
    """An nn.MultiheadAttention with the weights of a FusedSelfAttention and no output projection."""
    stock = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        stock.in_proj_weight.copy_(torch.cat([m.weight for m in (attention.query, attention.key, attention.value)]))
        stock.in_proj_bias.copy_(torch.cat([m.bias for m in (attention.query, attention.key, attention.value)]))
        stock.out_proj.weight.copy_(torch.eye(WIDTH))
        stock.out_proj.bias.zero_()
    return stock


@pytest.mark.parametrize("kind", ["full", "right", "left", "holes"])
def test_self_attention_padded_and_packed(kind):
    attention = random_(FusedSelfAttention(WIDTH, HEADS))
    x, mask = randn(3, 7, WIDTH), mask_of(kind).bool()
    wanted, _ = as_torch(attention)(x, x, x, key_padding_mask=~mask, need_weights=False)
    assert_close(attention(x, mask[:, None, None, :])[mask], wanted[mask], "padded")
    packing = Packing.from_mask(mask)
    packed = attention(packing.unpad(x).unsqueeze(0), cu_seqlens=packing.cu_seqlens, max_seqlen=packing.max_seqlen)
    assert packed.shape == (1, int(mask.sum()), WIDTH)
    assert_close(packed[0], wanted[mask], "packed")


def test_self_attention_takes_a_float_mask_for_each_head():
    attention = random_(FusedSelfAttention(WIDTH, HEADS))
    x, bias = randn(2, 5, WIDTH), randn(2, HEADS, 5, 5, seed=4)
    wanted, _ = as_torch(attention)(x, x, x, attn_mask=bias.flatten(0, 1), need_weights=False)
    assert_close(attention(x, bias), wanted, "biased")


def test_self_attention_dropout_in_training_only():
    attention = random_(FusedSelfAttention(WIDTH, HEADS, dropout=0.5))
    x = randn(2, 5, WIDTH)
    assert torch.equal(attention(x), attention(x))
    attention.train()
    torch.manual_seed(0)
    first = attention(x)
    assert not torch.equal(first, attention(x))
    torch.manual_seed(0)
    assert torch.equal(first, attention(x))
    # Dropout keeps the mean; 400 draws bring the error of the mean far below the values.
    mean = torch.stack([attention(x) for _ in range(400)]).mean(0)
    assert (mean - attention.eval()(x)).abs().max() < 0.3 * attention(x).abs().max()


def test_refusals():
    with pytest.raises(ValueError, match="hidden_size must be a multiple of num_heads, got 24 and 5"):
        FusedSelfAttention(24, 5)
    with pytest.raises(ValueError, match="hidden_size must be a multiple of num_heads, got 24 and 5"):
        BertEncoderLayer(24, 5, 8)
    with pytest.raises(ValueError, match="gelou"):
        FusedFeedForward(24, 8, "gelou")
    with pytest.raises(ValueError, match="gelou"):
        BertEncoderLayer(24, 3, 8, "gelou")
    attention = random_(FusedSelfAttention(WIDTH, HEADS))
    packed, ends = randn(1, 5, WIDTH), torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="neither attn_mask nor need_weights"):
        attention(packed, torch.ones(1, 1, 1, 5, dtype=torch.bool), ends, 5)
    layer = random_(BertEncoderLayer(WIDTH, HEADS, INNER))
    with pytest.raises(ValueError, match="neither attn_mask nor need_weights"):
        layer(packed, None, ends, 5, need_weights=True)
    with pytest.raises(ValueError, match="cu_seqlens"):
        layer(packed, None, torch.tensor([0, 4], dtype=torch.int32), 5)
    norm = FusedAddLayerNorm(WIDTH)
    with pytest.raises(ValueError, match="weight must have shape"):
        norm(torch.ones(2, 23))
    with pytest.raises(ValueError, match="residual must have shape"):
        norm(torch.ones(2, 24), torch.ones(1, 24))


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-3])
def test_add_layer_norm_is_layer_norm(eps):
    norm, stock = random_(FusedAddLayerNorm(WIDTH, eps)), random_(nn.LayerNorm(WIDTH, eps))
    assert norm.state_dict().keys() == stock.state_dict().keys()
    norm.load_state_dict(stock.state_dict())
    x, residual = randn(3, 7, WIDTH).requires_grad_(), randn(3, 7, WIDTH, seed=5).requires_grad_()
    assert_close(norm(x), stock(x), "plain")
    assert_close(norm(x, residual), stock(x + residual), "with a residual")
    mine = gradients_of(norm, norm(x, residual), x, residual)
    theirs = gradients_of(stock, stock(x + residual), x, residual)
    for got, wanted in zip(mine, theirs, strict=True):
        assert_close(got, wanted, "gradient")
    small = x * 1e-3
    assert_close(norm(small), stock(small), "small")


def test_add_layer_norm_drops_what_is_added_and_not_the_residual():
    norm = random_(FusedAddLayerNorm(WIDTH, dropout=1.0))
    x, residual = randn(3, WIDTH), randn(3, WIDTH, seed=5)
    plain = norm(x, residual)
    norm.train()
    assert_close(norm(x, residual), norm(residual.clone() * 0, residual), "everything dropped")
    assert not torch.equal(norm(x, residual), plain)


def test_add_layer_norm_housekeeping():
    norm = FusedAddLayerNorm(8, 1e-5, 0.25, dtype=torch.bfloat16, device="meta")
    assert norm.weight.dtype == norm.bias.dtype == torch.bfloat16
    assert norm.weight.is_meta
    assert "8, eps=1e-05, dropout=0.25" in repr(norm)
    norm = random_(FusedAddLayerNorm(8))
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(8, dtype=torch.float64))
    assert not norm.bias.any()


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("gelu", F.gelu),
        ("gelu_new", lambda x: F.gelu(x, approximate="tanh")),
        ("relu", F.relu),
        (torch.tanh, torch.tanh),
        (nn.GELU(approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_feed_forward(activation, function):
    module = random_(FusedFeedForward(WIDTH, INNER, activation))
    x = randn(3, 7, WIDTH).requires_grad_()

    def formula(x):
        hidden = function(F.linear(x, module.dense_in.weight, module.dense_in.bias))
        return F.linear(hidden, module.dense_out.weight, module.dense_out.bias)

    assert_close(module(x), formula(x), "output")
    for got, wanted in zip(gradients_of(module, module(x), x), gradients_of(module, formula(x), x), strict=True):
        assert_close(got, wanted, "gradient")
    assert FusedFeedForward(4, 8, device="meta", dtype=torch.float16).dense_out.weight.shape == (4, 8)


def as_torch_layer(layer, activation=F.gelu, eps=1e-12):
    """An nn.TransformerEncoderLayer with the weights of a BertEncoderLayer."""
    stock = nn.TransformerEncoderLayer(
        WIDTH,
        HEADS,
        INNER,
        dropout=0.0,
        activation=activation,
        layer_norm_eps=eps,
        batch_first=True,
        dtype=torch.float64,
    )
    query, key, value, attention_out, attention_norm, ffn_in, ffn_out, ffn_norm = layer.leaves()
    with torch.no_grad():
        stock.self_attn.in_proj_weight.copy_(torch.cat([query.weight, key.weight, value.weight]))
        stock.self_attn.in_proj_bias.copy_(torch.cat([query.bias, key.bias, value.bias]))
    pairs = (
        (stock.self_attn.out_proj, attention_out),
        (stock.norm1, attention_norm),
        (stock.linear1, ffn_in),
        (stock.linear2, ffn_out),
        (stock.norm2, ffn_norm),
    )
    for theirs, ours in pairs:
        theirs.load_state_dict(ours.state_dict())
    return stock.train()  # without dropout; eval mode may take another path


@pytest.mark.parametrize("names", [BERT_LAYER, DISTILBERT_LAYER], ids=["bert", "distilbert"])
@pytest.mark.parametrize("kind", ["full", "right", "left", "holes"])
def test_encoder_layer_is_transformer_encoder_layer(kind, names):
    layer = random_(BertEncoderLayer(WIDTH, HEADS, INNER, eps=1e-5, names=names))
    stock = as_torch_layer(layer, eps=1e-5)
    x, mask = randn(3, 7, WIDTH).requires_grad_(), mask_of(kind).bool()
    wanted = stock(x, src_key_padding_mask=~mask)
    padded = layer(x, mask[:, None, None])
    assert_close(padded[mask], wanted[mask], "padded")
    with_weights, weights = layer(x, mask[:, None, None], need_weights=True)
    assert_close(with_weights, padded, "with weights")
    assert weights.shape == (3, HEADS, 7, 7)
    packing = Packing.from_mask(mask)
    packed = layer(packing.unpad(x).unsqueeze(0), None, packing.cu_seqlens, packing.max_seqlen)
    assert_close(packed[0], wanted[mask], "packed")
    cotangent = randn(int(mask.sum()), WIDTH, seed=8)
    (dx,) = torch.autograd.grad(wanted[mask], x, cotangent, retain_graph=True)
    for output in (padded[mask], packed[0]):
        assert_close(torch.autograd.grad(output, x, cotangent, retain_graph=True)[0], dx, "dx")


def test_encoder_is_transformer_encoder():
    encoder = BertEncoder([random_(BertEncoderLayer(WIDTH, HEADS, INNER, F.relu), seed) for seed in range(3)]).eval()
    layers = [as_torch_layer(layer, F.relu) for layer in encoder.layer]
    x, mask = randn(3, 7, WIDTH), mask_of("holes").bool()
    hidden = [x]
    for layer in layers:
        hidden.append(layer(hidden[-1], src_key_padding_mask=~mask))
    last, all_hidden, weights = encoder(x, mask[:, None, None], output_hidden_states=True, output_attentions=True)
    assert_close(last[mask], hidden[-1][mask], "last")
    assert len(all_hidden) == 4
    assert all_hidden[-1] is last
    for got, wanted in zip(all_hidden, hidden, strict=True):
        assert_close(got[mask], wanted[mask], "hidden states")
    assert [w.shape for w in weights] == [(3, HEADS, 7, 7)] * 3
    assert encoder(x)[1:] == (None, None)


def test_names_of_the_children():
    for names in (BERT_LAYER, DISTILBERT_LAYER):
        layer = BertEncoderLayer(WIDTH, HEADS, INNER, names=names)
        wanted = {f"{path}.{kind}" for path in names for kind in ("weight", "bias")}
        assert set(layer.state_dict()) == wanted
        assert sum(isinstance(m, ParameterGroup) for m in layer.modules()) == (5 if names is BERT_LAYER else 2)


def test_packed_encoder_compiles_once_for_any_number_of_tokens():
    torch._dynamo.reset()
    encoder = BertEncoder([random_(BertEncoderLayer(WIDTH, HEADS, INNER))]).eval()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(encoder, fullgraph=True, backend=counter)
    counts = []
    for lengths in ([3, 5, 2], [4, 1, 6, 2], [9, 9], [1, 2, 3, 4, 5], [7, 2, 8]):
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        x = randn(1, sum(lengths), WIDTH, seed=sum(lengths))
        got = compiled(x, None, ends, max(lengths))[0]
        assert_close(got, encoder(x, None, ends, max(lengths))[0], str(lengths))
        counts.append(counter.frame_count)
    assert counts[1:] == [counts[1]] * 4
    torch._dynamo.reset()


@pytest.mark.parametrize("types", [2, 0])
@pytest.mark.parametrize("follow", [False, True])
def test_embeddings(types, follow):
    module = random_(
        FusedBertEmbeddings(61, 22, WIDTH, types, pad_token_id=1, positions_follow_padding=follow, eps=1e-5)
    )
    ids = torch.tensor([[5, 1, 7, 8], [1, 1, 9, 60]])
    token_types = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]]) if types else None
    positions = torch.tensor([[2, 1, 3, 4], [1, 1, 2, 3]]) if follow else torch.arange(4).expand(2, 4)
    table = module.token_type_embeddings
    for given in (token_types, None):
        total = module.word_embeddings.weight[ids] + module.position_embeddings.weight[positions]
        if types:
            total = total + table.weight[torch.zeros_like(ids) if given is None else given]
        wanted = F.layer_norm(total, (WIDTH,), module.LayerNorm.weight, module.LayerNorm.bias, 1e-5)
        assert_close(module(ids, given), wanted, "embeddings")
        assert_close(module(None, given, positions, module.word_embeddings(ids)), wanted, "given embeddings")
        # The same through the modules themselves, as when something is attached to one of them.
        handle = module.LayerNorm.register_forward_hook(lambda *_: None)
        assert_close(module(ids, given), wanted, "unfused")
        assert_close(module(None, given, positions, module.word_embeddings(ids)), wanted, "unfused, given embeddings")
        handle.remove()
    if not types:
        with pytest.raises(ValueError, match="token_type"):
            module(ids, torch.zeros_like(ids))


def test_embeddings_drop_in_training_on_both_paths():
    module = random_(FusedBertEmbeddings(61, 22, WIDTH, dropout=0.5)).train()
    ids = torch.randint(0, 61, (20, 20))
    for _ in range(2):
        dropped = module(ids) == 0
        assert 0.45 < dropped.double().mean() < 0.55
        module.LayerNorm.register_forward_hook(lambda *_: None)
    module.eval()
    assert (module(ids) != 0).all()


def test_what_counts_as_plain():
    linear = nn.Linear(3, 3)
    assert is_plain(linear, nn.Linear)
    assert not is_plain(nn.Bilinear(3, 3, 3), nn.Linear)
    subclass = type("Sub", (nn.Linear,), {})(3, 3)
    assert not is_plain(subclass, nn.Linear)
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        handle = getattr(linear, register)(lambda *_: None)
        assert not is_plain(linear, nn.Linear)
        assert any_hooks(nn.Sequential(nn.Identity(), linear))
        handle.remove()
        assert is_plain(linear, nn.Linear)
        assert not any_hooks(nn.Sequential(nn.Identity(), linear))
    parametrised = copy.deepcopy(linear)
    nn.utils.parametrize.register_parametrization(parametrised, "weight", nn.Identity())
    assert not is_plain(parametrised, nn.Linear)
    overridden = copy.deepcopy(linear)
    overridden.forward = linear.forward
    assert not is_plain(overridden, nn.Linear)
    subclassed = copy.deepcopy(linear)
    subclassed.weight = type("Weight", (nn.Parameter,), {})(linear.weight.detach())
    assert not is_plain(subclassed, nn.Linear)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not is_plain(linear, nn.Linear)
    assert any_hooks(nn.Identity())
    handle.remove()
    assert is_plain(linear, nn.Linear)
