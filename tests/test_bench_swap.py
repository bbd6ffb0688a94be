"""The benchmark of swapped models: its cells, its check of what it times, its exit code."""

import copy
import json

import pytest
import torch

import bertfast
from bertfast.benchmarks import bench_swap
from helpers.checkpoints import tiny_stock


@pytest.fixture
def path(tmp_path):
    tiny_stock("BertModel").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("train", [False, True])
def test_every_cell_is_a_line(path, tmp_path, capsys, monkeypatch, train):
    monkeypatch.setattr(bench_swap, "LEAST", 0.0)
    results = tmp_path / "results.jsonl"
    arguments = [path, "--batches", "1", "3", "--lengths", "4", "--rounds", "1", "--json", str(results)]
    assert bench_swap.main([*arguments, "--train"] if train else arguments) == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["batch"], row["mask"]) for row in rows] == [(b, mask) for b in (1, 3) for mask in bench_swap.MASKS]
    assert all(row["ratio"] > 0 and row["train"] is train and row["machine"]["torch"] for row in rows)
    assert "half padded" in capsys.readouterr().out


def test_a_slow_cell_is_an_exit_code(path, capsys, monkeypatch):
    monkeypatch.setattr(bench_swap, "LEAST", 1e9)
    assert bench_swap.main([path, "--batches", "1", "--lengths", "4", "--rounds", "1"]) == 1
    assert "3 cells are below" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "0"], "at least 1, got 0"),
        (["--rounds", "x"], "at least 1, got x"),
        (["--lengths", "4", "100000"], "--lengths must be at most"),
    ],
)
def test_wrong_arguments(path, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        bench_swap.main([path, *arguments])
    assert message in f"{ended.value}{capsys.readouterr().err}"


def test_no_checkpoint(tmp_path):
    with pytest.raises(SystemExit, match="cannot load"):
        bench_swap.main([str(tmp_path)])


def test_models_that_differ_are_not_timed():
    stock = tiny_stock("BertModel")
    other = copy.deepcopy(stock)
    bertfast.accelerate(other)
    with torch.no_grad():
        other.encoder.layer[0].output.dense.bias[0].add_(1.0)
    inputs = bench_swap.inputs_of(2, 4, "half padded", stock.config.vocab_size, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="differs from stock"):
        bench_swap.cell(stock, other, inputs, train=False, rounds=1, device=torch.device("cpu"))


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("length", [16, 128, 512])
def test_half_is_padding(batch, length):
    mask = bench_swap.inputs_of(batch, length, "half padded", 100, torch.device("cpu"))["attention_mask"]
    assert mask.shape == (batch, length) and mask.any(1).all()
    assert mask.float().mean().item() == pytest.approx(0.5, abs=0.04)
