"""Pooling, batching and encoding against sentence-transformers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from bertfast.encode import POOLING_MODES, Encoder, Pooling, pad, token_batches, windows
from bertfast.errors import CheckpointError
from helpers.command_line import minilm, tiny_checkpoint, write_json

TEXTS = [
    "A cat sleeps on top of the warm radiator.",
    "",
    "ok",
    "Naïve façade — 北京 🚀 ½ e=mc²",
    "word " * 400,
    "Where is the nearest train station?",
    "  \t ",
    "https://x.example/?q=1&r=[2] #tag @user :-(",
]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.from_pretrained(minilm(), token_budget=600)


@pytest.fixture(scope="module")
def published() -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(minilm(), device="cpu").encode(TEXTS)


@pytest.mark.parametrize(
    "modes", [*[(mode,) for mode in POOLING_MODES], ("cls", "mean"), ("max", "mean_sqrt_len_tokens")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooling_equals_sentence_transformers(modes, dtype):
    from sentence_transformers.sentence_transformer.modules import Pooling as Published

    hidden = torch.randn(5, 9, 12).to(dtype)
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5, [0] * 3 + [1] * 6, [1, 0, 1, 0, 1, 0, 1, 0, 0], [1] + [0] * 8])
    features = {"token_embeddings": hidden.float(), "attention_mask": mask}
    expected = Published(12, pooling_mode=modes)(features)["sentence_embedding"]
    pooled = Pooling(modes)(hidden, mask)
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled, expected, rtol=1e-6, atol=1e-6)
    lengths = Pooling(modes, normalize=True)(hidden, mask).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones(5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_pooling_ignores_what_is_masked_and_gives_zeros_for_nothing(mode):
    hidden = torch.randn(2, 4, 8)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    expected = Pooling((mode,))(hidden, mask)
    hidden[mask == 0] = torch.nan
    pooled = Pooling((mode,))(hidden, mask)
    assert torch.equal(pooled, expected)
    assert not pooled[1].any()


@pytest.mark.parametrize("modes", [(), ("median",), ("mean", "lasttoken")])
def test_pooling_refuses_unknown_modes(modes):
    with pytest.raises(ValueError, match="is not one of cls, max, mean, mean_sqrt_len_tokens"):
        Pooling(modes)


def test_pooling_of_a_checkpoint(tmp_path):
    assert Pooling.from_pretrained(tmp_path) == Pooling(("mean",), False)
    write_json(tmp_path / "1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True})
    assert Pooling.from_pretrained(tmp_path) == Pooling(("cls", "mean"), False)
    write_json(tmp_path / "1_Pooling/config.json", {"pooling_mode": "max"})
    assert Pooling.from_pretrained(tmp_path).modes == ("max",)
    write_json(tmp_path / "1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]})
    assert Pooling.from_pretrained(tmp_path).modes == ("mean", "cls")

    kinds = {"": "Transformer", "pool": "Pooling", "n": "Normalize"}
    write_json(tmp_path / "modules.json", [{"type": f"a.b.{kind}", "path": path} for path, kind in kinds.items()])
    write_json(tmp_path / "pool/config.json", {"pooling_mode_max_tokens": True})
    assert Pooling.from_pretrained(tmp_path) == Pooling(("max",), True)
    assert Pooling.from_pretrained(tmp_path, "cls") == Pooling(("cls",), True)
    assert Pooling.from_pretrained(minilm()) == Pooling(("mean",), True)


def test_pooling_that_cannot_be_served_is_refused(tmp_path):
    dense = [
        {"type": "m.Transformer", "path": ""},
        {"type": "m.Pooling", "path": "p"},
        {"type": "m.Dense", "path": "d"},
    ]
    write_json(tmp_path / "modules.json", dense)
    with pytest.raises(CheckpointError, match="Dense"):
        Pooling.from_pretrained(tmp_path)
    assert Pooling.from_pretrained(tmp_path, "mean").modes == ("mean",)
    write_json(tmp_path / "modules.json", dense[:2])
    write_json(tmp_path / "p/config.json", {"pooling_mode_lasttoken": True})
    with pytest.raises(CheckpointError, match=r"p/config\.json.*lasttoken"):
        Pooling.from_pretrained(tmp_path)
    for damaged in ({"type": "Pooling"}, ["Pooling"], [{"path": ""}], 3):
        write_json(tmp_path / "modules.json", damaged)
        with pytest.raises(CheckpointError, match=r"modules\.json"):
            Pooling.from_pretrained(tmp_path)
    (tmp_path / "modules.json").write_text("[{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        Pooling.from_pretrained(tmp_path)


@pytest.mark.parametrize("budget", [1, 7, 100, 10**9])
def test_token_batches_hold_every_index_once_within_the_budget(budget):
    lengths = random.Random(0).choices(range(50), k=200)
    batches = token_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
    in_order = [lengths[i] for batch in batches for i in batch]
    assert in_order == sorted(lengths, reverse=True)
    for batch, following in zip(batches, batches[1:], strict=False):
        assert (len(batch) + 1) * max(lengths[i] for i in batch) > budget, (batch, following)


def test_token_batches_of_nothing():
    assert token_batches([], 10) == []


def test_pad():
    ids, mask = pad([[5, 6, 7], [], [8]], 1)
    assert ids.tolist() == [[5, 6, 7], [1, 1, 1], [8, 1, 1]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    assert ids.dtype == mask.dtype == torch.int64
    ids, mask = pad([[], []], 9)
    assert ids.tolist() == [[9], [9]] and not mask.any()


def test_windows_close_at_a_number_of_lines_and_of_characters():
    assert list(windows("abcde", 2, 100)) == [["a", "b"], ["c", "d"], ["e"]]
    assert list(windows(["aaaa", "b", "cc", "d"], 100, 3)) == [["aaaa"], ["b", "cc"], ["d"]]
    assert list(windows([], 2, 100)) == []


def test_encode_equals_sentence_transformers(encoder, published):
    vectors = encoder.encode(TEXTS)
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), encoder.dimension) == published.shape
    np.testing.assert_allclose(vectors, published, rtol=0, atol=2e-6)


def test_encode_does_not_depend_on_order_or_budget(encoder):
    small = Encoder(encoder.model, encoder.tokenizer, encoder.pooling, token_budget=1)
    np.testing.assert_allclose(small.encode(TEXTS[::-1])[::-1], encoder.encode(TEXTS), rtol=0, atol=2e-6)
    assert encoder.encode([]).shape == (0, encoder.dimension)


def test_encode_lines_reads_no_further_than_its_window(encoder, monkeypatch):
    monkeypatch.setattr("bertfast.encode.WINDOW_LINES", 3)
    taken = []

    def lines():
        for text in TEXTS:
            taken.append(text)
            yield text

    stream = encoder.encode_lines(lines())
    first = next(stream)
    assert len(first) == 3 and len(taken) == 3
    np.testing.assert_allclose(np.concatenate([first, *stream]), encoder.encode(TEXTS), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "text",
    [
        "tea cup " * 5000,
        "x" * 50_000 + " tea" * 400,
        "tea" + " " * 60_000 + "cup " * 300,
        "日本語の文章" * 4000,
        "tea " * 100 + "supercalifragilistic" * 3000,
        "\u0301" * 30_000 + " tea cup" * 300,
    ],
)
def test_long_texts_give_the_ids_of_the_whole(encoder, text):
    encoder.tokenizer.backend.no_truncation()
    whole = encoder.tokenizer.backend.encode(text, add_special_tokens=False).ids[: encoder.max_length - 2]
    cls, sep = encoder.tokenizer.cls_token_id, encoder.tokenizer.sep_token_id
    assert encoder.token_ids([text, "ok"])[0] == [cls, *whole, sep]


def test_max_length_cuts_and_never_exceeds_the_checkpoint(encoder):
    def limited(limit):
        return Encoder(encoder.model, encoder.tokenizer, encoder.pooling, max_length=limit)

    assert [len(ids) for ids in limited(5).token_ids(["a b c d e f", "a"])] == [5, 3]
    assert limited(10**6).max_length == encoder.max_length == 256
    for keywords in ({"max_length": 2}, {"token_budget": 0}):
        with pytest.raises(ValueError, match=next(iter(keywords))):
            Encoder(encoder.model, encoder.tokenizer, encoder.pooling, **keywords)


def test_from_pretrained_reads_the_published_pooling_and_lets_arguments_win(tmp_path):
    tiny = tiny_checkpoint(tmp_path)
    assert Encoder.from_pretrained(tiny).pooling == Pooling(("cls",), True)
    chosen = Encoder.from_pretrained(tiny, pooling="max", normalize=False, dtype=torch.bfloat16)
    assert chosen.pooling == Pooling(("max",), False)
    assert chosen.model.dtype == torch.bfloat16 and chosen.encode(["the cat"]).dtype == np.float32


def test_the_transformer_may_lie_in_a_folder_of_its_own(tmp_path):
    tiny = tiny_checkpoint(tmp_path / "0_Transformer")
    expected = Encoder.from_pretrained(tiny, pooling="mean", normalize=False).encode(["the cat sat"])
    write_json(tmp_path / "modules.json", [{"type": "m.Transformer", "path": "0_Transformer"}])
    assert np.array_equal(Encoder.from_pretrained(tmp_path).encode(["the cat sat"]), expected)


def test_the_published_prompt_comes_before_every_text(tmp_path):
    tiny = tiny_checkpoint(tmp_path)
    expected = Encoder.from_pretrained(tiny).encode(["the cat", "the dog sat"])
    write_json(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": "the "}})
    assert Encoder.from_pretrained(tiny).prompt == ""
    published = {"prompts": {"query": "the ", "other": "a "}, "default_prompt_name": "query"}
    write_json(tmp_path / "config_sentence_transformers.json", published)
    assert np.array_equal(Encoder.from_pretrained(tiny).encode(["cat", "dog sat"]), expected)
