"""Other libraries that do what bertfast does, where they are installed: who they are, and why one takes no part.

No adapter exists yet for ONNX Runtime, OpenVINO, CTranslate2, Liger and TransformerEngine: where one of them is
installed, its line says so. flash-attn takes part in models, as transformers' `flash_attention_2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from bertfast.benchmarks.records import MODEL_PASSES, Cell, Skipped

ATTENTION = ("attention", "varlen_attention")
MODELS = ("bert-base", "bert-large", "distilbert-base", "roberta-base")


@dataclass(frozen=True)
class Peer:
    """A library.

    Attributes:
        name: its contestant's.
        module: what is imported.
        subjects: what it could take part in.
        device: the only one it runs on, or None.
        trains: whether it has backward passes.
        adapted: which of the subjects call it: as contestants of their own, or through transformers.
    """

    name: str
    module: str
    subjects: tuple[str, ...]
    device: str | None = None
    trains: bool = False
    adapted: tuple[str, ...] = ()

    def reason(self, cell: Cell) -> str | None:
        """Why it has no number in a cell that it could have one in; None where it has one, or could have none."""
        if cell.subject not in self.subjects or not (self.trains or cell.pass_ in ("forward", MODEL_PASSES[0])):
            return None
        if self.device is not None and cell.device != self.device:
            return f"runs on {self.device} only"
        if not _is_installed(self.module):
            return f"not installed ({self.module})"
        return None if cell.subject in self.adapted else "installed, but there is no adapter for it in this version"


def _is_installed(module: str) -> bool:
    # Of a submodule, find_spec imports the parents.
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


PEERS = (
    Peer("onnxruntime", "onnxruntime", MODELS),
    Peer("openvino", "openvino", MODELS, device="cpu"),
    Peer("ctranslate2", "ctranslate2", MODELS),
    Peer("flash-attn", "flash_attn", (*ATTENTION, *MODELS), device="cuda", trains=True, adapted=MODELS),
    Peer("liger", "liger_kernel", ("add_layer_norm",), device="cuda", trains=True),
    Peer(
        "transformer-engine",
        "transformer_engine",
        ("add_layer_norm", "linear_gelu", "feed_forward", *ATTENTION),
        device="cuda",
        trains=True,
    ),
)


def skipped(cells: Sequence[Cell]) -> list[Skipped]:
    """A line for each peer and subject that go without a number, under the first cell that could have had one."""
    found: dict[tuple[str, str], Skipped] = {}
    for cell in cells:
        for peer in PEERS:
            reason = peer.reason(cell)
            if reason is not None:
                found.setdefault((peer.name, cell.subject), Skipped(**vars(cell), contestant=peer.name, reason=reason))
    return list(found.values())
