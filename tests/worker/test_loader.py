"""The loader reads only its own shard, and reports a defective folder in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from swell.configs.schema import ModelConfig, ParallelConfig
from swell.worker import loader
from swell.worker.checkpoint import checkpoint, safetensors_files
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import load_config, max_positions, resolve_dtype
from swell.worker.layers.weight_shard import ALL, WeightShard
from swell.worker.loader import load_weights, stored_equal
from swell.worker.memory.uploads import Uploads
from swell.worker.models import build_model
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.make(tmp_path, "llama", num_hidden_layers=2)
    return tmp_path


def lone(rank: int, size: int, stage: int = 0, stages: int = 1) -> Mesh:
    """Returns a mesh whose other workers do not exist: loading needs none of them."""
    return Mesh.build(ParallelConfig(tensor=size, pipeline=stages), stage * size + rank)


def build(folder: Path, mesh: Mesh | None = None, **model: Any) -> tuple[Any, ModelConfig]:
    config = ModelConfig(path=str(folder), **model)
    mesh = mesh or Mesh.build(ParallelConfig(), 0)
    return build_model(config, load_config(config), mesh, "cpu", torch.float32), config


def shards(folder: Path) -> None:
    """Splits model.safetensors into two files and an index."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    places = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        places.update(dict.fromkeys(part, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / WEIGHTS).unlink()


@pytest.fixture
def elements_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the sizes of all reads from safetensors files, in elements."""
    sizes: list[int] = []
    real = safetensors_files.safe_open

    class Slice:
        def __init__(self, inner: Any) -> None:
            self.inner = inner
            self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

        def __getitem__(self, index: Any) -> torch.Tensor:
            part = self.inner[index]
            sizes.append(part.numel())
            return part

    class File:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.inner = real(*args, **kwargs)

        def __enter__(self) -> File:
            self.inner.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.inner.__exit__(*error)

        def keys(self) -> Any:
            return self.inner.keys()

        def get_slice(self, name: str) -> Slice:
            return Slice(self.inner.get_slice(name))

    monkeypatch.setattr(safetensors_files, "safe_open", File)
    return sizes


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize(("size", "stages"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_rank_reads_only_its_parameters(
    folder: Path, elements_read: list[int], size: int, stages: int, backend: str
) -> None:
    """Loading reads no byte twice, and all shards together read each split tensor once."""
    total = 0
    for stage in range(stages):
        for rank in range(size):
            elements_read.clear()
            model, config = build(folder, lone(rank, size, stage, stages), backend=backend)
            nbytes = load_weights(model, config).nbytes
            own = {id(p): p for p in model.parameters()}
            assert sum(elements_read) == sum(p.numel() for p in own.values()) == nbytes // 4
            total += sum(elements_read)
    whole = load_file(folder / WEIGHTS)
    once = sum(t.numel() for t in whole.values())
    norms = sum(t.numel() for t in whole.values() if t.dim() == 1)
    if backend == "transformers":  # each rank has the whole embedding
        norms += whole["model.embed_tokens.weight"].numel()
    assert total == once + norms * (size - 1)


def test_the_bytes_in_flight_are_bounded(
    folder: Path, elements_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 4096)
    model, config = build(folder, lone(1, 2))
    load_weights(model, config)
    assert max(elements_read) * 4 <= 4096
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 1 << 30)
    again, config = build(folder, lone(1, 2))
    load_weights(again, config)
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_shards_join_to_one_model(folder: Path) -> None:
    one, config = build(folder)
    load_weights(one, config)
    shards(folder)
    two, config = build(folder)
    load_weights(two, config)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_progress_reaches_the_total(folder: Path) -> None:
    model, config = build(folder)
    shares: list[loader.LoadShare] = []
    nbytes = load_weights(model, config, shares.append).nbytes
    with safe_open(folder / WEIGHTS, "pt") as stored:
        names = set(stored.keys())
    assert shares == sorted(shares)
    assert shares[-1] == (nbytes, nbytes, len(names), len(names))
    assert {share.total_bytes for share in shares} == {nbytes}
    assert {share.tensor for share in shares} == {*range(1, len(names) + 1)}


def test_a_tensor_in_chunks_is_one_tensor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 1024)
    shares: list[loader.LoadShare] = []
    load_weights(*build(folder), shares.append)
    assert len(shares) > shares[-1].tensor == shares[-1].total_tensors


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_dummy_weights_need_only_a_config(folder: Path, backend: str) -> None:
    (folder / WEIGHTS).unlink()
    made = []
    for seed in (0, 0, 1):
        model, config = build(folder, load_format="dummy", seed=seed, backend=backend)
        shares: list[loader.LoadShare] = []
        nbytes = load_weights(model, config, shares.append).nbytes
        assert shares[-1] == (nbytes, nbytes, len(shares), len(shares))
        made.append(torch.cat([p.flatten() for p in model.parameters()]))
        hidden = torch.randn(3, 128)
        assert model.compute_logits(hidden).isfinite().all()
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert made[0].isfinite().all()


def test_dummy_weights_are_drawn_on_their_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the device is `meta`, which stands for a GPU."""
    drawn: list[str] = []
    make, normal = torch.Generator, torch.Tensor.normal_

    def note_and_draw(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        drawn.append(self.device.type)
        return normal(self, *args)

    monkeypatch.setattr(torch, "Generator", lambda device: drawn.append(str(device)) or make())
    monkeypatch.setattr(torch.Tensor, "normal_", note_and_draw)
    target = torch.empty(4, 4, dtype=torch.bfloat16, device="meta")
    shard = WeightShard("x.weight", target, (ALL, ALL), (4, 4))
    loader._fill(shard, 0, loader._LoadProgress(None, target.nbytes, 1))
    assert drawn == ["meta", "meta"]


def failure(folder: Path, **model: Any) -> str:
    with pytest.raises(ValueError) as failed:
        load_weights(*build(folder, **model))
    text = str(failed.value)
    assert "\n" not in text
    return text


def test_missing_weights_are_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    text = failure(folder)
    assert str(folder) in text
    assert "model.load_format=dummy" in text
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin" in failure(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    text = failure(folder)
    assert "model-00002-of-00002.safetensors" in text
    assert "missing" in text


def test_a_broken_index_is_named(folder: Path) -> None:
    shards(folder)
    (folder / INDEX).write_text("{")
    assert INDEX in failure(folder)
    (folder / INDEX).write_text("[]")
    assert INDEX in failure(folder)
    (folder / INDEX).write_text("[" * 100_000)
    assert INDEX in failure(folder)


def test_an_index_that_names_missing_tensors_is_refused(folder: Path) -> None:
    shards(folder)
    index = json.loads((folder / INDEX).read_text())
    name = "model.norm.weight"
    (other,) = {*index["weight_map"].values()} - {index["weight_map"][name]}
    index["weight_map"][name] = other
    (folder / INDEX).write_text(json.dumps(index))
    text = failure(folder)
    assert name in text and other in text and "again" in text


def test_a_fifo_or_a_device_in_place_of_a_file_is_refused_and_not_read(folder: Path) -> None:
    shards(folder)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    assert shard.name in failure(folder) and "not a regular file" in failure(folder)
    shard.unlink()
    shard.symlink_to("/dev/zero")
    assert shard.name in failure(folder) and "not a regular file" in failure(folder)
    with (folder / INDEX).open("wb") as file:
        file.truncate(2**40)
    assert INDEX in failure(folder) and str(2**40) in failure(folder)


@pytest.mark.parametrize("keep", [3, 5000, -7])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:keep])
    text = failure(folder)
    assert WEIGHTS in text
    assert "again" in text


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_missing_tensor_or_wrong_shape_is_named(folder: Path, backend: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / WEIGHTS)
    short = {key: t for key, t in tensors.items() if key != name}
    save_file(short, folder / WEIGHTS)
    assert name in failure(folder, backend=backend)
    save_file({**short, name: tensors[name][:100].clone()}, folder / WEIGHTS)
    text = failure(folder, backend=backend)
    assert name in text
    assert "[100, 128]" in text
    assert "[192, 128]" in text


def config_failure(path: Path | str) -> str:
    with pytest.raises(ValueError) as failed:
        load_config(ModelConfig(path=str(path)))
    text = str(failed.value)
    assert "\n" not in text
    return text


def test_config_errors(folder: Path, tmp_path: Path) -> None:
    assert "no such folder" in config_failure(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "config.json" in config_failure(tmp_path / "empty")
    file = folder / "config.json"
    values = json.loads(file.read_text())
    file.write_text("{")
    assert "JSON" in config_failure(folder)
    file.write_text(json.dumps({**values, "model_type": "martian"}))
    assert "'martian'" in config_failure(folder)
    file.write_text(json.dumps({k: v for k, v in values.items() if k != "model_type"}))
    assert "model_type" in config_failure(folder)


def test_code_of_a_model_folder_never_runs(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    values.update(model_type="martian", auto_map={"AutoConfig": "martian.Config"})
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "martian.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    assert "'martian'" in config_failure(folder)
    assert not (folder / "ran").exists()


def test_unknown_architecture(folder: Path) -> None:
    config = ModelConfig(path=str(folder), backend="native")
    hf = load_config(config)
    hf.architectures = ["MartianForCausalLM"]
    with pytest.raises(ValueError, match=r"MartianForCausalLM.*Qwen3ForCausalLM.*transformers"):
        build_model(config, hf, Mesh.build(ParallelConfig(), 0), "cpu", torch.float32)


def test_dtype_and_positions(folder: Path) -> None:
    hf = load_config(ModelConfig(path=str(folder)))
    assert resolve_dtype(ModelConfig(path="x"), hf) == torch.float32
    assert resolve_dtype(ModelConfig(path="x", dtype="bfloat16"), hf) == torch.bfloat16
    hf.dtype = "bfloat16"
    assert resolve_dtype(ModelConfig(path="x"), hf) == torch.bfloat16
    assert max_positions(hf) == 256
    hf.rope_parameters = tiny_models.YARN
    assert max_positions(hf) == 256
    hf.rope_parameters = {**tiny_models.YARN, "factor": 8.0}
    assert max_positions(hf) == 512


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_values_are_converted_while_they_are_copied(
    stored: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion before the copy would write and read a large matrix once more."""
    tensors = {name: t.to(stored) for name, t in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    copied = []
    copy = Uploads.copy

    def record(self: Uploads, target: torch.Tensor, source: torch.Tensor) -> None:
        copied.append(source.dtype)
        copy(self, target, source)

    monkeypatch.setattr(Uploads, "copy", record)
    model, config = build(folder)
    load_weights(model, config)
    assert set(copied) == {stored}
    stored_head = "lm_head.weight"
    assert torch.equal(model.head.weight, tensors[stored_head].float())
    assert stored_equal(config, stored_head, stored_head, torch.float32)


def test_tensors_of_several_types_are_compared_as_parameters(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["one"] = tensors["lm_head.weight"].to(torch.bfloat16)
    tensors["other"] = tensors["one"].float()
    save_file(tensors, folder / WEIGHTS)
    config = ModelConfig(path=str(folder))
    assert stored_equal(config, "one", "other", torch.float32)
    assert not stored_equal(config, "one", "lm_head.weight", torch.float32)
    assert stored_equal(config, "one", "lm_head.weight", torch.bfloat16)
