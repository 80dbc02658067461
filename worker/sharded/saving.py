"""Saves a model in the form in which its workers hold it. It builds one worker at a time: a worker
does not need its peers to load, so the memory of one worker is enough for a model with any parallel
layout. The folder of the model appears complete or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch

from swell.configs.files.bounded_files import parse_json
from swell.configs.files.sharded_index import (
    FORMAT,
    INDEX_NAME,
    ShardedIndex,
    ShardFile,
    config_digest,
    expert_file_name,
    file_name,
    is_sharded,
)
from swell.configs.quantization.declaration import FILES as QUANTIZATION_FILES
from swell.configs.schema import Config
from swell.kernels.linear import FloatWeight
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import load_config, resolve_dtype
from swell.worker.layers.packed_weight import pack_weights
from swell.worker.loader import load_experts, load_weights
from swell.worker.model_folder import model_folder
from swell.worker.models import backend_of, build_model, resolve_ties
from swell.worker.pooling.pooler import read_model_pooling
from swell.worker.quantization.detection import plain_config
from swell.worker.sharded.loading import local_packing
from swell.worker.sharded.state import state_of
from swell.worker.sharded.tensor_file import data_of, write_tensors

Progress = Callable[[str, int, int], None]
"""Called with (the worker and the current activity, amount done, total amount): in bytes, or in
files of experts."""

TEMPLATES = "additional_chat_templates"
"""The folder next to a tokenizer's files in which transformers looks for more chat templates."""
HUB_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""The files to download besides the weights, which loading downloads."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_INDEX = (".safetensors.index.json", ".bin.index.json", INDEX_NAME)
MAX_COPIED_BYTES = 512 * 2**20
"""The most bytes of one copied file that does not hold weights: the tokenizers of large
vocabularies have 40 MiB."""
_LOCK = ".swell-save.lock"
RESERVE_BYTES = 64 * 2**20
"""Bytes that must stay free on the disk."""


def save_sharded(config: Config, out: Path, progress: Progress) -> int:
    """Writes the model of `config`, for its parallel layout, into the new folder `out`. Returns the
    bytes of the weights.

    The weights are in the form that workers on `model.device` use, so packed for a CPU. Raises
    `ValueError` for a model that cannot be saved, and for a folder that cannot be written; `out` is
    then unchanged.
    """
    _refuse(config)
    _refuse_existing(out)
    saver = _Saver.of(config)
    _refuse_full_disk(out, saver.size_bytes())
    with _new_folder(out) as folder:
        _copy_files(saver, folder)
        files = {}
        for rank in range(config.parallel.world):
            stage, tensor_rank = divmod(rank, config.parallel.tensor)
            name = file_name(stage, tensor_rank, config.parallel)
            files[name] = saver.write(rank, folder / name, progress)
        if saver.experts:
            files |= saver.write_experts(folder, progress)
        index = ShardedIndex(
            format=FORMAT,
            tensor=config.parallel.tensor,
            pipeline=config.parallel.pipeline,
            experts=saver.experts,
            dtype=str(saver.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            backend=backend_of(config.model, saver.hf_config),  # type: ignore[arg-type]
            config_digest=config_digest(folder),
            packing=local_packing(saver.target),
            machine=platform.machine(),
            files=files,
        )
        _write(folder / INDEX_NAME, msgspec.json.format(msgspec.json.encode(index)))
    return sum(file.size_bytes for file in files.values())


def _refuse(config: Config) -> None:
    model = config.model
    if is_sharded(model):
        raise ValueError(
            f"model {model.path!r} was already saved by `swell save-sharded`; save it again from "
            "the original model"
        )
    if model.quantize != "none":
        raise ValueError(
            f"model.quantize={model.quantize}: weights are saved as floats, and quantized when "
            "they are loaded; set model.quantize=none to save, and model.quantize again to serve"
        )
    if read_model_pooling(model) is not None:
        raise ValueError(
            f"model {model.path!r} pools, but only models that generate text can be saved; serve "
            "it without saving, or set model.runner=generate if it can generate"
        )


@dataclass
class _Saver:
    config: Config
    hf_config: Any
    """The model's config, with embeddings tied as in the checkpoint."""
    unties: bool
    """Whether the checkpoint's ties differ from those of config.json."""
    dtype: torch.dtype
    target: str
    """The type of device on which the workers will run."""

    @classmethod
    def of(cls, config: Config) -> _Saver:
        model = config.model
        hf_config = load_config(model)
        dtype = resolve_dtype(model, hf_config)
        cuda = model.device == "cuda" or (model.device == "auto" and torch.cuda.is_available())
        tied = resolve_ties(model, hf_config, dtype)
        return cls(config, tied, tied is not hf_config, dtype, "cuda" if cuda else "cpu")

    @cached_property
    def experts(self) -> int:
        """The number of experts of a layer if engines share them, otherwise 0."""
        if not self.config.parallel.expert:
            return 0
        for stage in range(self.config.parallel.pipeline):
            layers = self._build(stage * self.config.parallel.tensor).moe_layers()
            if layers:
                return int(layers[0].traits.count)
        raise ValueError(
            "parallel.expert=true, but no layer has experts; set parallel.expert=false"
        )

    def size_bytes(self) -> int:
        """Returns the bytes of all weights, without what packing adds."""
        parallel, total = self.config.parallel, 0
        for rank in range(parallel.world):
            model = self._build(rank)
            total += sum(data_of(state.weight).nbytes for state in state_of(model).values())
            if self.experts and rank % parallel.tensor == 0:
                total += self.experts * sum(layer.expert_bytes for layer in model.moe_layers())
        return total

    def write(self, rank: int, path: Path, progress: Progress) -> ShardFile:
        """Writes the worker's file."""
        worker = f"worker {rank + 1} of {self.config.parallel.world}"
        model = self._build(rank)
        load_weights(
            model,
            self.config.model,
            lambda share: progress(f"{worker}: read", share.done_bytes, share.total_bytes),
        )
        if self.target == "cpu":
            pack_weights(model)
        weights: dict[str, FloatWeight] = {
            k: tensor.weight for k, tensor in state_of(model).items()
        }
        all_bytes, done_bytes = sum(data_of(weight).nbytes for weight in weights.values()), 0

        def add(nbytes: int) -> None:
            nonlocal done_bytes
            done_bytes += nbytes
            progress(f"{worker}: written", done_bytes, all_bytes)

        return write_tensors(path, weights, add)

    def write_experts(self, folder: Path, progress: Progress) -> dict[str, ShardFile]:
        """Writes a file for each expert of each stage, one after the other. Tensors have their
        names in the checkpoint."""
        parallel, files = self.config.parallel, {}
        count = self.experts * parallel.pipeline
        for stage in range(parallel.pipeline):
            model = self._build(stage * parallel.tensor)
            for expert in range(self.experts):
                layers = model.moe_layers()
                weights = {at: layer.make_expert() for at, layer in enumerate(layers)}
                shards = list(model.expert_weight_shards(expert, weights))
                if shards:
                    load_experts({expert: shards}, model.mesh, self.config.model)
                name = expert_file_name(expert, self.experts, stage, parallel)
                tensors: dict[str, FloatWeight] = {shard.name: shard.target for shard in shards}
                files[name] = write_tensors(folder / name, tensors, lambda nbytes: None)
                progress("experts, read and written", len(files), count)
        return files

    def _build(self, rank: int) -> Any:
        mesh = Mesh.build(self.config.parallel, rank)
        return build_model(self.config.model, self.hf_config, mesh, "cpu", self.dtype)


def _copy_files(saver: _Saver, folder: Path) -> None:
    """Copies everything except weights. Updates config.json with the current type of the weights,
    and with whether they are tied."""
    source = model_folder(saver.config.model.path, HUB_FILES)
    if (source / TEMPLATES).is_dir():
        (folder / TEMPLATES).mkdir()
    for file in sorted([*source.iterdir(), *(source / TEMPLATES).glob("*.jinja")]):
        if not file.is_file() or file.name.endswith((*_WEIGHTS, *_INDEX, *QUANTIZATION_FILES)):
            continue
        size_bytes = file.stat().st_size
        if size_bytes > MAX_COPIED_BYTES:
            raise ValueError(
                f"{str(file)!r} has {size_bytes} bytes; the limit for files that are copied with "
                f"the weights is {MAX_COPIED_BYTES}; move it elsewhere"
            )
        if file.name != "config.json":
            _write(folder / file.relative_to(source), file.read_bytes())
    values = plain_config(parse_json((source / "config.json").read_bytes()))
    values.pop("torch_dtype", None)
    values["dtype"] = str(saver.dtype).removeprefix("torch.")
    if saver.unties:
        for part in (values, values.get("text_config")):
            if isinstance(part, dict):
                part["tie_word_embeddings"] = False
    _write(folder / "config.json", json.dumps(values, indent=2).encode())


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _refuse_existing(out: Path) -> None:
    """Raises `ValueError` unless `out` can be created: it must be absent or empty, and its parent
    must exist."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(
            f"{str(out)!r} exists and is not an empty folder, and saving never overwrites files; "
            "specify another folder, or remove it"
        )
    if not out.parent.is_dir():
        raise ValueError(f"{str(out)!r}: the folder {str(out.parent)!r} does not exist; create it")


def _refuse_full_disk(out: Path, size_bytes: int) -> None:
    """Raises `ValueError` if this many bytes do not fit on the disk of `out`."""
    free = shutil.disk_usage(out.parent).free
    if free < size_bytes + RESERVE_BYTES:
        raise ValueError(
            f"{str(out)!r} needs {size_bytes} bytes and {RESERVE_BYTES} in reserve, but its disk "
            f"has {free} free; free some space, or specify a folder on another disk"
        )


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yields a folder next to `out` to write into, which is renamed to `out` when the block ends.
    Files that another process left there when it was killed are removed. `_refuse_existing` must
    have been called. Raises `ValueError`."""
    partial = out.parent / f".{out.name}.saving"
    lock = partial / _LOCK
    if partial.exists() and not lock.is_file():
        raise ValueError(
            f"{str(partial)!r} exists and was not left by an interrupted save; remove it"
        )
    partial.mkdir(exist_ok=True)
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is saving to {str(out)!r}; wait until it has finished"
            ) from None
        try:
            for rest in partial.iterdir():
                if rest.is_dir():
                    shutil.rmtree(rest)
                elif rest != lock:
                    rest.unlink()
            yield partial
            _sync(partial)
            os.rename(partial, out)
        except BaseException:
            shutil.rmtree(partial)
            raise
    (out / _LOCK).unlink()
    _sync(out.parent)


def _sync(folder: Path) -> None:
    """Waits until the folder's entries are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
