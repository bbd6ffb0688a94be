"""The CPU backend among processes and threads, and how its memory grows."""

from __future__ import annotations

import multiprocessing
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import bertfast
from bertfast import prepacked
from bertfast.benchmarks.memory import peak_bytes
from bertfast.ops import quantized_linear

SIZES = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2}
KINDS = {"plain": lambda model: model}
if prepacked.works(torch.float32) and prepacked.works(torch.bfloat16):
    KINDS["frozen"] = bertfast.freeze
if quantized_linear.unavailable() is None:
    KINDS["int8"] = bertfast.quantize


def bert(positions=512, **sizes):
    torch.manual_seed(0)
    config = bertfast.BertConfig(vocab_size=61, max_position_embeddings=positions, **{**SIZES, **sizes})
    return bertfast.BertModel(config).eval()


def ids_of(batch, length):
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def run(model, ids):
    return model(ids).last_hidden_state.clone()


class Encoded(Dataset):
    """Hidden states, computed by whoever loads them."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return run(self.model, ids_of(2, 40))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", sorted({"fork", "spawn"} & set(multiprocessing.get_all_start_methods())))
def test_workers_of_a_loader(start, kind, two_threads):
    model = KINDS[kind](bert())
    expected = run(model, ids_of(2, 40))  # with threads, copies of weights and locks, before any fork
    loader = DataLoader(Encoded(model), num_workers=2, multiprocessing_context=start, timeout=120)
    for found in loader:
        torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_little_of_a_model_and_nothing_between_two_calls(dtype, kind, two_threads):
    model, ids = KINDS[kind](bert().to(dtype)), ids_of(3, 70)
    two = run(model, ids)
    assert torch.equal(run(model, ids), two)
    torch.set_num_threads(1)
    one = run(model, ids)
    assert torch.equal(run(model, ids), one)
    torch.testing.assert_close(
        one, two, rtol=1e-5 if dtype == torch.float32 else 0.02, atol=1e-5 if dtype == torch.float32 else 0.02
    )


def test_memory_grows_linearly_in_length():
    """Scores of 4096 x 4096 pairs would be a hundred times the hidden states."""
    model = bert(4096)
    peaks = []
    for length in (512, 1024, 2048, 4096):
        call = partial(run, model, ids_of(1, length))
        call()
        peaks.append(peak_bytes(call, "cpu"))
    assert all(late <= 2.1 * early for early, late in zip(peaks, peaks[1:], strict=False)), peaks


def test_memory_grows_linearly_in_the_batch():
    model, peaks = bert(), []
    for batch in (8, 16, 32, 64):
        call = partial(run, model, ids_of(batch, 128))
        call()
        peaks.append(peak_bytes(call, "cpu"))
    assert all(late <= 2.1 * early for early, late in zip(peaks, peaks[1:], strict=False)), peaks


def test_padding_costs_nothing():
    """The widest tensor of a layer has a row for each real token, however long the rows are."""
    model, rows = bert(), []
    mask = torch.zeros(6, 100, dtype=torch.long)
    for row, length in enumerate((100, 7, 3, 20, 1, 9)):
        mask[row, :length] = 1
    forward = bertfast.nn.BertEncoderLayer.forward

    def spied(self, hidden_states, *args, **kwargs):
        rows.append(hidden_states.shape[:-1].numel())
        return forward(self, hidden_states, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(bertfast.nn.BertEncoderLayer, "forward", spied)
        model(ids_of(6, 100), attention_mask=mask)
    assert rows == [int(mask.sum())] * SIZES["num_hidden_layers"]
