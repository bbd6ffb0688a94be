"""Other libraries that do what bertfast does, where they are installed: who takes part in a cell, and why one does not.

Each has an adapter, a module of its library's name that is imported when it takes part and imports the library when its
contestant is built. An adapter of models has `convert(stock)`, one of ops a function for each of its subjects, which
takes the cell and returns the formula. flash-attn takes part in models as transformers' `flash_attention_2`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

from bertfast.benchmarks.records import MODEL_PASSES, OP_PASSES, Cell, Skipped

ATTENTION = ("attention", "varlen_attention")
MODELS = ("bert-base", "bert-large", "distilbert-base", "roberta-base")
HALVES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Converted:
    """A model of another library.

    Attributes:
        call: what is timed: takes input_ids and attention_mask, both (B, S) int64, 0 in the mask only right of a row's
            tokens, and returns when the result is there.
        tensor: makes that result the last hidden state, (B, S, N) in the dtype that it was computed in; rows of padding
            are anything.
    """

    call: Callable[[Tensor, Tensor], Any]
    tensor: Callable[[Any], Tensor] = lambda result: result


@dataclass(frozen=True)
class Peer:
    """A library.

    Attributes:
        name: its contestant's.
        modules: what its adapter imports; the first one names the adapter.
        subjects: what it could take part in.
        dtypes: what it computes in on each device that it runs on.
        passes: those that it has.
        elsewhere: subjects in which it is a contestant of another name.
    """

    name: str
    modules: tuple[str, ...]
    subjects: tuple[str, ...]
    dtypes: Mapping[str, tuple[str, ...]]
    passes: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()

    def could(self, cell: Cell) -> bool:
        """Whether the library has what the cell measures. Attention with a mask of keys none of them has."""
        masked = cell.subject == "attention" and cell.fill != "dense"
        return cell.subject in self.subjects and cell.pass_ in self.passes and not masked

    def reason(self, cell: Cell) -> str | None:
        """Why it has no number in a cell that it could have one in; None where it has one, or could have none."""
        if not self.could(cell):
            return None
        if cell.device not in self.dtypes:
            return f"runs on {' and '.join(self.dtypes)} only"
        for module in self.modules:
            if not _is_installed(module):
                return f"not installed ({module})"
        dtypes = self.dtypes[cell.device]
        return None if cell.dtype in dtypes else f"computes in {' and '.join(dtypes)} only on {cell.device}"


def _is_installed(module: str) -> bool:
    # Of a submodule, find_spec imports the parents.
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


PEERS = (
    Peer(
        "onnxruntime",
        ("onnxruntime", "onnx"),
        MODELS,
        {"cpu": ("float32",), "cuda": ("float32", "float16")},
        MODEL_PASSES[:1],
    ),
    Peer("openvino", ("openvino",), MODELS, {"cpu": ("float32", "bfloat16")}, MODEL_PASSES[:1]),
    Peer(
        "ctranslate2",
        ("ctranslate2",),
        MODELS,
        {"cpu": ("float32",), "cuda": ("float32", *HALVES)},
        MODEL_PASSES[:1],
    ),
    Peer(
        "flash-attn",
        ("flash_attn",),
        (*ATTENTION, *MODELS),
        {"cuda": HALVES},
        (*OP_PASSES, *MODEL_PASSES),
        elsewhere=MODELS,
    ),
    Peer("liger", ("liger_kernel", "triton"), ("add_layer_norm",), {"cuda": ("float32", *HALVES)}, OP_PASSES),
    # Its backward passes free what they saved, so a kept graph cannot be timed.
    Peer(
        "transformer-engine",
        ("transformer_engine",),
        ("add_layer_norm", *ATTENTION),
        {"cuda": HALVES},
        ("forward", "both"),
    ),
)
NAMES = tuple(peer.name for peer in PEERS)


def taking_part(cell: Cell) -> list[str]:
    """Names of the contestants of a cell that an adapter builds."""
    return [
        peer.name
        for peer in PEERS
        if peer.could(cell) and peer.reason(cell) is None and cell.subject not in peer.elsewhere
    ]


def serves(name: str, cell: Cell) -> bool:
    """Whether a library is there and has what a cell measures, through whichever adapter."""
    (peer,) = (peer for peer in PEERS if peer.name == name)
    return peer.could(cell) and peer.reason(cell) is None


def adapter(name: str) -> ModuleType:
    """The adapter of a contestant."""
    (peer,) = (peer for peer in PEERS if peer.name == name)
    return importlib.import_module(f"{__name__}.{peer.modules[0]}")


def skipped(cells: Sequence[Cell]) -> list[Skipped]:
    """A line for each peer and subject that go without a number, under the first cell that could have had one."""
    found: dict[tuple[str, str], Skipped] = {}
    for cell in cells:
        for peer in PEERS:
            reason = peer.reason(cell)
            if reason is not None:
                found.setdefault((peer.name, cell.subject), Skipped(**vars(cell), contestant=peer.name, reason=reason))
    return list(found.values())
