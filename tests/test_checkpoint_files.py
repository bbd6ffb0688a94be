"""Weight files in every format, damaged ones, unsafe ones, and the keywords of from_pretrained."""

from __future__ import annotations

import json
import shutil

import huggingface_hub
import pytest
import safetensors.torch
import torch
import transformers

from bertfast.checkpoint import CheckpointError
from bertfast.models.auto import AutoModel, AutoModelForMaskedLM
from helpers.checkpoints import ours, read_tensors, saved_stock, tiny_stock_config, write_tensors

NAME = "BertForMaskedLM"


@pytest.fixture
def folder(tmp_path):
    return saved_stock(tmp_path / "stock", NAME)


def as_pickle(folder, *, zipped=True, shards=1):
    """Replace the safetensors file of a folder by one or more pickled ones."""
    tensors = list(read_tensors(folder).items())
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(dict(tensors), folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        return
    weight_map = {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05d}-of-{shards:05d}.bin"
        torch.save(dict(tensors[shard::shards]), folder / file, _use_new_zipfile_serialization=zipped)
        weight_map.update(dict.fromkeys(dict(tensors[shard::shards]), file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def as_sharded_safetensors(folder):
    stock = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    shutil.rmtree(folder)
    stock.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 3


FORMATS = {
    "safetensors": lambda folder: None,
    "sharded safetensors": as_sharded_safetensors,
    "bin": as_pickle,
    "legacy bin": lambda folder: as_pickle(folder, zipped=False),
    "sharded bin": lambda folder: as_pickle(folder, shards=3),
    "sharded legacy bin": lambda folder: as_pickle(folder, shards=2, zipped=False),
}


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_model(form, folder):
    wanted = read_tensors(folder)
    FORMATS[form](folder)
    model, report = ours(NAME).from_pretrained(folder, return_report=True)
    assert not report
    assert not model.training
    state = model.state_dict()
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("form", FORMATS)
def test_parameters_are_ordinary_ones(form, folder):
    FORMATS[form](folder)
    model = ours(NAME).from_pretrained(folder, dtype=torch.float32)
    storages = [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len(set(storages)) == len(storages)
    for name, parameter in model.named_parameters():
        assert type(parameter) is torch.nn.Parameter
        assert parameter.requires_grad and parameter.is_leaf and parameter.is_contiguous(), name
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4, name
        with torch.no_grad():
            parameter.add_(1)


def test_training_a_loaded_model_leaves_the_file_alone(folder):
    before = (folder / "model.safetensors").read_bytes()
    model = ours(NAME).from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_safetensors_are_preferred_and_use_safetensors_chooses(folder):
    wanted = read_tensors(folder)
    torch.save({name: tensor + 1 for name, tensor in wanted.items()}, folder / "pytorch_model.bin")
    name = "bert.encoder.layer.0.output.dense.bias"
    assert torch.equal(ours(NAME).from_pretrained(folder).get_parameter(name), wanted[name])
    assert torch.equal(ours(NAME).from_pretrained(folder, use_safetensors=False).get_parameter(name), wanted[name] + 1)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"looked for model.safetensors, model.safetensors.index.json$"):
        ours(NAME).from_pretrained(folder, use_safetensors=True)


def test_nothing_to_load_says_what_was_looked_for(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        ours(NAME).from_pretrained(folder)
    for name in (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ):
        assert name in str(caught.value)
    assert isinstance(caught.value, OSError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("form", ["sharded safetensors", "sharded bin"])
def test_a_missing_shard_is_named(form, folder):
    FORMATS[form](folder)
    shard = sorted(folder.glob("*-00002-of-*"))[0]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks the shard {shard.name}"):
        ours(NAME).from_pretrained(folder)


def test_an_index_that_lies_is_refused(folder):
    as_sharded_safetensors(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], "absent.weight": first}}))
    with pytest.raises(CheckpointError, match="absent.weight"):
        ours(NAME).from_pretrained(folder)
    path.write_text(json.dumps({"weight_map": {"a": "../stock/model.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        ours(NAME).from_pretrained(folder)
    for text in ("{}", '{"weight_map": [1]}', "nonsense"):
        path.write_text(text)
        with pytest.raises(CheckpointError, match="model.safetensors.index.json"):
            ours(NAME).from_pretrained(folder)


@pytest.mark.parametrize("form", ["safetensors", "bin", "legacy bin"])
@pytest.mark.parametrize("damage", ["empty", "half", "one byte short", "garbage", "text", "lfs"])
def test_damaged_files_are_one_clear_error(form, damage, folder):
    FORMATS[form](folder)
    path = next(path for path in folder.iterdir() if path.suffix in (".bin", ".safetensors"))
    whole = path.read_bytes()
    damaged = {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "one byte short": whole[:-1],
        "garbage": bytes(range(256)) * 40,
        "text": b"hello\n" * 100,
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    }[damage]
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=path.name):
        ours(NAME).from_pretrained(folder)


class Bomb:
    """Sets a file when unpickled."""

    def __init__(self, flag):
        self.flag = str(flag)

    def __reduce__(self):
        return (open, (self.flag, "w"))


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_objects_are_refused_and_never_run(zipped, folder, tmp_path):
    flag = tmp_path / "flag"
    content = {**read_tensors(folder), "extra": Bomb(flag)}
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="never unpickles"):
        ours(NAME).from_pretrained(folder)
    assert not flag.exists()


@pytest.mark.parametrize("content", [[1, 2], torch.ones(3), {"a": 1}, {1: torch.ones(2)}])
def test_a_pickle_that_is_no_state_dict_is_refused(content, folder):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="must hold"):
        ours(NAME).from_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_weights_are_refused(dtype, folder):
    tensors = read_tensors(folder)
    name = "bert.encoder.layer.0.output.dense.weight"
    write_tensors(folder, {**tensors, name: tensors[name].to(dtype)})
    with pytest.raises(CheckpointError, match=f"{name} .*{dtype}: quantised"):
        ours(NAME).from_pretrained(folder)


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_tensors_without_dense_values_are_refused(kind, folder):
    tensors = read_tensors(folder)
    (folder / "model.safetensors").unlink()
    name = "bert.encoder.layer.0.output.dense.weight"
    tensors[name] = tensors[name].to_sparse() if kind == "sparse" else tensors[name].to("meta")
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"{name} .*{kind}"):
        ours(NAME).from_pretrained(folder)


def test_dtype(folder):
    def dtypes(**kwargs):
        model = ours(NAME).from_pretrained(folder, **kwargs)
        assert model.config.dtype is model.dtype
        return {parameter.dtype for parameter in model.parameters()}

    assert dtypes() == {torch.float32}
    assert dtypes(dtype="bfloat16") == {torch.bfloat16}
    assert dtypes(torch_dtype=torch.float16) == {torch.float16}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    assert dtypes() == {torch.float16}
    assert dtypes(dtype=None) == {torch.float32}
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder, {name: tensor.bfloat16() for name, tensor in read_tensors(folder).items()})
    assert dtypes() == {torch.bfloat16}
    for wrong in ("int8", "half-ish", 3):
        with pytest.raises(ValueError, match="dtype must be"):
            ours(NAME).from_pretrained(folder, dtype=wrong)


def test_new_parameters_have_the_dtype_too(folder):
    model = ours("BertForSequenceClassification").from_pretrained(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("device_map", [None, "cpu", torch.device("cpu"), {"": "cpu"}, "auto"])
def test_device_map(device_map, folder):
    model = ours(NAME).from_pretrained(folder, device_map=device_map)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {
        "cpu" if device_map != "auto" or not torch.accelerator.is_available() else model.device.type
    }


@pytest.mark.parametrize("device_map", ["nowhere", {"": "cpu", "cls": "cpu"}, {"bert": 0}, 1.5])
def test_device_map_that_is_no_device(device_map, folder):
    with pytest.raises(ValueError, match="device_map must be"):
        ours(NAME).from_pretrained(folder, device_map=device_map)


def test_keywords(folder):
    name = "BertForSequenceClassification"
    model, report = ours(name).from_pretrained(
        folder,
        id2label={0: "a", 1: "b", 2: "c"},
        problem_type="multi_label_classification",
        hidden_dropout_prob=0.5,
        attn_implementation="sdpa",
        return_report=True,
    )
    assert model.config.label2id == {"a": 0, "b": 1, "c": 2}
    assert model.classifier.out_features == 3
    assert (model.config.problem_type, model.config.hidden_dropout_prob) == ("multi_label_classification", 0.5)
    assert model.config.name_or_path == str(folder)
    assert any("attn_implementation='sdpa'" in note for note in report.notes)
    with pytest.raises(TypeError, match="hiden_dropout_prob, nonsense"):
        ours(name).from_pretrained(folder, nonsense=1, hiden_dropout_prob=0.1)
    with pytest.raises(ValueError, match="is_decoder"):
        ours(name).from_pretrained(folder, is_decoder=True)


@pytest.mark.parametrize("kind", ["ours", "stock", "dict", "folder"])
def test_config_argument(kind, folder):
    stock = tiny_stock_config(NAME, hidden_act="relu")
    stock.save_pretrained(folder.parent / "config")
    config = {
        "ours": ours(NAME).config_class.from_pretrained(folder.parent / "config"),
        "stock": stock,
        "dict": stock.to_dict(),
        "folder": folder.parent / "config",
    }[kind]
    model = ours(NAME).from_pretrained(folder, config=config, num_labels=7)
    assert (model.config.hidden_act, model.config.num_labels) == ("relu", 7)
    if kind == "ours":
        assert config.num_labels == 2
        assert model.config is not config


def test_subfolder_and_paths_that_lead_nowhere(folder):
    assert ours(NAME).from_pretrained(folder.parent, subfolder="stock").config.hidden_size == 24
    for path, message in [
        (folder / "model.safetensors", "is a file"),
        (folder / "absent", "no folder"),
        ("./absent", "no folder"),
        ("", "is empty"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            ours(NAME).from_pretrained(path)
    with pytest.raises(CheckpointError, match="no folder 'absent'"):
        ours(NAME).from_pretrained(folder, subfolder="absent")


@pytest.fixture
def cached(folder, tmp_path):
    """A hub cache that holds one repository."""
    root = tmp_path / "cache" / "models--someone--tiny"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, root / "snapshots" / ("0" * 40))
    return tmp_path / "cache"


def test_hub_id_from_the_cache(cached):
    model = AutoModelForMaskedLM.from_pretrained("someone/tiny", cache_dir=cached, local_files_only=True)
    assert type(model) is ours(NAME)
    assert model.config.name_or_path == "someone/tiny"
    with pytest.raises(CheckpointError, match=r"no config.json in someone/other \(the hub was not reached"):
        AutoModel.from_pretrained("someone/other", cache_dir=cached, local_files_only=True)


def test_hub_files_are_asked_for_one_by_one_with_the_options(folder, monkeypatch):
    asked = []

    def download(repo_id, filename, **options):
        asked.append((repo_id, filename, options["revision"], options["token"], options["subfolder"]))
        if not (folder / filename).exists():
            raise huggingface_hub.errors.EntryNotFoundError("404")
        return str(folder / filename)

    as_pickle(folder)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    ours(NAME).from_pretrained("someone/tiny", revision="v2", token="secret", subfolder="deep")
    assert [entry[1] for entry in asked] == [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
    ]
    assert {entry[0] for entry in asked} == {"someone/tiny"}
    assert {entry[2:] for entry in asked} == {("v2", "secret", "deep")}


def test_a_name_that_the_hub_refuses_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="cannot get config.json of bad name"):
        AutoModel.from_pretrained("bad name")


def test_tensors_of_other_layouts_are_copied(folder):
    tensors = read_tensors(folder)
    (folder / "model.safetensors").unlink()
    name = "bert.encoder.layer.0.output.dense.weight"
    blob = torch.stack([tensors[name], tensors[name]])
    torch.save({**tensors, name: blob[1].t().contiguous().t()}, folder / "pytorch_model.bin")
    parameter = ours(NAME).from_pretrained(folder).get_parameter(name)
    assert parameter.is_contiguous()
    assert torch.equal(parameter, tensors[name])


def test_an_empty_file_is_refused(folder):
    safetensors.torch.save_file({}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="does not look like a checkpoint"):
        ours(NAME).from_pretrained(folder)
