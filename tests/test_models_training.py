"""Training: dropout, checkpointing, frozen and tied parameters, autocast, half precision, copies."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call

import bertfast
from helpers.checkpoints import ALL_HEADS, HEADS, family_of, ours, tiny_stock_config
from helpers.models import (
    assert_close,
    assert_same,
    assert_same_gradients,
    gradients,
    inputs_of,
    labels_of,
    mask_of,
    pair,
)
from helpers.tolerance import assert_models_within, assert_within, eps_of

BASES = ["BertModel", "RobertaModel", "DistilBertModel"]
MASKED_LM = ["BertForMaskedLM", "BertForPreTraining", "RobertaForMaskedLM", "DistilBertForMaskedLM"]


def dropout_fields(name, hidden=0.5, attention=0.5, head=0.5):
    if family_of(name) == "distilbert":
        return {"dropout": hidden, "attention_dropout": attention, "qa_dropout": head, "seq_classif_dropout": head}
    fields = {"hidden_dropout_prob": hidden, "attention_probs_dropout_prob": attention}
    return fields if head is None else {**fields, "classifier_dropout": head}


def training(name, dtype=torch.float32, **rates):
    """Our model with dropout, in train mode."""
    return pair(name, dtype=dtype, **dropout_fields(name, **rates))[1].train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("padding", [None, "right"])
@pytest.mark.parametrize("name", BASES)
def test_dropout_is_redrawn_and_follows_the_seed(name, padding, dtype):
    model = training(name, dtype)
    inputs = inputs_of(name, padding)

    def run(seed=None):
        if seed is not None:
            torch.manual_seed(seed)
        return model(**inputs).last_hidden_state

    first, second = run(3), run()
    assert not torch.equal(first, second)
    assert torch.equal(run(3), first)
    assert torch.equal(run(), second)
    assert not torch.equal(run(4), first)
    model.eval()
    assert torch.equal(run(3), run(4))


@pytest.mark.parametrize("rate", ["hidden", "attention", "head"])
@pytest.mark.parametrize("name", ALL_HEADS)
def test_every_rate_of_dropout_takes_effect(name, rate):
    rates = {"hidden": 0.0, "attention": 0.0, "head": 0.0, rate: 0.5}
    model = training(name, **rates)
    inputs = inputs_of(name, "right")
    torch.manual_seed(0)
    first, second = model(**inputs)[0], model(**inputs)[0]
    has_head_dropout = any(isinstance(m, nn.Dropout) and m.p == 0.5 for m in model.modules())
    assert torch.equal(first, second) == (rate == "head" and not has_head_dropout)


@pytest.mark.parametrize("name", ALL_HEADS)
def test_heads_drop_where_stock_drops(name):
    stock, model = pair(name)
    seen = []
    paths = [path for path, module in model.named_modules() if isinstance(module, nn.Dropout)]
    for one in (model, stock):
        calls = []
        for path in paths:
            one.get_submodule(path).register_forward_hook(
                lambda module, args, output, path=path, calls=calls: calls.append((path, args[0]))
            )
        one(**inputs_of(name))
        seen.append(calls)
    assert [path for path, _ in seen[0]] == [path for path, _ in seen[1]]
    for (path, mine), (_, theirs) in zip(*seen, strict=True):
        assert_close(mine, theirs, path)


def test_zero_dropout_in_train_mode_is_eval_mode():
    for name in ALL_HEADS:
        for dtype in (torch.float32, torch.float64):
            _, model = pair(name, dtype=dtype)
            inputs = {**inputs_of(name, "holes"), **labels_of(name, "holes")}
            evaluated, trained = model(**inputs), model.train()(**inputs)
            assert all(torch.equal(evaluated[key], trained[key]) for key in evaluated)


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_probabilities_outside_the_range_are_refused(p):
    model = training("BertModel", hidden=0.1)
    model.encoder.layer[0].output.LayerNorm.dropout = p
    with pytest.raises(ValueError, match="between 0 and 1"):
        model(**inputs_of("BertModel"))


LARGE = 1e4


@pytest.mark.parametrize("where", ["attention_out", "ffn_out"])
@pytest.mark.parametrize("padding", [None, "right"])
def test_dropout_masks_differ_between_layers_and_have_the_rate(where, padding):
    """The bias of one linear layer outweighs everything, so that LayerNorm's input shows which elements were kept."""
    p, width = 0.25, 512
    config = tiny_stock_config(
        "BertModel",
        hidden_size=width,
        num_attention_heads=4,
        num_hidden_layers=3,
        **dropout_fields("BertModel", 0.0, 0.0),
    )
    model = ours("BertModel")(config).train()
    norms = []
    with torch.no_grad():
        for layer in model.encoder.layer:
            part = layer.attention.output if where == "attention_out" else layer.output
            part.dense.bias.fill_(LARGE)
            part.LayerNorm.dropout = p
            norms.append(part.LayerNorm)
    # Spied by wrapping the op's output, without a hook, which would decide how the model runs.
    kept = []
    for norm in norms:

        def forward(x, residual=None, norm=norm):
            out = type(norm).forward(norm, x, residual)
            kept.append(out > 0)
            return out

        norm.forward = forward
    torch.manual_seed(0)
    model(**inputs_of("BertModel", padding))
    rows = 21 if padding is None else 12
    masks = [mask.reshape(rows, width) for mask in kept]
    assert len(masks) == 3
    sigma = (p * (1 - p) / (rows * width)) ** 0.5
    for mask in masks:
        assert abs(mask.double().mean() - (1 - p)) < 4 * sigma
    for a, b in ((0, 1), (1, 2), (0, 2)):
        agree = (masks[a] == masks[b]).double().mean()
        # Independent masks agree where both keep or both drop.
        expected = p * p + (1 - p) * (1 - p)
        assert abs(agree - expected) < 5 * (expected * (1 - expected) / (rows * width)) ** 0.5


def test_kept_values_are_scaled():
    model = training("DistilBertModel", dtype=torch.float64, hidden=0.5, attention=0.0)
    inputs = inputs_of("DistilBertModel")
    dropped = model.embeddings(inputs["input_ids"])
    plain = model.eval().embeddings(inputs["input_ids"])
    zero = dropped == 0
    assert 0.4 < zero.double().mean() < 0.6
    assert_close(dropped[~zero], plain[~zero] * 2, "kept values")


def test_attention_probabilities_are_dropped_and_scaled():
    model = training("BertModel", dtype=torch.float64, hidden=0.0, attention=0.25)
    inputs = inputs_of("BertModel", "right")
    dropped = model(**inputs, output_attentions=True).attentions[0]
    plain = model.eval()(**inputs, output_attentions=True).attentions[0]
    real = plain > 0
    zero = dropped == 0
    assert 0.1 < zero[real].double().mean() < 0.4
    assert_close(dropped[real & ~zero], plain[real & ~zero] / 0.75, "kept probabilities")


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaModel", "DistilBertForSequenceClassification"])
def test_checkpointing_gives_the_same_gradients_bit_by_bit(name, padding, use_reentrant):
    inputs = {**inputs_of(name, padding), **labels_of(name, padding)}
    # The reentrant kind runs forward without gradients, where faster kernels may serve that round in another order.
    backend = "torch" if use_reentrant else "auto"
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for enabled in (False, True):
            model = training(name, dtype)
            if enabled:
                model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            torch.manual_seed(5)
            with bertfast.use_backend(backend):
                output = model(**inputs)[0]
                output.float().square().sum().backward()
            results.append((output, gradients(model), torch.rand(1)))
        (output, wanted, after), (checkpointed, got, after_checkpointed) = results
        assert torch.equal(output, checkpointed)
        assert torch.equal(after, after_checkpointed)
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[key], wanted[key]) for key in wanted)
        assert any(gradient.any() for gradient in got.values())


@pytest.mark.parametrize("padding", [None, "right"])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaModel"])
def test_reentrant_checkpointing_replays_dropout_on_the_default_backends(name, padding):
    inputs = {**inputs_of(name, padding), **labels_of(name, padding)}
    results = []
    for enabled in (False, True):
        model = training(name)
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        torch.manual_seed(5)
        model(**inputs)[0].square().mean().backward()
        results.append((gradients(model), torch.rand(1)))
    (wanted, after), (got, after_checkpointed) = results
    assert torch.equal(after, after_checkpointed)
    for key in wanted:
        torch.testing.assert_close(got[key], wanted[key], msg=key)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("inner", ["torch", "cpu, torch"])
def test_recomputation_takes_the_backends_of_the_forward_pass(inner, use_reentrant):
    """Another backend would drop other elements; CUDA's backward passes run on a thread of their own."""
    inputs, results = inputs_of("BertModel", "right"), []
    for enabled in (False, True):
        model = training("BertModel")
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        torch.manual_seed(5)
        with bertfast.use_backend(*inner.split(", ")):
            loss = model(**inputs)[0].square().mean()
        with bertfast.use_backend("auto" if inner == "torch" else "torch"):
            loss.backward()
        results.append(gradients(model))
    for key, wanted in results[0].items():
        torch.testing.assert_close(results[1][key], wanted, msg=key)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_with_attentions_and_hidden_states(use_reentrant):
    _, model = pair("BertModel")
    inputs = inputs_of("BertModel", "holes")
    asked = {"output_attentions": True, "output_hidden_states": True}
    wanted = model(**inputs, **asked)
    model.train().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    got = model(**inputs, **asked)
    for field in ("attentions", "hidden_states"):
        for mine, theirs in zip(got[field], wanted[field], strict=True):
            assert torch.equal(mine, theirs)
    got.last_hidden_state.sum().backward()


def test_checkpointing_is_off_in_eval_mode_and_with_frozen_embeddings_it_trains():
    _, model = pair("BertModel")
    model.gradient_checkpointing_enable()
    calls = []
    model.encoder._checkpoint = lambda function, *args: (calls.append(1), function(*args))[1]
    model(**inputs_of("BertModel"))
    assert calls == []
    model.train()(**inputs_of("BertModel"))
    assert calls == [1, 1]
    model.gradient_checkpointing_enable()
    model.embeddings.requires_grad_(False)
    model(**inputs_of("BertModel", "right")).last_hidden_state.square().sum().backward()
    trained = gradients(model)
    assert "encoder.layer.0.attention.self.query.weight" in trained
    assert not any(key.startswith("embeddings") for key in trained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(
    "frozen",
    ["embeddings", "layer.0", "LayerNorm", "bias", "query", "word_embeddings", "weight", "layer.1.output", "dense"],
)
def test_frozen_parameters_get_no_gradient_and_change_no_other(frozen, dtype):
    stock, model = pair("BertForSequenceClassification", dtype=dtype)
    inputs = {**inputs_of("BertForSequenceClassification", "right"), "labels": torch.tensor([0, 1, 1])}
    model(**inputs).loss.backward()
    whole = gradients(model)
    model.zero_grad()
    for one in (model, stock):
        for key, parameter in one.named_parameters():
            parameter.requires_grad_(frozen not in key)
        one(**inputs).loss.backward()
    part = gradients(model)
    assert part.keys() == gradients(stock).keys() == {key for key in whole if frozen not in key}
    assert all(torch.equal(part[key], whole[key]) for key in part)


def test_only_the_embeddings_given_are_trained():
    stock, model = pair("BertForMaskedLM")
    embeds = torch.randn(3, 7, 24, dtype=torch.float64)
    results = []
    for one in (model, stock):
        one.requires_grad_(False)
        leaf = embeds.clone().requires_grad_()
        one(
            inputs_embeds=leaf, attention_mask=mask_of("holes"), **labels_of("BertForMaskedLM", "holes")
        ).loss.backward()
        results.append(leaf.grad)
        assert not gradients(one)
    assert_close(*results, "inputs_embeds")


@pytest.mark.parametrize("name", MASKED_LM)
def test_tied_weights_stay_tied_and_follow_stock_over_steps(name):
    stock, model = pair(name)
    inputs = {**inputs_of(name, "right"), **labels_of(name, "right")}
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2, weight_decay=0.1) for one in (model, stock)]
    for _ in range(3):
        for one, optimizer in zip((model, stock), optimizers, strict=True):
            optimizer.zero_grad()
            one.train()(**inputs).loss.backward()
        assert_same_gradients(model, stock)
        for optimizer in optimizers:
            optimizer.step()
    word, decoder = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert word is decoder
    assert word is model.get_parameter(f"{model.base_model_prefix}.embeddings.word_embeddings.weight")
    wanted = dict(stock.named_parameters(remove_duplicate=False))
    for key, parameter in model.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(parameter, wanted[key], msg=key)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "DistilBertForMaskedLM"])
def test_a_tied_weight_gets_the_sum_of_both_gradients(name):
    _, tied = pair(name)
    untied = ours(name)(tied.config.replaced(tie_word_embeddings=False)).double().eval()
    untied.load_state_dict(tied.state_dict())
    inputs = {**inputs_of(name), **labels_of(name)}
    tied(**inputs).loss.backward(), untied(**inputs).loss.backward()
    word, decoder = untied.get_input_embeddings().weight, untied.get_output_embeddings().weight
    assert word is not decoder
    assert word.grad.any()
    assert decoder.grad.any()
    assert_close(tied.get_input_embeddings().weight.grad, word.grad + decoder.grad, "tied")


@pytest.mark.parametrize("name", [*BASES, "RobertaForMaskedLM"])
def test_padding_rows_of_the_tables_get_no_gradient(name):
    stock, model = pair(name)
    inputs = inputs_of(name)
    padding = model.config.pad_token_id
    inputs["input_ids"][0, 3:] = padding
    if family_of(name) == "roberta":
        inputs["input_ids"][1, 0] = padding
    for one in (model, stock):
        one(**inputs)[0].square().sum().backward()
    assert_same_gradients(model, stock)
    word = model.base_model.embeddings.word_embeddings.weight.grad
    if "MaskedLM" not in name:
        assert not word[padding].any()
    if family_of(name) == "roberta":
        assert not model.base_model.embeddings.position_embeddings.weight.grad[padding].any()


@pytest.mark.parametrize("name", ALL_HEADS)
def test_autocast_dtypes_are_those_of_stock(name):
    for padding in (None, "right"):
        stock, model = pair(name, dtype=torch.float32)
        inputs = {**inputs_of(name, padding), **labels_of(name, padding)}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = model(**inputs, output_hidden_states=True)
            plain = model(**inputs)
            wanted = stock(**inputs, output_hidden_states=True)
        for key in plain:
            assert plain[key].dtype == wanted[key].dtype, key
        for mine, theirs in zip(got.hidden_states, wanted.hidden_states, strict=True):
            assert mine.dtype == theirs.dtype
        plain[0].sum().backward(), wanted[0].sum().backward()
        mine, theirs = gradients(model), gradients(stock)
        assert mine.keys() == theirs.keys()
        assert {gradient.dtype for gradient in mine.values()} == {torch.float32}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "name", ["BertForSequenceClassification", "RobertaForMaskedLM", "DistilBertForTokenClassification"]
)
def test_autocast_is_as_exact_as_stock(name):
    mask = mask_of("right")
    inputs = {**inputs_of(name, mask), **labels_of(name, mask)}

    def run(one, dtype):
        one.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float64):
            loss = one(**inputs).loss
        loss.backward()
        return {"loss": loss.detach().float(), **{key: value.clone() for key, value in gradients(one).items()}}

    stock, model = pair(name, dtype=torch.float32)
    stocks = []
    for attention in ("eager", "sdpa"):
        stock.set_attn_implementation(attention)
        stocks.append(run(stock, torch.float32))
    mine = run(model, torch.float32)
    exact = {key: value.double() for key, value in run(stock.double(), torch.float64).items()}
    largest = max(value.abs().max() for key, value in exact.items() if key != "loss")
    for key in exact:
        noise = eps_of(torch.bfloat16) * (exact[key].abs().max() if key == "loss" else largest)
        assert_within(mine[key], [one[key] for one in stocks], exact[key], noise, f"{name} {key}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", [heads[0] for heads in HEADS.values()])
def test_half_precision_models(name, dtype):
    stock, model = pair(name, dtype=torch.float32)
    model = model.half() if dtype is torch.float16 else model.bfloat16()
    assert model.dtype is dtype
    for kind in (None, "right", "left", "empty row"):
        hidden = model(**inputs_of(name, kind)).last_hidden_state
        assert hidden.dtype is dtype
        assert hidden.isfinite().all()
    assert_models_within(model, stock, inputs_of(name, "right"), dtype=dtype, real=mask_of("right"))


def test_mixed_dtypes_of_parameters():
    """LayerNorms kept in fp32 in a half-precision model, as k-bit training prepares it."""
    _, model = pair("BertForMaskedLM", dtype=torch.bfloat16)
    for module in model.modules():
        if "LayerNorm" in type(module).__name__:
            module.float()
    inputs = {**inputs_of("BertForMaskedLM", "right"), **labels_of("BertForMaskedLM", "right")}
    output = model(**inputs)
    output.loss.backward()
    assert output.logits.dtype is torch.bfloat16
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.dtype == parameter.dtype


def saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded],
    ids=["deepcopy", "pickle", "save"],
)
@pytest.mark.parametrize("name", ["BertForPreTraining", "RobertaForSequenceClassification", "DistilBertForMaskedLM"])
def test_copies_of_models_run_alike_and_apart(name, copied, checkpointed):
    _, model = pair(name)
    if checkpointed:
        model.train().gradient_checkpointing_enable()
    inputs = inputs_of(name, "holes")
    wanted = model(**inputs)[0]
    other = copied(model)
    assert other.training == model.training
    assert other.is_gradient_checkpointing == checkpointed
    got = other(**inputs)[0]
    assert torch.equal(got, wanted)
    got.sum().backward()
    assert not gradients(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    assert torch.equal(model(**inputs)[0], wanted)


def test_outputs_with_gradients_can_be_copied_when_detached():
    _, model = pair("BertModel")
    with torch.inference_mode():
        output = model(**inputs_of("BertModel", "right"), output_hidden_states=True)
    other = pickle.loads(pickle.dumps(output))
    assert torch.equal(other.last_hidden_state, output.last_hidden_state)
    assert len(other.hidden_states) == 3


@pytest.mark.parametrize("name", BASES)
def test_no_grad_and_inference_mode_give_the_same_result(name):
    for dtype in (torch.float32, torch.float64):
        _, model = pair(name, dtype=dtype)
        inputs = inputs_of(name, "right")
        wanted = model(**inputs).last_hidden_state
        assert wanted.requires_grad
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                got = model(**inputs).last_hidden_state
            assert not got.requires_grad
            torch.testing.assert_close(got.clone(), wanted)


def test_inputs_are_not_written_to():
    for name in ALL_HEADS:
        _, model = pair(name)
        inputs = {**inputs_of(name, "holes"), **labels_of(name, "holes")}
        before = {key: value.clone() for key, value in inputs.items()}
        model.train()(**inputs)[0].sum().backward()
        assert all(torch.equal(inputs[key], before[key]) for key in inputs), name


def test_functional_call_and_state_dict_with_assign():
    _, model = pair("BertForMaskedLM")
    _, other = pair("BertForMaskedLM", seed=1)
    inputs = inputs_of("BertForMaskedLM", "right")
    wanted = other(**inputs).logits
    weights = dict(other.named_parameters())
    assert torch.equal(functional_call(model, weights, kwargs=inputs).logits, wanted)
    assert not torch.equal(model(**inputs).logits, wanted)
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(model(**inputs).logits, wanted)


def test_gradients_accumulate_over_batches():
    stock, model = pair("DistilBertForMaskedLM")
    for one in (model, stock):
        for kind in ("right", "holes"):
            inputs = {**inputs_of("DistilBertForMaskedLM", kind), **labels_of("DistilBertForMaskedLM", kind)}
            one.train()(**inputs).loss.backward()
    assert_same_gradients(model, stock)
    assert_same(model, stock, inputs_of("DistilBertForMaskedLM"))
