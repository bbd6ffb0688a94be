"""Attention masks of models: every pattern, dtype and rank means what it means in transformers."""

from __future__ import annotations

import pytest
import torch

from helpers.models import PADDING, assert_close, assert_same, gradients, inputs_of, mask_of, pair

TOKEN_HEADS = ["BertForMaskedLM", "RobertaForTokenClassification", "DistilBertForMaskedLM"]
BASES = ["BertModel", "RobertaModel", "DistilBertModel"]
PARTLY = [kind for kind in PADDING if kind != "all empty"]


@pytest.mark.parametrize("unpad", [True, False], ids=["unpad", "padded"])
@pytest.mark.parametrize("kind", PADDING)
@pytest.mark.parametrize("name", TOKEN_HEADS)
def test_every_pattern_equals_stock(name, kind, unpad):
    stock, model = pair(name)
    model.base_model.unpad = unpad
    mask = mask_of(kind)
    # Without unpadding even rows that nobody looks at are stock's, those of a row without any key included.
    assert_same(model, stock, inputs_of(name, mask), rows=mask if unpad else None)
    for parameter in gradients(model).values():
        assert parameter.isfinite().all()


@pytest.mark.parametrize("unpad", [True, False], ids=["unpad", "padded"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", BASES)
def test_random_patterns_equal_stock(name, seed, unpad):
    stock, model = pair(name)
    model.unpad = unpad
    mask = torch.randint(0, 2, (3, 7), generator=torch.Generator().manual_seed(seed))
    mask[:, seed % 2] = 1
    assert_same(model, stock, inputs_of(name, mask, seed), rows=mask)


@pytest.mark.parametrize("kind", PARTLY)
@pytest.mark.parametrize("name", BASES)
def test_a_masked_token_has_no_influence(name, kind):
    _, model = pair(name)
    inputs = inputs_of(name, kind)
    masked = inputs["attention_mask"] == 0
    other = torch.where(masked, (inputs["input_ids"] + 7) % 61, inputs["input_ids"])
    if name == "RobertaModel":
        inputs["position_ids"] = torch.arange(2, 9).expand(3, 7)
    first = model(**inputs).last_hidden_state
    second = model(**{**inputs, "input_ids": other}).last_hidden_state
    assert torch.equal(first[~masked], second[~masked])


@pytest.mark.parametrize("kind", ["right", "left", "holes"])
@pytest.mark.parametrize("name", BASES)
def test_any_dtype(name, kind):
    _, model = pair(name)
    inputs = inputs_of(name, kind)
    mask = inputs.pop("attention_mask")
    for unpad in (True, False):
        model.unpad = unpad
        wanted = model(**inputs, attention_mask=mask)
        for dtype in (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int32,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
        ):
            got = model(**inputs, attention_mask=mask.to(dtype))
            assert all(torch.equal(got[key], wanted[key]) for key in wanted), dtype
        for factor in (3, -1, 0.25):
            got = model(**inputs, attention_mask=mask * factor)
            assert torch.equal(got.last_hidden_state, wanted.last_hidden_state), factor


@pytest.mark.parametrize("name", BASES)
def test_no_mask_is_a_mask_of_ones(name):
    for dtype in (torch.float32, torch.float64):
        _, model = pair(name, dtype=dtype)
        inputs = inputs_of(name)
        wanted = model(**inputs)
        for unpad in (True, False):
            model.unpad = unpad
            got = model(**inputs, attention_mask=torch.ones(3, 7))
            for key in wanted:
                if unpad:
                    assert torch.equal(got[key], wanted[key])
                else:
                    torch.testing.assert_close(got[key], wanted[key])


def forms_of(mask, heads=3):
    """The same (B, S) key mask in every rank."""
    batch, length = mask.shape
    pairs = mask[:, None, None, :]
    return {
        "(B, S)": mask,
        "(B, 1, 1, S)": pairs,
        "(B, 1, S, S)": pairs.expand(batch, 1, length, length),
        "(B, 1, S, S) copied": pairs.repeat(1, 1, length, 1),
        "(B, H, S, S)": pairs.expand(batch, heads, length, length),
        "(B, H, 1, S)": pairs.repeat(1, heads, 1, 1),
        "(B, S, S)": mask[:, None, :].expand(batch, length, length),
        "(B, S, S) transposed": mask[:, None, :].repeat(1, length, 1).transpose(1, 2).contiguous().transpose(1, 2),
        "(B, 1, S)": mask[:, None, :],
    }


@pytest.mark.parametrize("kind", ["right", "left", "holes", "empty row"])
@pytest.mark.parametrize("name", BASES)
def test_any_rank(name, kind):
    stock, model = pair(name)
    inputs = inputs_of(name, kind)
    mask = inputs.pop("attention_mask")
    model.unpad = False
    wanted = model(**inputs, attention_mask=mask).last_hidden_state
    additive = torch.zeros(3, 7, dtype=torch.float64).masked_fill(mask == 0, -torch.inf)
    for form, given in forms_of(mask).items():
        for kept in (given, given != 0, given.to(torch.uint8)):
            assert_close(model(**inputs, attention_mask=kept).last_hidden_state, wanted, f"{form} {kept.dtype}")
        if form in ("(B, 1, S, S)", "(B, H, S, S)"):
            theirs = stock(**inputs, attention_mask=given != 0).last_hidden_state
            assert_close(theirs, wanted, f"stock, {form}")
    for form, given in forms_of(additive).items():
        if given.dim() > 2:
            assert_close(model(**inputs, attention_mask=given).last_hidden_state, wanted, f"additive {form}")


@pytest.mark.parametrize("name", BASES)
def test_masks_over_pairs_equal_stock(name):
    stock, model = pair(name)
    generator = torch.Generator().manual_seed(3)
    inputs = inputs_of(name)
    keep = torch.rand(3, 3, 7, 7, generator=generator) < 0.6
    keep |= torch.eye(7, dtype=torch.bool)
    bias = torch.randn(3, 3, 7, 7, generator=generator, dtype=torch.float64) * 3
    for mask in (keep, keep[:, :1], keep[:1, :1], bias, bias[:1], bias[:, :1], bias.masked_fill(~keep, -torch.inf)):
        got = assert_same(model, stock, {**inputs, "attention_mask": mask})
        assert (got.last_hidden_state - model(**inputs).last_hidden_state).abs().max() > 1e-3
    assert_same(model, stock, {**inputs, "attention_mask": keep.int()}, stock_inputs={**inputs, "attention_mask": keep})
    three = model(**inputs, attention_mask=keep[:, 0]).last_hidden_state
    assert_close(three, model(**inputs, attention_mask=keep[:, :1]).last_hidden_state, "(B, S, S)")
    three = model(**inputs, attention_mask=bias[:, 0]).last_hidden_state
    assert_close(three, model(**inputs, attention_mask=bias[:, :1]).last_hidden_state, "(B, S, S)")


@pytest.mark.parametrize("form", ["(B, S, S)", "(B, 1, S, S)", "int", "additive"])
@pytest.mark.parametrize("name", BASES)
def test_block_diagonal_masks_are_separate_runs(name, form):
    _, model = pair(name)
    offset = 2 if name == "RobertaModel" else 0
    inputs = inputs_of(name)
    ids = inputs["input_ids"][:1]
    types = inputs["token_type_ids"][:1] if "token_type_ids" in inputs else None
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]) + offset
    block = torch.block_diag(torch.ones(3, 3), torch.ones(4, 4)).unsqueeze(0)
    mask = {
        "(B, S, S)": block.bool(),
        "(B, 1, S, S)": block.bool().unsqueeze(1),
        "int": block.long(),
        "additive": torch.zeros_like(block).masked_fill(block == 0, torch.finfo(torch.float32).min),
    }[form]

    def run(start, stop, mask=None):
        typed = {} if types is None else {"token_type_ids": types[:, start:stop]}
        where = positions[:, start:stop]
        return model(ids[:, start:stop], attention_mask=mask, position_ids=where, **typed).last_hidden_state

    assert_close(run(0, 7, mask), torch.cat([run(0, 3), run(3, 7)], dim=1), form)


@pytest.mark.parametrize("name", BASES)
def test_large_finite_biases_are_arithmetic(name):
    stock, model = pair(name)
    inputs = inputs_of(name)
    for low in (-10000.0, -30000.0, torch.finfo(torch.float32).min, torch.finfo(torch.float64).min):
        bias = torch.zeros(3, 1, 7, 7, dtype=torch.float64)
        bias[:, :, :, 4:] = low
        # A row of one large number is a uniform shift of its scores: attention as without the mask. At finfo.min
        # the scores vanish beside it, and the average is uniform.
        bias[1] = low
        got = assert_same(model, stock, {**inputs, "attention_mask": bias})
        assert got.last_hidden_state.isfinite().all()
        if low == -10000.0:
            unmasked = model(**inputs).last_hidden_state[1]
            torch.testing.assert_close(got.last_hidden_state[1], unmasked, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_large_biases_stay_finite_in_half_precision(dtype):
    _, model = pair("BertModel", dtype=dtype)
    inputs = inputs_of("BertModel")
    for low in (-10000.0, torch.finfo(torch.float32).min):
        bias = torch.full((3, 1, 1, 7), low)
        for given in (bias, bias.to(torch.float64), bias.clamp_min(torch.finfo(dtype).min).to(dtype)):
            assert model(**inputs, attention_mask=given).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "-inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
def test_a_query_without_keys_attends_to_nothing(dtype, additive):
    _, model = pair("BertModel", dtype=dtype)
    inputs = inputs_of("BertModel")
    mask = torch.ones(3, 1, 7, 7, dtype=torch.bool)
    mask[1, 0, 2], mask[2] = False, False
    given = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf) if additive else mask
    output = model(**inputs, attention_mask=given)
    assert output.last_hidden_state.isfinite().all()
    weights = model(**inputs, attention_mask=given, output_attentions=True).attentions
    for layer in weights:
        assert not layer[1, :, 2].any()
        assert not layer[2].any()
        torch.testing.assert_close(layer[0].sum(-1), torch.ones_like(layer[0, ..., 0]), rtol=1e-2, atol=1e-2)
    output.last_hidden_state[:2].double().square().sum().backward()
    for key, gradient in gradients(model).items():
        assert gradient.isfinite().all(), key
    # Without any attention a token is a function of itself alone, so a value projection cannot matter.
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.value.weight.zero_()
            layer.attention.self.value.bias.zero_()
    without_values = model(**inputs, attention_mask=given).last_hidden_state
    assert torch.equal(without_values[2], output.last_hidden_state[2])
    assert not torch.equal(without_values[0], output.last_hidden_state[0])


@pytest.mark.parametrize("unpad", [True, False], ids=["unpad", "padded"])
def test_a_row_without_tokens_does_not_spoil_gradients(unpad):
    stock, model = pair("DistilBertForMaskedLM")
    model.distilbert.unpad = unpad
    inputs = inputs_of("DistilBertForMaskedLM", "empty row")
    kept = model(**inputs).logits[0, :5]
    kept.square().sum().backward()
    alone = stock(**{key: value[:1, :5] for key, value in inputs.items()}).logits[0]
    alone.square().sum().backward()
    assert_close(kept, alone, "logits")
    wanted = gradients(stock)
    for key, gradient in gradients(model).items():
        assert_close(gradient, wanted[key], key)


@pytest.mark.parametrize("unpad", [True, False], ids=["unpad", "padded"])
def test_masks_in_half_precision_and_float32(unpad):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        _, model = pair("DistilBertModel", dtype=dtype)
        model.unpad = unpad
        for kind in PADDING:
            inputs = inputs_of("DistilBertModel", kind)
            hidden = model(**inputs).last_hidden_state
            assert hidden.dtype == dtype
            assert hidden.isfinite().all()


def test_wrong_shapes_are_named():
    _, model = pair("BertModel")
    inputs = inputs_of("BertModel")
    for shape in (
        (7,),
        (3, 6),
        (2, 7),
        (7, 3),
        (2, 7, 7),
        (3, 7, 6),
        (3, 6, 7),
        (3, 1, 7, 8),
        (2, 1, 7, 7),
        (1, 3, 1, 7, 7),
        (),
    ):
        with pytest.raises(ValueError, match="attention_mask|attn_mask") as error:
            model(**inputs, attention_mask=torch.ones(shape))
        assert str(shape) in str(error.value), error.value
    with pytest.raises(ValueError, match=r"\(3, 2, 7, 7\)"):
        model(**inputs, attention_mask=torch.ones(3, 2, 7, 7))


def test_masks_are_not_written_to():
    for name in BASES:
        _, model = pair(name)
        inputs = inputs_of(name, "holes")
        for mask in (
            *forms_of(inputs["attention_mask"]).values(),
            *forms_of(inputs["attention_mask"].double()).values(),
        ):
            before = mask.clone()
            model(**{**inputs, "attention_mask": mask})
            assert torch.equal(mask, before)
