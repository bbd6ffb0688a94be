"""`bertfast embed`: results, and files that are not what one hopes for."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from bertfast.ops import quantized_linear
from helpers.command_line import ENVIRONMENT, bertfast, error_of, minilm, run_here, tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat sat\nthe dog\n", encoding="utf-8")
    return path


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "vectors.npy"


def untouched(out) -> bool:
    """Whether nothing was left in the folder of the output."""
    return os.listdir(out.parent) == []


def test_equals_sentence_transformers_on_the_real_checkpoint(tmp_path, out, capsys):
    from importlib import resources

    from sentence_transformers import SentenceTransformer

    lines = (
        (resources.files("bertfast.benchmarks") / "data/sentences.txt").read_text(encoding="utf-8").splitlines()[:24]
    )
    lines[7:7] = ["", "tea " * 700]
    (tmp_path / "in.txt").write_bytes("\r\n".join(lines).encode())
    done = run_here(capsys, "embed", minilm(), "--input", tmp_path / "in.txt", "--output", out, "--token-budget", 2000)
    assert done.returncode == 0 and done.stdout == "", done
    vectors = np.load(out)
    assert vectors.dtype == np.float32 and vectors.shape == (26, 384)
    expected = SentenceTransformer(minilm(), device="cpu").encode(lines)
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=3e-6)
    assert os.listdir(out.parent) == [out.name]


def test_options_and_standard_input(tiny, out):
    from bertfast.encode import Encoder

    lines = ["the cat", "", "a dog sat on the mat"]
    done = bertfast(
        "embed", tiny, "--input", "-", "--output", out, "--pooling", "mean", "--normalize", "no", "--max-length", 4,
        input="\ufeffthe cat\n\na dog sat on the mat".encode(),
    )  # fmt: skip
    assert done.returncode == 0, done
    expected = Encoder.from_pretrained(tiny, pooling="mean", normalize=False, max_length=4).encode(lines)
    np.testing.assert_allclose(np.load(out), expected, rtol=0, atol=1e-6)


@pytest.mark.skipif(quantized_linear.unavailable() is not None, reason="no int8 on this machine")
def test_int8(tiny, text, out, capsys):
    from bertfast.encode import Encoder

    done = run_here(capsys, "embed", tiny, "--input", text, "--output", out, "--int8")
    assert done.returncode == 0, done
    lines = text.read_text(encoding="utf-8").splitlines()
    assert np.array_equal(np.load(out), Encoder.from_pretrained(tiny, int8=True).encode(lines))
    assert not np.array_equal(np.load(out), Encoder.from_pretrained(tiny).encode(lines))


def test_replaces_an_older_file_through_a_link_and_keeps_its_mode(tiny, text, out, capsys):
    real = out.with_name("real.npy")
    real.write_bytes(b"old")
    real.chmod(0o640)
    out.symlink_to(real)
    assert run_here(capsys, "embed", tiny, "--input", text, "--output", out).returncode == 0
    assert out.is_symlink() and np.load(real).shape == (2, 24)
    assert real.stat().st_mode & 0o777 == 0o640


def test_a_line_of_a_million_words(tiny, text, out, capsys):
    from bertfast.encode import Encoder

    text.write_bytes(b"the cat\n" + b"tea " * 1_000_000 + b"\na dog\n")
    start = time.monotonic()
    assert run_here(capsys, "embed", tiny, "--input", text, "--output", out).returncode == 0
    assert time.monotonic() - start < 20
    expected = Encoder.from_pretrained(tiny).encode(["the cat", "tea " * 50, "a dog"])
    np.testing.assert_allclose(np.load(out), expected, rtol=0, atol=1e-6)


def test_bad_input(tiny, tmp_path, out, capsys):
    def error(content: bytes | None, name="in.txt"):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        found = error_of(run_here(capsys, "embed", tiny, "--input", tmp_path / name, "--output", out))
        assert untouched(out)
        return found

    assert "No such file" in error(None, "nowhere.txt")
    assert "Is a directory" in error(None, "out")
    assert "is empty" in error(b"")
    assert "line 3: not UTF-8" in error(b"the\ncat\nca\xff\n")
    assert "line 1: not UTF-8" in error("the cat".encode("utf-16"))
    assert "line 2: not UTF-8" in error(b"the\ncat \xe2\x82")
    assert "line 1: not UTF-8" in error(b"the " * 400_000 + b"\xff\n")


def test_empty_standard_input(tiny, out, capsys, monkeypatch):
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        done = run_here(capsys, "embed", tiny, "--input", "-", "--output", out)
    assert "standard input is empty" in error_of(done)
    assert untouched(out)


def test_bad_output(tiny, text, tmp_path, out, capsys):
    def error(target):
        return error_of(run_here(capsys, "embed", tiny, "--input", text, "--output", target))

    assert "no such folder" in error(tmp_path / "nowhere" / "out.npy")
    assert "is a directory" in error(tmp_path)
    assert "not a regular file" in error("/dev/full")
    assert "is the input" in error(text)
    assert text.read_text(encoding="utf-8").startswith("the cat")


def test_bad_checkpoints(tiny, text, tmp_path, out, capsys):
    weights = (tiny / "model.safetensors").read_bytes()
    for name, content in (("truncated", weights[:-100]), ("noise", b"\x7f" * 300), ("nothing", b"")):
        broken = tiny_checkpoint(tmp_path / name)
        (broken / "model.safetensors").write_bytes(content)
        assert "model.safetensors" in error_of(run_here(capsys, "embed", broken, "--input", text, "--output", out))
    (broken / "model.safetensors").write_bytes(weights)
    (broken / "vocab.txt").unlink()
    assert "tokenizer" in error_of(run_here(capsys, "embed", broken, "--input", text, "--output", out))
    assert "nowhere" in error_of(run_here(capsys, "embed", tmp_path / "nowhere", "--input", text, "--output", out))
    assert "cannot be used" in error_of(
        run_here(capsys, "embed", tiny, "--input", text, "--output", out, "--device", "warp")
    )
    assert untouched(out)


def test_a_full_disk_leaves_nothing(tiny, text, out):
    # A limit on the size of files makes a write fail as a full disk does, without a disk to fill.
    text.write_text("the cat\n" * 3000, encoding="utf-8")
    out.write_bytes(b"old")

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = bertfast("embed", tiny, "--input", text, "--output", out, preexec_fn=limit)
    assert "File too large" in error_of(done)
    assert os.listdir(out.parent) == [out.name] and out.read_bytes() == b"old"


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing(tiny, out, sent, code):
    command = [sys.executable, "-m", "bertfast", "embed", str(tiny), "--input", "-", "--output", str(out)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        # A shell's background job has SIGINT ignored, and passes that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while untouched(out) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code and untouched(out)
    assert "Traceback" not in errors
    assert errors.endswith("bertfast: error: interrupted\n") == (sent == signal.SIGINT)
