"""Texts to vectors: length-sorted batches, pooling as the checkpoint publishes it, results in input order.

`Encoder` joins a model, a tokenizer and a `Pooling`; it knows nothing of files or terminals. Memory is bounded by a
window of texts, never by the length of the input: `encode_lines` takes any iterable and yields one array per window.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bertfast.errors import CheckpointError
from bertfast.hub import HubOptions, Repository
from bertfast.models.auto import AutoModel
from bertfast.models.base import PreTrainedModel
from bertfast.quantization import quantize
from bertfast.tokenization import Tokenizer

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens")  # the order in which sentence-transformers joins them
_LEGACY_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# 8,192 vectors of width 1,024 are 32 MiB; a longer window would only make the lengths in a batch a little more equal.
WINDOW_LINES = 8192
WINDOW_CHARACTERS = 16 * 2**20
TOKEN_BUDGET = 8192


@dataclass(frozen=True)
class Pooling:
    """How token vectors become one vector per text.

    Attributes:
        modes: some of `POOLING_MODES`; several are concatenated.
        normalize: scale each vector to length 1.

    Raises:
        ValueError: a mode that is none of them, or no mode.
    """

    modes: tuple[str, ...] = ("mean",)
    normalize: bool = False

    def __post_init__(self):
        unknown = [mode for mode in self.modes if mode not in POOLING_MODES]
        if unknown or not self.modes:
            raise ValueError(f"pooling {', '.join(unknown) or '()'} is not one of {', '.join(POOLING_MODES)}")

    @classmethod
    def from_pretrained(cls, path_or_id: str | os.PathLike, mode: str | None = None, **hub: Any) -> Pooling:
        """Reads `modules.json` and the pooling folder that it names (sentence-transformers' format).

        Args:
            path_or_id: the folder or id. Without the files: mean, not normalised.
            mode: used in place of the published one; modules that follow the pooling are then not looked at, except for
                the normalisation.
            **hub: the keywords of `HubOptions`.

        Raises:
            CheckpointError: damaged files, a pooling that is not served, or a further module (a dense layer, say).
            ValueError: `mode` is none of `POOLING_MODES`.
        """
        repository = Repository(path_or_id, HubOptions.take(hub))
        modules = read_modules(repository)
        normalize = "Normalize" in modules
        if mode is not None:
            return cls((mode,), normalize)
        unknown = modules.keys() - {"Transformer", "Pooling", "Normalize"}
        if unknown:
            raise CheckpointError(
                f"{repository} puts {', '.join(sorted(unknown))} behind the encoder, which is not served; "
                "name a pooling to leave it out"
            )
        config = repository.json(f"{modules['Pooling']}/config.json") if "Pooling" in modules else None
        try:
            return cls(_modes_of(config or {}), normalize)
        except ValueError as error:
            raise CheckpointError(f"{modules['Pooling']}/config.json of {repository}: {error}") from error

    def __call__(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Pools a batch.

        Args:
            hidden: (B, S, N) of any floating point dtype.
            attention_mask: (B, S), nonzero where there is a token.

        Returns:
            (B, N * len(modes)) in fp32, fp64 for fp64. A row without any token gives zeros.
        """
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        real = (attention_mask != 0).unsqueeze(-1)
        tokens = hidden.masked_fill(~real, 0.0)
        count = real.sum(dim=1).clamp(min=1)
        pooled = []
        for mode in self.modes:
            if mode == "cls":
                pooled.append(tokens[torch.arange(len(tokens), device=tokens.device), real[..., 0].int().argmax(dim=1)])
            elif mode == "max":
                largest = hidden.masked_fill(~real, -torch.inf).amax(dim=1)
                pooled.append(largest.masked_fill(~real.any(dim=1), 0.0))
            else:
                pooled.append(tokens.sum(dim=1) / (count if mode == "mean" else count.sqrt()))
        out = torch.cat(pooled, dim=-1)
        return torch.nn.functional.normalize(out, dim=-1) if self.normalize else out


def _modes_of(config: dict[str, Any]) -> tuple[str, ...]:
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        return (modes,) if isinstance(modes, str) else tuple(modes)
    return tuple(mode for key, mode in _LEGACY_KEYS.items() if config.get(key)) or ("mean",)


def read_modules(repository: Repository) -> dict[str, str]:
    """Kind -> folder of each module that `modules.json` lists; what a plain checkpoint would list where it is absent.

    Raises:
        CheckpointError: the file is not such a list.
    """
    path = repository.fetch("modules.json")
    if path is None:
        return {"Transformer": "", "Pooling": "1_Pooling"}
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        return {module["type"].rpartition(".")[2]: str(module["path"]) for module in modules}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a list of modules with a type and a path each") from error


def token_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `lengths` in batches, longest first, so that rows x longest row <= budget.

    A row above the budget is a batch of its own. Every index occurs exactly once.
    """
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    return batches


def windows(lines: Iterable[str], max_lines: int, max_characters: int) -> Iterator[list[str]]:
    """Splits an iterable into lists of at most `max_lines` lines, each closed once it holds `max_characters`."""
    window: list[str] = []
    characters = 0
    for line in lines:
        window.append(line)
        characters += len(line)
        if len(window) == max_lines or characters >= max_characters:
            yield window
            window, characters = [], 0
    if window:
        yield window


class Encoder:
    """A model, its tokenizer and a pooling. Results are NumPy arrays in fp32, in the order of the texts.

    Args:
        model: the encoder; put into eval mode.
        tokenizer: the checkpoint's.
        pooling: from token vectors to one per text.
        token_budget: the most tokens, padding included, in a batch.
        max_length: the most tokens of a text, special ones included; longer texts are cut. The checkpoint's own limit
            holds where it is lower.
        prompt: put before every text.

    Raises:
        ValueError: `token_budget` below 1, or `max_length` below 3.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        pooling: Pooling,
        *,
        token_budget: int = TOKEN_BUDGET,
        max_length: int | None = None,
        prompt: str = "",
    ):
        if token_budget < 1:
            raise ValueError(f"token_budget must be at least 1, got {token_budget}")
        limit = tokenizer.max_length
        if max_length is not None:
            if max_length < 3:
                raise ValueError(f"max_length must be at least 3, one token between two special ones; got {max_length}")
            limit = min(max_length, limit or max_length)
        self.model = model.eval()
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.token_budget = token_budget
        self.max_length = limit

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | os.PathLike,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        token_budget: int = TOKEN_BUDGET,
        max_length: int | None = None,
        int8: bool = False,
    ) -> Encoder:
        """Loads all three of a local folder or a hub repository, and the prompt that it publishes.

        Args:
            path_or_id: the folder or id.
            pooling, normalize: None takes what the checkpoint publishes (see `Pooling.from_pretrained`).
            dtype, device: what the model computes in, and where.
            token_budget, max_length: as the class.
            int8: quantise the model and drop its weights (see `bertfast.quantize`); on the CPU.

        Raises:
            CheckpointError: no such checkpoint, a damaged file, or a pooling that is not served.
            ValueError: as the class, or `int8` on another device.
            BackendError: `int8` on a machine that has no int8 products.
        """
        rule = Pooling.from_pretrained(path_or_id, pooling)
        if normalize is not None:
            rule = replace(rule, normalize=normalize)
        repository = Repository(path_or_id)
        subfolder = read_modules(repository).get("Transformer", "")
        published = repository.json("config_sentence_transformers.json") or {}
        prompt = (published.get("prompts") or {}).get(published.get("default_prompt_name")) or ""
        tokenizer = Tokenizer.from_pretrained(path_or_id, subfolder=subfolder)
        model = AutoModel.from_pretrained(path_or_id, subfolder=subfolder, dtype=dtype).to(device)
        if int8:
            quantize(model, keep_weights=False)
        return cls(model, tokenizer, rule, token_budget=token_budget, max_length=max_length, prompt=prompt)

    @property
    def dimension(self) -> int:
        """Width of a vector."""
        return self.model.config.hidden_size * len(self.pooling.modes)

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text with the prompt before it, cut to `max_length`.

        Long texts are cut before they are tokenised, so that a text of a million words costs no more than a page. The
        cut grows until the limit is reached inside it, so the ids are those of the whole text.
        """
        texts = [self.prompt + text for text in texts]
        if self.max_length is None or self.tokenizer.truncation_side != "right":
            return self._ids(texts)
        reach = 32 * self.max_length
        ids = self._ids([_head(text, reach) for text in texts])
        for i, text in enumerate(texts):
            size = reach
            while len(ids[i]) < self.max_length and size < len(text):
                size *= 4
                ids[i] = self._ids([_head(text, size)])[0]
        return ids

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self.tokenizer.encode_batch(list(texts), truncation=True, max_length=self.max_length)]

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """The vectors of `texts`, (len(texts), dimension) in fp32."""
        ids = self.token_ids(texts)
        out = np.empty((len(ids), self.dimension), dtype=np.float32)
        device = self.model.device
        # Padding is on the right, so what the mode `cls` takes is the first token.
        options = {"first_token_only": True} if self.pooling.modes == ("cls",) else {}
        for batch in token_batches([len(row) for row in ids], self.token_budget):
            rows = [ids[i] for i in batch]
            input_ids, attention_mask = pad(rows, self.tokenizer.pad_token_id)
            input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
            output = self.model(input_ids=input_ids, attention_mask=attention_mask, **options)
            hidden = output.last_hidden_state
            out[batch] = self.pooling(hidden, attention_mask[:, : hidden.shape[1]]).float().cpu().numpy()
        return out

    def encode_lines(self, lines: Iterable[str]) -> Iterator[np.ndarray]:
        """Yields the vectors of window after window of `lines`; memory does not grow with their number."""
        for window in windows(lines, WINDOW_LINES, WINDOW_CHARACTERS):
            yield self.encode(window)


def pad(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded (B, longest) int64 ids and the 0/1 mask of the same shape; at least one column wide."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(max(1, int(lengths.max()))) < lengths.unsqueeze(1)
    ids = torch.full(mask.shape, pad_token_id)
    ids[mask] = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    return ids, mask.long()


def _head(text: str, size: int) -> str:
    """At most `size` characters of the text, ending before white space where there is any: words stay whole."""
    if len(text) <= size:
        return text
    head = text[:size]
    words = head.rsplit(maxsplit=1)
    return words[0] if len(words) == 2 else head
