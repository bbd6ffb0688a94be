"""save_pretrained: what it writes, that stock transformers loads it bit-equal, and that it never half-writes."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from safetensors import safe_open

import bertfast.checkpoint.save
from bertfast.checkpoint import CheckpointError
from helpers.checkpoints import ALL_HEADS, family_of, ours, read_tensors, saved_stock

MASKED_LM = [name for name in ALL_HEADS if "MaskedLM" in name or "PreTraining" in name]


def load_stock(name, folder):
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("name", ALL_HEADS)
def test_stock_loads_what_we_save(name, tmp_path):
    labels = 2 if "QuestionAnswering" in name else 3
    stock_folder, folder = saved_stock(tmp_path / "stock", name, num_labels=labels), tmp_path / "ours"
    model = ours(name).from_pretrained(stock_folder)
    model.save_pretrained(folder)
    assert read_tensors(folder).keys() == read_tensors(stock_folder).keys()
    stock = load_stock(name, folder)
    for key, tensor in model.state_dict().items():
        assert torch.equal(stock.state_dict()[key], tensor), key
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [name]
    assert config["dtype"] == "float32"
    assert config["model_type"] == family_of(name)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    again, report = ours(name).from_pretrained(folder, return_report=True)
    assert not report
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


def test_stock_loads_it_in_a_process_without_bertfast(tmp_path):
    saved_stock(tmp_path, "BertForMaskedLM")
    model = ours("BertForMaskedLM").from_pretrained(tmp_path)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1)
    model.save_pretrained(tmp_path / "new")
    code = (
        "import sys, transformers; m = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[1]); "
        "assert 'bertfast' not in sys.modules; print(m.cls.predictions.decoder.weight.double().sum().item())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "new")], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert float(done.stdout) == model.cls.predictions.decoder.weight.double().sum().item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtype_is_kept(dtype, tmp_path):
    saved_stock(tmp_path, "RobertaForMaskedLM")
    model = ours("RobertaForMaskedLM").from_pretrained(tmp_path, dtype=dtype)
    model.save_pretrained(tmp_path / "new")
    assert {tensor.dtype for tensor in read_tensors(tmp_path / "new").values()} == {dtype}
    assert load_stock("RobertaForMaskedLM", tmp_path / "new").dtype is dtype
    assert ours("RobertaForMaskedLM").from_pretrained(tmp_path / "new").dtype is dtype


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", [10_000, "10KB"])
def test_shards(safe, size, tmp_path):
    saved_stock(tmp_path, "BertForMaskedLM")
    model = ours("BertForMaskedLM").from_pretrained(tmp_path)
    folder = tmp_path / "new"
    model.save_pretrained(folder, max_shard_size=size, safe_serialization=safe)
    whole = "model.safetensors" if safe else "pytorch_model.bin"
    index = json.loads((folder / f"{whole}.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 3
    assert {path.name for path in folder.iterdir()} == {*shards, f"{whole}.index.json", "config.json"}
    for loaded in (load_stock("BertForMaskedLM", folder), ours("BertForMaskedLM").from_pretrained(folder)):
        for key, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], tensor), key


def test_pickled_file(tmp_path):
    saved_stock(tmp_path, "DistilBertForMaskedLM")
    model = ours("DistilBertForMaskedLM").from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "new", safe_serialization=False)
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"pytorch_model.bin", "config.json"}
    stock = load_stock("DistilBertForMaskedLM", tmp_path / "new")
    for key, tensor in model.state_dict().items():
        assert torch.equal(stock.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", MASKED_LM)
def test_untied_decoders_are_written(name, tmp_path):
    saved_stock(tmp_path, name, tie_word_embeddings=False)
    model = ours(name).from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "new")
    assert read_tensors(tmp_path / "new").keys() == model.state_dict().keys()
    load_stock(name, tmp_path / "new")


@pytest.mark.filterwarnings("ignore:.*differs from")
def test_a_decoder_loaded_apart_is_written_apart(tmp_path):
    saved_stock(tmp_path, "BertForMaskedLM")
    model = ours("BertForMaskedLM").from_pretrained(tmp_path)
    decoder = model.get_output_embeddings()
    decoder.weight = torch.nn.Parameter(decoder.weight + 1)
    model.save_pretrained(tmp_path / "new")
    again = ours("BertForMaskedLM").from_pretrained(tmp_path / "new")
    assert torch.equal(again.get_output_embeddings().weight, decoder.weight)
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert "cls.predictions.decoder.bias" not in read_tensors(tmp_path / "new")


@pytest.mark.parametrize(
    ("kind", "stock"), [("XLMRobertaForMaskedLM", "XLMRoberta"), ("CamembertForMaskedLM", "Camembert")]
)
def test_the_other_robertas_keep_their_name(kind, stock, tmp_path):
    saved_stock(tmp_path, kind)
    model = ours("RobertaForMaskedLM").from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["architectures"] == [kind]
    again = load_stock(kind, tmp_path / "new")
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


def test_state_dict_argument_and_hand_shared_parameters(tmp_path):
    saved_stock(tmp_path, "BertForMaskedLM")
    model = ours("BertForMaskedLM").from_pretrained(tmp_path)
    first, second = (layer.output.dense for layer in model.bert.encoder.layer)
    second.weight = first.weight
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for folder, kwargs in ((tmp_path / "a", {}), (tmp_path / "b", {"state_dict": state})):
        model.save_pretrained(folder, **kwargs)
        tensors = read_tensors(folder)
        assert "cls.predictions.decoder.weight" not in tensors
        assert torch.equal(tensors["bert.encoder.layer.1.output.dense.weight"], first.weight)
        load_stock("BertForMaskedLM", folder)
    assert state.keys() == model.state_dict().keys()


def test_saving_leaves_the_model_alone(tmp_path):
    saved_stock(tmp_path, "BertForMaskedLM")
    model = ours("BertForMaskedLM").from_pretrained(tmp_path).train()
    config, pointers = model.config.replaced(), {n: p.data_ptr() for n, p in model.named_parameters()}
    model.save_pretrained(tmp_path / "new")
    assert model.config == config
    assert model.training
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == pointers
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_files_of_an_earlier_save_do_not_win(tmp_path):
    saved_stock(tmp_path / "stock", "BertModel")
    model = ours("BertModel").from_pretrained(tmp_path / "stock")
    folder = tmp_path / "new"
    for step, kwargs in enumerate(
        [{}, {"max_shard_size": 10_000}, {"max_shard_size": 20_000}, {}, {"safe_serialization": False}, {}]
    ):
        with torch.no_grad():
            model.pooler.dense.bias.fill_(step)
        model.save_pretrained(folder, **kwargs)
        assert (ours("BertModel").from_pretrained(folder).pooler.dense.bias == step).all(), step
        assert (load_stock("BertModel", folder).pooler.dense.bias == step).all(), step
    (folder / "notes.bin").write_text("mine")
    model.save_pretrained(folder, safe_serialization=False)
    assert (folder / "notes.bin").exists()


@pytest.mark.parametrize("kwargs", [{}, {"max_shard_size": 10_000}])
def test_a_full_disk_leaves_what_was_there(kwargs, tmp_path, monkeypatch):
    saved_stock(tmp_path / "stock", "BertModel")
    model = ours("BertModel").from_pretrained(tmp_path / "stock")
    folder = tmp_path / "new"
    model.save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    calls = []

    def fails_late(tensors, path, metadata):
        calls.append(path)
        path.write_bytes(b"half")
        if not kwargs or len(calls) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(bertfast.checkpoint.save, "save_file", fails_late)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(folder, **kwargs)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_file_in_the_way_is_an_error(tmp_path):
    saved_stock(tmp_path, "BertModel")
    model = ours("BertModel").from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        model.save_pretrained(tmp_path / "config.json")


def test_threads_may_save_into_one_folder(tmp_path):
    model = ours("BertModel").from_pretrained(saved_stock(tmp_path / "stock", "BertModel"))
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(model.save_pretrained, tmp_path / "ours") for _ in range(16)]:
            done.result()
        for done in [pool.submit(model.config.save_pretrained, tmp_path / "config") for _ in range(16)]:
            done.result()
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in (tmp_path / "config").iterdir()] == ["config.json"]
