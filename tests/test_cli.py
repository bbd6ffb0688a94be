"""The console command: help, info, params, check, and how every command fails."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
from importlib import resources

import pytest
import torch

from bertfast import _extension, backends
from bertfast.backends import OPS
from bertfast.cli.params import parameter_table
from bertfast.ops import _library, quantized_linear
from bertfast.tokenization import Tokenizer
from helpers.command_line import bertfast, error_of, minilm, python, run_here, tiny_checkpoint, write_json

INFO = importlib.import_module("bertfast.cli.info")  # the package's own `info` is the command
BASE_TOTAL = 109_482_240


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_help_lists_the_commands_and_version_is_the_packages(capsys):
    from importlib.metadata import version

    shown = bertfast("--help")
    assert shown.returncode == 0 and shown.stderr == ""
    assert all(command in shown.stdout for command in ("info", "params", "check", "embed", "bench"))
    assert run_here(capsys, "--version").stdout == f"bertfast {version('bertfast')}\n"
    assert run_here(capsys).stdout == shown.stdout


def test_help_of_every_command_imports_no_torch():
    # A stand-in for the package: what its __init__ imports is not the command line's doing.
    code = """
import os, sys, types
import importlib.util
package = types.ModuleType("bertfast")
package.__path__ = [os.path.dirname(importlib.util.find_spec("bertfast").origin)]
sys.modules["bertfast"] = package
from bertfast.cli import main
try:
    main(sys.argv[1:])
finally:
    print(sorted({"torch", "transformers", "numpy", "rich"} & set(sys.modules)), file=sys.stderr)
"""
    for arguments in (["--help"], ["embed", "--help"], ["check", "--help"], ["bench", "--help"]):
        done = python(code, *arguments)
        assert done.returncode == 0 and "Usage: bertfast" in done.stdout and done.stderr == "[]\n", done


def test_usage_errors_are_one_line(capsys):
    assert "no-such-command" in error_of(run_here(capsys, "no-such-command"))
    assert "bertfast embed --help" in error_of(run_here(capsys, "embed", "somewhere"))


def test_info(capsys):
    import transformers

    report = json.loads(bertfast("info", "--json").stdout)
    assert report["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert report["versions"]["transformers"] == transformers.__version__
    assert report["extension"]["state"] in ("loaded", "not_built", "broken")
    pairs = {(row["op"], row["backend"]): row["unavailable"] for row in report["backends"]}
    for op in OPS:
        assert pairs[op, "torch"] is None
    native = report["extension"]["state"] == "loaded"
    assert (pairs["add_layer_norm", "cpu"] is None) == native
    assert ("cpu" in report["advice"]) == (not native)

    shown = run_here(capsys, "info")
    assert shown.returncode == 0 and shown.stderr == ""
    assert "add_layer_norm" in shown.stdout and torch.version.git_version not in shown.stdout


@pytest.fixture
def cuda_row(monkeypatch):
    """What `info` says of an op on `cuda` with an extension of some status, and whether it advises anything."""

    def row(*status: str, **record) -> tuple[str | None, bool]:
        monkeypatch.setattr(_extension, "STATUS", _extension.ExtensionStatus(*status, info=record))
        monkeypatch.setattr(_extension, "verify_hash", lambda: True)
        capability = backends.Capability(
            "attention", "cuda", print, devices=frozenset({"cuda"}), unavailable=_library.cuda_unavailable
        )
        monkeypatch.setattr(backends, "candidates", lambda: [capability])
        report = INFO.collect()
        (found,) = report["backends"]
        return found["unavailable"], "cuda" in report["advice"]

    return row


def test_info_of_cuda_kernels_without_a_gpu(cuda_row, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cuda_row("loaded", archs=["8.0", "9.0a"]) == ("built, no GPU here", False)
    shown = run_here(capsys, "info").stdout
    assert re.search(r"^attention +cuda +built, no GPU here *$", shown, re.MULTILINE)


def test_info_of_cuda_kernels_with_a_gpu(cuda_row, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(INFO, "_gpu", lambda index: {"name": "a GPU", "capability": "9.0", "memory_gib": 80.0})
    assert cuda_row("loaded", archs=["9.0a"]) == (None, False)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (("not_built", "pure Python"), "pure Python"),
        (("broken", "it does not load"), "it does not load"),
        (("loaded", "CUDA kernels skipped: there is no nvcc"), "CUDA kernels skipped: there is no nvcc"),
        (("loaded",), "the extension was built without CUDA kernels"),
    ],
)
def test_info_of_cuda_kernels_that_were_not_built(cuda_row, status, reason):
    assert cuda_row(*status, archs=[]) == (reason, True)


def test_info_without_triton_and_transformers():
    code = """
import importlib.metadata, sys
sys.modules["triton"] = sys.modules["transformers"] = None
found = importlib.metadata.version
def version(name):
    if name in ("triton", "transformers"):
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.version = version
from bertfast.cli import main
main(["info"])
"""
    done = python(code)
    assert done.returncode == 0, done
    for name in ("triton", "transformers"):
        assert re.search(rf"^{name} +not installed", done.stdout, re.MULTILINE), done.stdout


def test_params_of_bert_base():
    table = parameter_table("bert-base")
    assert table["total"] == BASE_TOTAL
    counts = {section["name"]: section["count"] for section in table["sections"]}
    assert counts == {"embeddings": 23_837_184, "encoder": 85_054_464, "pooler": 590_592}
    layers = table["sections"][1]["sections"]
    assert [layer["count"] for layer in layers] == [7_087_872] * 12
    for layer in layers:
        parts = {part["name"]: part["count"] for part in layer["sections"]}
        assert parts == {"attention with its LayerNorm": 2_363_904, "feed-forward with its LayerNorm": 4_723_968}
    assert sum(counts.values()) == table["total"]
    assert sum(section["share"] for section in table["sections"]) == pytest.approx(1)
    words = table["sections"][0]["parameters"][0]
    assert words["shape"] == [30522, 768] and words["share"] == pytest.approx(30522 * 768 / BASE_TOTAL)


@pytest.mark.parametrize(
    ("preset", "total"),
    [("bert-large", 335_141_888), ("distilbert-base", 66_362_880), ("roberta-base", 124_645_632)],
)
def test_params_of_other_presets(preset, total):
    table = parameter_table(preset)
    assert table["total"] == total == sum(section["count"] for section in table["sections"])
    for section in table["sections"]:
        if section["sections"]:
            assert section["count"] == sum(layer["count"] for layer in section["sections"])
            for layer in section["sections"]:
                assert [part["name"].split()[0] for part in layer["sections"]] == ["attention", "feed-forward"]


def test_params_counts_ties_once(tmp_path):
    write_json(tmp_path / "config.json", {"model_type": "bert", "architectures": ["BertForMaskedLM"]})
    table = parameter_table(str(tmp_path))
    assert table["model"] == "BertForMaskedLM"
    heads = next(section for section in table["sections"] if section["name"] == "heads")
    parameters = {parameter["name"]: parameter for parameter in heads["parameters"]}
    decoder = parameters["cls.predictions.decoder.weight"]
    assert decoder["count"] == 0 and decoder["tied_to"] == "bert.embeddings.word_embeddings.weight"
    assert heads["count"] == 768 * 768 + 3 * 768 + 30522
    assert table["total"] == sum(section["count"] for section in table["sections"])


def test_params_prints_a_table_and_json(tiny, capsys):
    shown = run_here(capsys, "params", "bert-base").stdout
    for count in ("23,837,184", "7,087,872", "2,363,904", "4,723,968", "85,054,464", "590,592", "109,482,240"):
        assert count in shown
    assert shown.count("query.weight") == 1
    assert run_here(capsys, "params", "bert-base", "--full").stdout.count("query.weight") == 12
    table = json.loads(run_here(capsys, "params", tiny, "--json").stdout)
    assert len(table["sections"][1]["sections"]) == 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, "config.json"),
        ("{", "JSON"),
        ("[]", "JSON object"),
        ('{"model_type": "gpt2"}', "gpt2"),
        ('{"model_type": "bert", "hidden_size": 30, "num_attention_heads": 7}', "num_attention_heads"),
        ('{"model_type": "bert", "is_decoder": true}', "is_decoder"),
    ],
)
def test_foreign_and_broken_checkpoints_are_one_line(tmp_path, config, expected, capsys):
    if config is not None:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
    assert expected in error_of(run_here(capsys, "params", tmp_path))


def test_a_name_that_is_no_checkpoint(capsys, tmp_path):
    assert "nowhere" in error_of(run_here(capsys, "params", tmp_path / "nowhere"))


def test_tracebacks_are_shown_on_request(tmp_path, capsys, monkeypatch):
    shown = [run_here(capsys, "--traceback", "params", tmp_path)]
    monkeypatch.setenv("BERTFAST_DEBUG", "1")
    shown.append(run_here(capsys, "params", tmp_path))
    for done in shown:
        assert done.returncode == 2
        assert "Traceback (most recent call last)" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("bertfast: error: ")


def test_a_full_disk_and_a_closed_pipe_on_standard_output():
    with open("/dev/full", "wb") as full:
        assert "No space left" in error_of(bertfast("params", "bert-base", "--json", stdout=full))
    code = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); from bertfast.cli import main; "
    assert "went away" in error_of(python(f"{code} main(['params', 'bert-base', '--json'])"))


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_standard_stream(closed):
    done = bertfast("params", "bert-base", preexec_fn=lambda: os.close(closed))
    assert done.returncode == 0 and done.stderr == ""
    assert ("109,482,240" in done.stdout) == (closed != 1)


def test_closed_standard_input_is_empty_input(tiny, tmp_path):
    arguments = ("embed", tiny, "--input", "-", "--output", tmp_path / "out.npy")
    assert error_of(bertfast(*arguments, preexec_fn=lambda: os.close(0))) == "standard input is empty"
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.parametrize("as_json", [False, True])
def test_text_that_the_terminal_cannot_show(tiny, tmp_path, as_json):
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    folder = tmp_path / "mödel"
    shutil.copytree(tiny, folder)
    done = bertfast("params", folder, *["--json"] * as_json, env=ascii_only)
    assert done.returncode == 0 and done.stderr == ""
    if as_json:
        assert json.loads(done.stdout)["name"] == str(folder)
    else:
        assert "m\\xf6del" in done.stdout
    assert "\\xf6" in error_of(bertfast("params", tmp_path / "nö", env=ascii_only))


def bundled_sentences() -> list[str]:
    path = resources.files("bertfast.benchmarks") / "data" / "sentences.txt"
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def test_bundled_sentences_are_as_mixed_as_the_timings_say():
    lines = bundled_sentences()
    assert 150 <= len(lines) == len(set(lines)) <= 250 and all(line.strip() for line in lines)
    lengths = [len(encoding) for encoding in Tokenizer.from_pretrained(minilm()).encode_batch(lines)]
    assert min(lengths) == 3 and 200 <= max(lengths) < 256
    assert sum(lengths) / len(lengths) / max(lengths) == pytest.approx(0.3, abs=0.03)


def test_check_on_the_real_checkpoint(tmp_path):
    short = [line for line in bundled_sentences() if len(line) < 80]
    (tmp_path / "short.txt").write_text("\n".join(short), encoding="utf-8")
    done = bertfast("check", minilm(), "--rounds", 1, "--json", "--input", tmp_path / "short.txt")
    assert done.returncode == 0, done
    report = json.loads(done.stdout)
    accuracy = report["accuracy"]
    assert accuracy["passed"] and 0 < accuracy["errors"]["bertfast"]["max"] <= accuracy["limit"] < 1e-4
    assert list(accuracy["errors"]) == ["stock eager", "stock sdpa", "bertfast"]
    one, full, mixed = report["speed"]
    assert (one["rows"], full["rows"], mixed["rows"]) == (1, 16, 32)
    assert full["mean"] == full["longest"] == 128
    assert 2 < mixed["mean"] < mixed["longest"]
    assert mixed["tokens"] == pytest.approx(32 * mixed["mean"])
    for case in report["speed"]:
        for name, timing in case["timings"].items():
            assert 0 < timing["ms"]["p10"] <= timing["ms"]["median"] <= timing["ms"]["p90"]
            assert timing["tokens_per_second"] == pytest.approx(case["tokens"] / timing["ms"]["median"] * 1e3)
            assert (timing["bertfast_speedup"] is None) == (name == "bertfast")
    for query in report["neighbours"]:
        assert 1 > query["nearest"][0]["cosine"] > query["nearest"][1]["cosine"]
        assert query["text"] not in [found["text"] for found in query["nearest"]]
    assert report["machine"]["torch_threads"] > 0 and str(report["machine"]["cores"]) in report["machine_line"]


@pytest.mark.skipif(quantized_linear.unavailable() is not None, reason="no int8 on this machine")
def test_check_of_int8_layers(tiny, tmp_path, capsys):
    (tmp_path / "some.txt").write_text("the cat sat\nthe dog\n", encoding="utf-8")
    arguments = ["check", tiny, "--rounds", 1, "--input", tmp_path / "some.txt", "--int8"]
    done = run_here(capsys, *arguments, "--json")
    assert done.returncode == 0, done
    report = json.loads(done.stdout)
    errors = report["accuracy"]["errors"]
    assert list(errors) == ["stock eager", "stock sdpa", "bertfast", "bertfast int8"]
    # Larger than any that may pass, and no part of what has to.
    assert report["accuracy"]["limit"] < errors["bertfast int8"]["max"] < 0.5 and report["accuracy"]["passed"]
    for name, error in errors.items():
        vectors = error["vectors"]
        assert 0.99 < vectors["worst_cosine"] <= vectors["mean_cosine"] < 1 + 1e-9
        assert (vectors["mean_cosine"] < 1 - 1e-9) == (name == "bertfast int8")
    assert all("bertfast int8" in case["timings"] for case in report["speed"])
    shown = run_here(capsys, *arguments).stdout
    assert "worst cosine" in shown and shown.count("bertfast int8") == 4


def test_check_prints_its_verdict_and_takes_short_input(tiny, tmp_path, capsys):
    (tmp_path / "one.txt").write_text("the cat sat\n\n", encoding="utf-8")
    done = run_here(capsys, "check", tiny, "--rounds", 1, "--input", tmp_path / "one.txt", "--dtype", "bfloat16")
    assert done.returncode == 0, done
    for part in ("PASS: bertfast", "One sentence: 5 tokens", "Full batch: 16 x 32 tokens", "Mixed", "torch threads"):
        assert part in done.stdout, done.stdout


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_check_fails_when_our_error_is_too_large(tiny, tmp_path, capsys, monkeypatch, factor):
    from bertfast.encode import Encoder

    load = Encoder.from_pretrained

    def spoiled(*arguments, **keywords):
        encoder = load(*arguments, **keywords)
        with torch.no_grad():
            encoder.model.encoder.layer[-1].output.LayerNorm.weight.mul_(factor)
        return encoder

    monkeypatch.setattr(Encoder, "from_pretrained", spoiled)
    (tmp_path / "some.txt").write_text("the cat sat\nthe dog\n", encoding="utf-8")
    done = run_here(capsys, "check", tiny, "--rounds", 1, "--input", tmp_path / "some.txt")
    assert done.returncode == 1 and "FAIL: bertfast" in done.stdout, done


def test_check_needs_transformers_and_text(tiny, tmp_path, capsys, monkeypatch):
    (tmp_path / "blank.txt").write_text("\n  \n", encoding="utf-8")
    assert "no text" in error_of(run_here(capsys, "check", tiny, "--input", tmp_path / "blank.txt"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = error_of(run_here(capsys, "check", tiny))
    assert "transformers" in error and "pip install" in error
