"""A stock model and ours with the same weights, and inputs for every head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertfast.models.base import PreTrainedModel
from helpers.checkpoints import family_of, ours, tiny_stock

VOCAB = 61
NO_DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "roberta": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "distilbert": {"dropout": 0.0, "attention_dropout": 0.0, "qa_dropout": 0.0, "seq_classif_dropout": 0.0},
}
PADDING = {
    "right": [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]],
    "left": [[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]],
    "holes": [[1, 0, 1, 1, 0, 0, 1], [1, 1, 0, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1]],
    "empty row": [[1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 1]],
    "full": [[1, 1, 1, 1, 1, 1, 1]] * 3,
    "all empty": [[0, 0, 0, 0, 0, 0, 0]] * 3,
}


def own_name(name: str) -> str:
    """Name of our class for a stock class name."""
    return name.replace("XLMRoberta", "Roberta").replace("Camembert", "Roberta")


def pair(
    name: str, *, dtype: torch.dtype = torch.float64, attention: str = "sdpa", seed: int = 0, **fields
) -> tuple[nn.Module, PreTrainedModel]:
    """The stock model of a class name and ours, with the same random weights and no dropout, in eval mode."""
    fields = {**NO_DROPOUT[family_of(own_name(name))], **fields}
    stock = tiny_stock(name, seed, attn_implementation=attention, **fields)
    model = ours(own_name(name))(stock.config).eval()
    model.load_state_dict(stock.state_dict())
    return stock.to(dtype), model.to(dtype)


def mask_of(kind: str) -> Tensor:
    """One of `PADDING` as a (3, 7) int64 mask."""
    return torch.tensor(PADDING[kind])


def _shape(mask: Tensor | str | None, shape: tuple[int, int]) -> tuple[Tensor | None, tuple[int, int]]:
    mask = mask_of(mask) if isinstance(mask, str) else mask
    return mask, shape if mask is None else tuple(mask.shape)


def inputs_of(
    name: str,
    mask: Tensor | str | None = None,
    seed: int = 0,
    types: bool = True,
    shape: tuple[int, int] = (3, 7),
) -> dict[str, Tensor]:
    """Inputs without labels, in the mask's shape (for multiple choice (B, 2, S)); padding has the padding token."""
    generator = torch.Generator().manual_seed(seed)
    mask, shape = _shape(mask, shape)
    if "MultipleChoice" in name:
        mask = None if mask is None else torch.stack([mask, mask.flip(0)], dim=1)
        shape = (shape[0], 2, shape[1])
    padding = 1 if family_of(own_name(name)) == "roberta" else 0
    ids = torch.randint(2, VOCAB, shape, generator=generator)
    inputs = {"input_ids": ids if mask is None else torch.where(mask.bool(), ids, padding)}
    if mask is not None:
        inputs["attention_mask"] = mask
    if types and family_of(own_name(name)) != "distilbert":
        inputs["token_type_ids"] = torch.randint(0, 2, shape, generator=generator)
    return inputs


def labels_of(
    name: str,
    mask: Tensor | str | None = None,
    seed: int = 0,
    num_labels: int = 2,
    shape: tuple[int, int] = (3, 7),
) -> dict[str, Tensor]:
    """Labels for `inputs_of`; per-token ones are ignored on padding and on every third token."""
    generator = torch.Generator().manual_seed(seed + 1)
    mask, (batch, length) = _shape(mask, shape)
    kept = torch.arange(batch * length).view(batch, length) % 3 != 1
    if mask is not None:
        kept &= mask.bool()

    def tokens(classes: int) -> Tensor:
        return torch.where(kept, torch.randint(0, classes, kept.shape, generator=generator), -100)

    whole = torch.randint(0, num_labels, (batch,), generator=generator)
    if name.endswith("ForPreTraining"):
        return {"labels": tokens(VOCAB), "next_sentence_label": whole}
    if name.endswith("ForMaskedLM"):
        return {"labels": tokens(VOCAB)}
    if name.endswith("ForTokenClassification"):
        return {"labels": tokens(num_labels)}
    if name.endswith("ForQuestionAnswering"):
        starts = torch.arange(batch) % 2
        return {"start_positions": starts, "end_positions": starts + (torch.arange(batch) + 1) % 4}
    return {} if name.endswith("Model") else {"labels": whole}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name, of those that have one; a tied parameter has several names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.grad for name, p in named if p.grad is not None}


def assert_close(got: Tensor, wanted: Tensor, what: str) -> None:
    """Equal but for the order of summation, in float64."""
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10, msg=lambda text: f"{what}: {text}")


def assert_same_gradients(model: nn.Module, stock: nn.Module) -> None:
    """The same parameters have gradients, and (in float64) the same ones."""
    got, wanted = gradients(model), gradients(stock)
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert_close(got[name], wanted[name], name)


def on_rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """(B, S, ...) with zeros outside the rows that a (B, S) mask marks; anything else as it is."""
    if rows is None or tensor.shape[:2] != rows.shape:
        return tensor
    return tensor.masked_fill((rows == 0).view(*rows.shape, *(1,) * (tensor.dim() - 2)), 0.0)


def assert_same(
    model: nn.Module,
    stock: nn.Module,
    inputs: dict,
    *,
    rows: Tensor | None = None,
    stock_inputs: dict | None = None,
    backward: bool = True,
) -> dict[str, Tensor]:
    """In float64, every output and the gradient of every parameter under random cotangents; returns our outputs.

    `rows` is (B, S), the rows to compare of outputs (B, S, ...); None for all.
    """
    got, wanted = model(**inputs), stock(**(inputs if stock_inputs is None else stock_inputs))
    assert list(got) == list(wanted)
    generator = torch.Generator().manual_seed(7)
    roots: list[tuple[Tensor, Tensor]] = []
    cotangents = []
    for key in wanted:
        assert_close(on_rows(got[key], rows), on_rows(wanted[key], rows), key)
        roots.append((got[key], wanted[key]))
        cotangents.append(on_rows(torch.randn(wanted[key].shape, generator=generator, dtype=torch.float64), rows))
    if backward:
        for one, side in ((model, 0), (stock, 1)):
            one.zero_grad()
            torch.autograd.backward([pair[side] for pair in roots], cotangents)
        assert_same_gradients(model, stock)
    return got
