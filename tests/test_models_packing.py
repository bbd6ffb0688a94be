"""Padding is removed once around the encoder: when, with what result, and what it may cost."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bertfast.nn import BertEncoderLayer, FusedBertEmbeddings
from helpers.models import (
    PADDING,
    VOCAB,
    assert_close,
    assert_same,
    assert_same_gradients,
    gradients,
    inputs_of,
    labels_of,
    mask_of,
    pair,
)

TOKEN_HEADS = [
    "BertForMaskedLM",
    "BertForTokenClassification",
    "RobertaForMaskedLM",
    "DistilBertForTokenClassification",
]
FIRST_TOKEN = [
    "BertModel",
    "BertForPreTraining",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "RobertaModel",
    "RobertaForSequenceClassification",
    "DistilBertForSequenceClassification",
]
CHOICES = ["BertForMultipleChoice", "RobertaForMultipleChoice", "DistilBertForMultipleChoice"]
PADDED = [(3, 7, 24)] * 2


@pytest.fixture
def seen(monkeypatch):
    """The shapes that encoder layers are given. Found without a hook, since a hook decides how they run."""
    shapes = []
    forward = BertEncoderLayer.forward

    def spied(self, hidden_states, *args, **kwargs):
        shapes.append(tuple(hidden_states.shape))
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(BertEncoderLayer, "forward", spied)
    return shapes


def packed(mask):
    return [(1, int(mask.sum()), 24)] * 2


@pytest.mark.parametrize("kind", [kind for kind in PADDING if kind != "full"])
@pytest.mark.parametrize("name", TOKEN_HEADS)
def test_layers_see_only_real_tokens_and_padded_rows_are_zero(name, kind, seen, monkeypatch):
    _, model = pair(name)
    embedded = []
    forward = FusedBertEmbeddings.forward
    monkeypatch.setattr(
        FusedBertEmbeddings,
        "forward",
        lambda self, ids, *rest: (embedded.append(tuple(ids.shape)), forward(self, ids, *rest))[1],
    )
    inputs = inputs_of(name, kind)
    mask = inputs["attention_mask"]
    hidden = model.base_model(**inputs).last_hidden_state
    assert seen == packed(mask)
    assert embedded == [(1, int(mask.sum()))]
    assert hidden.shape == (3, 7, 24)
    assert not hidden[mask == 0].any()
    assert (hidden[mask == 1] != 0).all()


@pytest.mark.parametrize("name", TOKEN_HEADS)
def test_a_full_mask_and_no_mask_run_on_the_batch_as_it_is(name, seen):
    _, model = pair(name)
    full, none = model(**inputs_of(name, "full"))[0], model(**inputs_of(name))[0]
    assert torch.equal(full, none)
    assert seen == PADDED * 2


@pytest.mark.parametrize("kind", [kind for kind in PADDING if kind != "all empty"])
@pytest.mark.parametrize("name", TOKEN_HEADS)
def test_packed_and_padded_agree(name, kind, seen):
    _, model = pair(name)
    _, other = pair(name)
    other.base_model.unpad = False
    mask = mask_of(kind)
    assert_same(model, other, inputs_of(name, kind), rows=mask)
    assert seen[2:] == PADDED


@pytest.mark.parametrize("kind", ["right", "left", "holes", "empty row"])
@pytest.mark.parametrize("name", TOKEN_HEADS)
def test_a_sequence_alone_is_the_sequence_in_a_batch(name, kind):
    _, model = pair(name)
    inputs = inputs_of(name, kind)
    mask = inputs.pop("attention_mask").bool()
    offset = 2 if name.startswith("Roberta") else 0
    inputs["position_ids"] = torch.arange(7).expand(3, 7) + offset
    batched = model(**inputs, attention_mask=mask)[0]
    for row in range(3):
        if mask[row].any():
            alone = model(**{key: value[row][mask[row]].unsqueeze(0) for key, value in inputs.items()})[0]
            assert_close(batched[row][mask[row]], alone[0], f"row {row}")


@pytest.mark.parametrize("kind", ["left", "empty row"])
@pytest.mark.parametrize("name", FIRST_TOKEN)
def test_a_first_token_that_is_masked_and_read_keeps_padding(name, kind, seen):
    stock, model = pair(name)
    assert_same(model, stock, {**inputs_of(name, kind), **labels_of(name, kind)})
    assert seen == PADDED
    del seen[:]
    model(**inputs_of(name, "right"))
    model(**inputs_of(name, "holes"))
    assert seen == packed(mask_of("right")) + packed(mask_of("holes"))


@pytest.mark.parametrize("name", CHOICES)
def test_choices_with_a_masked_first_token_keep_padding(name, seen):
    stock, model = pair(name)
    for kind in ("left", "right"):
        assert_same(model, stock, {**inputs_of(name, kind), **labels_of(name)})
    assert seen == [(6, 7, 24)] * 2 + [(1, 2 * int(mask_of("right").sum()), 24)] * 2


@pytest.mark.parametrize(
    "name", ["BertForQuestionAnswering", "RobertaForQuestionAnswering", "DistilBertForQuestionAnswering"]
)
@pytest.mark.parametrize("kind", ["right", "left", "holes"])
def test_question_answering_with_positions_keeps_padding(name, kind, seen):
    stock, model = pair(name)
    inputs = inputs_of(name, kind)
    positions = {"start_positions": torch.tensor([6, 6, 0]), "end_positions": torch.tensor([2, 5, 6])}
    assert_same(model, stock, {**inputs, **positions})
    assert seen == PADDED
    del seen[:]
    assert_same(model, stock, inputs, rows=inputs["attention_mask"])
    model(**inputs, start_positions=positions["start_positions"])
    assert seen == packed(inputs["attention_mask"]) * 2


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForPreTraining", *TOKEN_HEADS[1:]])
def test_a_label_on_a_masked_token_keeps_padding(name, seen):
    stock, model = pair(name)
    inputs, labels = inputs_of(name, "right"), labels_of(name, "right")
    assert_same(model, stock, {**inputs, **labels}, rows=inputs["attention_mask"])
    assert seen == packed(inputs["attention_mask"])
    del seen[:]
    labels["labels"] = labels["labels"].clone()
    labels["labels"][2, 6] = 1
    assert_same(model, stock, {**inputs, **labels})
    assert seen == PADDED
    del seen[:]
    assert_same(model, stock, {**inputs, **labels, "labels": labels["labels"].clamp_min(0)})
    assert seen == PADDED


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_losses_of_both_paths_are_those_of_stock(name, seen):
    stock, model = pair(name)
    inputs = {**inputs_of(name, "holes"), **labels_of(name, "holes")}
    mine, theirs = model(**inputs).loss, stock(**inputs).loss
    assert seen == packed(inputs["attention_mask"])
    assert_close(mine, theirs, "loss")
    mine.backward(), theirs.backward()
    assert_same_gradients(model, stock)


@pytest.mark.parametrize("asked", [{"output_attentions": True}, {"output_hidden_states": True}])
@pytest.mark.parametrize("name", TOKEN_HEADS)
def test_attentions_and_hidden_states_keep_padding(name, asked, seen):
    stock, model = pair(name, attention="eager")
    inputs = inputs_of(name, "holes")
    got, wanted = model(**inputs, **asked), stock(**inputs, **asked)
    assert seen == PADDED
    assert_close(got[0], wanted[0], "all rows")
    setattr(model.config, next(iter(asked)), True)
    model(**inputs)
    assert seen == PADDED * 2


@pytest.mark.parametrize("name", TOKEN_HEADS)
def test_unpad_can_be_switched_off(name, seen):
    stock, model = pair(name)
    model.unpad = False
    assert_same(model, stock, inputs_of(name, "holes"))
    assert seen == PADDED


@pytest.mark.parametrize("name", TOKEN_HEADS)
def test_masks_over_pairs_keep_padding(name, seen):
    _, model = pair(name)
    inputs = inputs_of(name, "right")
    mask = inputs.pop("attention_mask")
    model(**inputs, attention_mask=mask[:, None, None, :].bool())
    assert seen == PADDED


def test_gradients_of_padded_rows_go_nowhere():
    _, model = pair("DistilBertModel")
    mask = mask_of("holes").bool()
    embeds = torch.randn(3, 7, 24, dtype=torch.float64, requires_grad=True)
    hidden = model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state
    cotangent = torch.randn_like(hidden)
    (first,) = torch.autograd.grad(hidden, embeds, cotangent, retain_graph=True)
    (second,) = torch.autograd.grad(hidden, embeds, cotangent.masked_fill(~mask.unsqueeze(-1), torch.nan))
    assert torch.equal(first, second)
    assert not first[~mask].any()
    assert first[mask].abs().min() > 0


@pytest.mark.parametrize("name", TOKEN_HEADS)
def test_no_tokens_at_all(name, seen):
    _, model = pair(name)
    for kind in ("eval", "train"):
        model.train(kind == "train")
        output = model(**inputs_of(name, "all empty"))
        assert not model.base_model(**inputs_of(name, "all empty")).last_hidden_state.any()
        assert output[0].isfinite().all()
        output[0].square().sum().backward()
        assert all(gradient.isfinite().all() for gradient in gradients(model).values())
    assert set(seen) == {(1, 0, 24)}


def test_broadcast_and_strided_inputs_are_packed(seen):
    stock, model = pair("BertForMaskedLM")
    mask = mask_of("holes")
    ids = torch.randint(0, VOCAB, (7, 3)).t()
    types = torch.randint(0, 2, (1, 7))
    given = {"input_ids": ids, "attention_mask": mask.t().contiguous().t(), "position_ids": torch.arange(7)[None] + 3}
    assert_same(
        model,
        stock,
        {**given, "token_type_ids": types},
        rows=mask,
        stock_inputs={**given, "token_type_ids": types.expand(3, 7)},
    )
    assert seen == packed(mask)


HOST_READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero")


class OpLog(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch):
    """Calls that bring a tensor's values to the host, as (file, function), but for those that only the CPU makes: its
    checks of values, and its attention, which reads `cu_seqlens` where it lies."""
    for module in ("bertfast.ops._checks", "bertfast.ops.varlen_attention"):
        monkeypatch.setattr(sys.modules[module], "values_are_checked", lambda tensor: False)
    found = []
    for method in HOST_READS:
        original = getattr(torch.Tensor, method)

        def spied(self, *args, original=original, **kwargs):
            caller = sys._getframe(1).f_code
            if not (caller.co_filename.endswith("varlen_attention.py") and original.__name__ == "tolist"):
                found.append(caller.co_name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, method, spied)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "BertModel",
        "BertForPreTraining",
        "BertForMaskedLM",
        "RobertaForSequenceClassification",
        "DistilBertForQuestionAnswering",
    ],
)
def test_one_transfer_per_forward_and_none_without_a_mask(name, reads):
    _, model = pair(name)
    for kind, expected in (
        (None, []),
        ("right", ["mask_sizes"]),
        ("left", ["mask_sizes"]),
        ("holes", ["mask_sizes"]),
        ("full", ["mask_sizes"]),
        ("all empty", ["mask_sizes"]),
    ):
        del reads[:]
        inputs = {**inputs_of(name, kind), **labels_of(name, kind)}
        if name.endswith("QuestionAnswering"):
            inputs = inputs_of(name, kind)
        with OpLog() as log:
            output = model(**inputs)
        assert reads == expected, kind
        transfers = {"nonzero", "_local_scalar_dense", "masked_select", "is_nonzero", "equal", "unique", "_unique2"}
        assert not transfers & set(log.names), kind
        del reads[:]
        with OpLog() as log:
            output[0].sum().backward()
        assert reads == []
        assert not transfers & set(log.names)


@pytest.mark.parametrize("why", ["positions", "unpad", "hidden states", "4-D", "embeds"])
def test_no_transfer_where_the_mask_need_not_be_read(why, reads):
    _, model = pair("BertForQuestionAnswering")
    inputs = inputs_of("BertForQuestionAnswering", "right")
    if why == "positions":
        inputs.update(start_positions=torch.tensor([0, 1, 0]), end_positions=torch.tensor([0, 1, 0]))
    elif why == "unpad":
        model.bert.unpad = False
    elif why == "hidden states":
        inputs["output_hidden_states"] = True
    elif why == "4-D":
        inputs["attention_mask"] = inputs["attention_mask"][:, None, None].bool()
    else:
        inputs = {"inputs_embeds": torch.randn(3, 7, 24, dtype=torch.float64)}
    del reads[:]
    model(**inputs)
    assert reads == []


def test_the_spy_on_transfers_sees_them(reads):
    with OpLog() as log:
        torch.ones(2).sum().item()
        bool(torch.ones(1))
        torch.ones(3).nonzero()
        torch.ones(3).tolist()
    assert len(reads) == 4
    assert "_local_scalar_dense" in log.names
    assert "nonzero" in log.names
