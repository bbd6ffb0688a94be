"""Tokenizers of checkpoints, by the `tokenizers` library; this module only finds, reads and sets it up."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, Encoding, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from bertfast.configuration import CONFIG_NAME
from bertfast.errors import CheckpointError
from bertfast.hub import HubOptions, Repository

# transformers writes 1e30 for "no limit"; no encoder has a table of a million positions.
_NO_LIMIT = 1_000_000
_SPECIAL_NAMES = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "bos_token", "eos_token")
_BERT_SPECIALS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_ROBERTA_SPECIALS = {
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
    "bos_token": "<s>",
    "eos_token": "</s>",
}
_ROBERTA_TYPES = ("roberta", "xlm-roberta", "camembert")

Texts = str | Sequence[str]


class Tokenizer:
    """Text to ids, as the checkpoint's own tokenizer does it.

    Attributes:
        backend: the `tokenizers.Tokenizer`, without padding or truncation of its own.
        max_length: most tokens of a sequence, special ones included; None where nothing limits it.
        pad_token_id, unk_token_id, cls_token_id, sep_token_id, mask_token_id: ids of the special tokens; None where the
            vocabulary has no such token, except that `pad_token_id` is then the model's, or 0.
        padding_side, truncation_side: "right" or "left".
        model_input_names: what `__call__` returns; token types only where the model has them.

    Args:
        backend: a `tokenizers.Tokenizer`.
        special_tokens: text of the special tokens by name, such as `{"pad_token": "[PAD]"}`.
        max_length: see above.
        pad_token_id: id to pad with where the vocabulary has no padding token.
        token_types: whether the model takes token types.
        padding_side: where padding goes.
        truncation_side: where tokens are cut off.
        lower: lowercase every text first, as some sentence-transformers checkpoints ask for.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        max_length: int | None = None,
        pad_token_id: int = 0,
        token_types: bool = True,
        padding_side: str = "right",
        truncation_side: str = "right",
        lower: bool = False,
    ):
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = special_tokens or {}
        self.max_length = max_length
        ids = {name: backend.token_to_id(text) for name, text in self.special_tokens.items()}
        self.pad_token_id: int = pad_token_id if ids.get("pad_token") is None else ids["pad_token"]
        self.unk_token_id: int | None = ids.get("unk_token")
        self.cls_token_id: int | None = ids.get("cls_token")
        self.sep_token_id: int | None = ids.get("sep_token")
        self.mask_token_id: int | None = ids.get("mask_token")
        self.padding_side = padding_side
        self.truncation_side = truncation_side
        self.model_input_names = ["input_ids", *(["token_type_ids"] if token_types else []), "attention_mask"]
        self._lower = lower
        # Truncation is a setting of the backend, not an argument of its calls.
        self._lock = threading.Lock()

    @classmethod
    def from_pretrained(cls, path_or_id: str | os.PathLike, **kwargs: Any) -> Tokenizer:
        """Reads the tokenizer of a local folder or a hub repository.

        It comes from `tokenizer.json`, else from `vocab.txt` (WordPiece), else from `vocab.json` with `merges.txt`
        (byte-level BPE). The limit on the length comes from `sentence_bert_config.json`, else `tokenizer_config.json`,
        else the model's position table, which it never exceeds.

        Args:
            path_or_id: the folder or id.
            **kwargs: the hub's keywords; see `bertfast.hub.HubOptions`.

        Raises:
            CheckpointError: there is no tokenizer, or its files are damaged.
            TypeError: unknown keywords.
        """
        options = HubOptions.take(kwargs)
        if kwargs:
            raise TypeError(f"Tokenizer.from_pretrained got unexpected keyword arguments: {', '.join(sorted(kwargs))}")
        repository = Repository(path_or_id, options)
        model = repository.json(CONFIG_NAME) or {}
        config = {
            **(repository.json("special_tokens_map.json") or {}),
            **(repository.json("tokenizer_config.json") or {}),
        }
        sentences = repository.json("sentence_bert_config.json") or {}

        backend, defaults = _read_backend(repository, config)
        specials = {name: _content(config.get(name) or defaults.get(name)) for name in _SPECIAL_NAMES}
        return cls(
            backend,
            special_tokens={name: text for name, text in specials.items() if text is not None},
            max_length=_max_length(sentences, config, model),
            pad_token_id=model.get("pad_token_id") or 0,
            token_types=model.get("model_type", "bert") == "bert",
            padding_side=config.get("padding_side", "right"),
            truncation_side=config.get("truncation_side", "right"),
            lower=bool(sentences.get("do_lower_case")),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self.backend.get_vocab_size()

    def encode_batch(
        self, texts: Sequence[str | tuple[str, str]], truncation: bool = True, max_length: int | None = None
    ) -> list[Encoding]:
        """Tokenises texts or pairs of texts, unpadded.

        Args:
            texts: strings, or (first, second) pairs.
            truncation: cut to the limit; of a pair the longer text is cut first.
            max_length: limit instead of `self.max_length`.

        Returns:
            Encodings of the `tokenizers` library, with `ids`, `type_ids`, `tokens`, `offsets` and more.

        Raises:
            TypeError: a text is neither a string nor a pair of strings.
            ValueError: the limit has no room for a token beside the special ones, or a text holds lone surrogates.
        """
        texts = [self._checked(text) for text in texts]
        limit = (self.max_length if max_length is None else max_length) if truncation else None
        pairs = any(isinstance(text, tuple) for text in texts)
        specials = self.backend.num_special_tokens_to_add(pairs)
        if limit is not None and limit <= specials:
            raise ValueError(f"max_length must be above the {specials} special tokens, got {limit}")
        with self._lock:
            if limit is None:
                self.backend.no_truncation()
            else:
                self.backend.enable_truncation(limit, strategy="longest_first", direction=self.truncation_side)
            try:
                return self.backend.encode_batch(texts)
            except TypeError as error:
                # The library's word for lone surrogates; everything else has been checked.
                raise ValueError(f"a text holds lone surrogates, which no tokenizer takes: {texts!r:.80}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def __call__(
        self,
        texts: Texts,
        pair: Texts | None = None,
        *,
        padding: bool | str = True,
        truncation: bool = True,
        max_length: int | None = None,
    ) -> dict[str, Tensor]:
        """Tokenises into a padded batch.

        Args:
            texts: one text or several.
            pair: second texts, as many.
            padding: True or "longest" pads to the longest, "max_length" to the limit; False wants equal lengths.
            truncation: cut to the limit.
            max_length: limit instead of `self.max_length`.

        Returns:
            int64 tensors of shape (texts, length) by the names in `model_input_names`.

        Raises:
            TypeError: a text is no string.
            ValueError: `pair` has another number of texts, `padding` is unknown or makes no tensor, the limit has no
                room for a token beside the special ones, or a text holds lone surrogates.
        """
        first = [texts] if isinstance(texts, str) else list(texts)
        if pair is not None:
            second = [pair] if isinstance(pair, str) else list(pair)
            if len(first) != len(second):
                raise ValueError(f"texts and pair must be as many, got {len(first)} and {len(second)}")
            first = list(zip(first, second, strict=True))
        encodings = self.encode_batch(first, truncation, max_length)
        lengths = {len(encoding) for encoding in encodings}
        length = max(lengths, default=0)
        if padding == "max_length":
            limit = self.max_length if max_length is None else max_length
            if limit is None:
                raise ValueError("padding='max_length' needs max_length, as this tokenizer has no limit")
            length = max(length, limit)
        elif padding not in (True, False, "longest"):
            raise ValueError(f"padding must be True, False, 'longest' or 'max_length', got {padding!r}")
        elif not padding and len(lengths) > 1:
            raise ValueError(f"texts of {min(lengths)} to {length} tokens make no tensor without padding")
        columns = {
            "input_ids": (self.pad_token_id, lambda encoding: encoding.ids),
            "token_type_ids": (0, lambda encoding: encoding.type_ids),
            "attention_mask": (0, lambda encoding: encoding.attention_mask),
        }
        return {name: self._padded(encodings, length, *columns[name]) for name in self.model_input_names}

    def decode(self, ids: Sequence[int] | Tensor, skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def _checked(self, text: Any) -> str | tuple[str, str]:
        parts = text if isinstance(text, (tuple, list)) else (text,)
        if len(parts) > 2 or not parts or not all(isinstance(part, str) for part in parts):
            raise TypeError(f"expected a string or a pair of strings, got {text!r:.80}")
        parts = tuple(part.lower() for part in parts) if self._lower else tuple(parts)
        return parts[0] if len(parts) == 1 else parts

    def _padded(
        self, encodings: list[Encoding], length: int, fill: int, column: Callable[[Encoding], list[int]]
    ) -> Tensor:
        out = torch.full((len(encodings), length), fill, dtype=torch.int64)
        for row, encoding in zip(out, encodings, strict=True):
            values = torch.tensor(column(encoding), dtype=torch.int64)
            if self.padding_side == "right":
                row[: len(values)] = values
            else:
                row[length - len(values) :] = values
        return out


def _read_backend(repository: Repository, config: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The backend, and the special tokens that its kind has where the checkpoint names none."""
    path = repository.fetch("tokenizer.json")
    if path is not None:
        backend = _parse(path, lambda: tokenizers.Tokenizer.from_file(str(path)))
        bert = isinstance(backend.model, models.WordPiece)
        if bert:
            _apply_bert_options(backend, config)
        return backend, _BERT_SPECIALS if bert else _ROBERTA_SPECIALS
    path = repository.fetch("vocab.txt")
    if path is not None:
        return _parse(path, lambda: _word_piece(path, config)), _BERT_SPECIALS
    path, merges = repository.fetch("vocab.json"), repository.fetch("merges.txt")
    if path is not None and merges is not None:
        return _parse(path, lambda: _byte_level_bpe(path, merges, config)), _ROBERTA_SPECIALS
    raise CheckpointError(
        f"no tokenizer in {repository}; looked for tokenizer.json, vocab.txt, and vocab.json with merges.txt"
    )


def _parse(path: Path, read: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    try:
        return read()
    except CheckpointError:
        raise
    except Exception as error:
        # The Rust library raises plain Exception for whatever it does not like in a file.
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is damaged or no tokenizer file: {first_line}") from error


def _word_piece(vocab: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    specials = {name: _token(config.get(name) or text) for name, text in _BERT_SPECIALS.items()}
    backend = tokenizers.Tokenizer(models.WordPiece.from_file(str(vocab), unk_token=specials["unk_token"].content))
    backend.normalizer = normalizers.BertNormalizer()
    _apply_bert_options(backend, config)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    _add_special_tokens(backend, vocab, specials, config, needed=("unk_token", "cls_token", "sep_token"))
    cls, sep = (
        (specials[name].content, backend.token_to_id(specials[name].content)) for name in ("cls_token", "sep_token")
    )
    backend.post_processor = processors.BertProcessing(sep, cls)
    return backend


def _byte_level_bpe(vocab: Path, merges: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    specials = {name: _token(config.get(name) or text) for name, text in _ROBERTA_SPECIALS.items()}
    prefix = bool(config.get("add_prefix_space", False))
    trim = bool(config.get("trim_offsets", True))
    backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    _add_special_tokens(backend, vocab, specials, config, needed=("cls_token", "sep_token"))
    cls, sep = (
        (specials[name].content, backend.token_to_id(specials[name].content)) for name in ("cls_token", "sep_token")
    )
    backend.post_processor = processors.RobertaProcessing(sep, cls, trim_offsets=trim, add_prefix_space=prefix)
    return backend


def _apply_bert_options(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Lets what `tokenizer_config.json` says about normalisation win over `tokenizer.json`, as transformers does."""
    if not isinstance(backend.normalizer, normalizers.BertNormalizer):
        return
    state = json.loads(backend.normalizer.__getstate__())
    options = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "handle_chinese_chars",
    }
    state.update({ours: config[theirs] for theirs, ours in options.items() if theirs in config})
    del state["type"]
    backend.normalizer = normalizers.BertNormalizer(**state)


def _add_special_tokens(
    backend: tokenizers.Tokenizer,
    path: Path,
    specials: dict[str, AddedToken],
    config: dict[str, Any],
    needed: tuple[str, ...],
) -> None:
    """Makes the special tokens that the vocabulary has atomic in text.

    One that it lacks is left out: its id would lie beyond the model's embeddings.
    """
    for name in needed:
        if backend.token_to_id(specials[name].content) is None:
            raise CheckpointError(f"{path} lacks the token {specials[name].content}, the {name} of its checkpoint")
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    tokens = [*specials.values(), *(_token(token) for token in (extra.values() if isinstance(extra, dict) else extra))]
    backend.add_special_tokens([token for token in tokens if backend.token_to_id(token.content) is not None])


def _content(token: str | dict[str, Any] | None) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _token(token: str | dict[str, Any]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    flags = {name: bool(token.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
    return AddedToken(token["content"], special=True, **flags)


def _max_length(sentences: dict[str, Any], config: dict[str, Any], model: dict[str, Any]) -> int | None:
    limits = []
    for limit in (sentences.get("max_seq_length"), config.get("model_max_length")):
        if isinstance(limit, (int, float)) and 0 < limit < _NO_LIMIT:
            limits.append(int(limit))
            break
    positions = model.get("max_position_embeddings")
    if isinstance(positions, int):
        # RoBERTa counts positions from the one after its padding id.
        offset = (model.get("pad_token_id", 1) or 0) + 1 if model.get("model_type") in _ROBERTA_TYPES else 0
        limits.append(positions - offset)
    return min(limits, default=None)
