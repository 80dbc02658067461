"""Fills the parameters of a model from a checkpoint.

A model names the parts of checkpoint tensors that it needs (`WeightShard`), and only these parts
are read, directly into the parameters: at its peak, loading needs the memory of one chunk in
addition to the parameters. Weights that are quantized replace the floats matrix by matrix: at its
peak, loading then needs the memory of one matrix in addition to the quantized model. Every error
about the folder is one line that names the cause and the fix.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from swell.configs.files.bounded_files import MAX_CONFIG_BYTES, parse_json, read_file
from swell.configs.files.model_path import is_gguf
from swell.configs.files.sharded_index import is_sharded, read_index, refuse_other_model
from swell.configs.runtime.log import StructuredLogger
from swell.configs.schema import ModelConfig
from swell.worker.checkpoint import checkpoint
from swell.worker.checkpoint.checkpoint import (
    Checkpoint,
    Index,
    NoCheckpoint,
    RenamedCheckpoint,
    StoredTensor,
)
from swell.worker.checkpoint.gguf.checkpoint import GgufCheckpoint
from swell.worker.checkpoint.safetensors_files import SafetensorsCheckpoint
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import read_config, served_part
from swell.worker.layers.packed_weight import FLOATS, Packing, named_matrices
from swell.worker.layers.weight_shard import WeightShard
from swell.worker.memory.uploads import Uploads
from swell.worker.model_folder import weights_folder
from swell.worker.model_interfaces import HasMesh, HoldsTensors
from swell.worker.models.text_part import has_parts, renamed, text_names, towers
from swell.worker.quantization.detection import cache_notes, find_scheme
from swell.worker.quantization.loaded_matrices import (
    FLOAT_MATRICES,
    LoadedMatrices,
    matrices_to_load,
)
from swell.worker.quantization.quantized_checkpoint import QuantizedCheckpoint
from swell.worker.sharded.loading import load_saved_experts, load_sharded


class LoadShare(NamedTuple):
    """How much of this worker's parameters is filled."""

    done_bytes: int
    total_bytes: int
    tensor: int
    """The number of the tensor that is read, from 1."""
    total_tensors: int


Progress = Callable[[LoadShare], None]

ShardsOf = Callable[[Collection[str]], Iterable[WeightShard]]
"""Accepts the names of a checkpoint's tensors and returns the shards to fill."""

DUMMY_STD = 0.02
"""Standard deviation of dummy weights: it gives logits of a few units at every depth."""


class Loadable(Protocol):
    """A model whose parameters can be filled."""

    def weight_shards(self, stored: Collection[str]) -> Iterable[WeightShard]:
        """Returns the shards to read from a checkpoint that has the tensors named `stored`."""


class LoadedWeights(NamedTuple):
    """The parameters that were filled."""

    nbytes: int
    mapped_bytes: int
    """The bytes among these that are memory of a mapped file: the system counts them as
    available."""


def load_weights(
    model: Loadable,
    model_config: ModelConfig,
    progress: Progress | None = None,
    packing: Packing = FLOATS,
) -> LoadedWeights:
    """Fills the parameters of `model` with this rank's part of the checkpoint, and quantizes those
    that `packing` says. The log names the parts that are not served.

    Raises `ValueError` for a folder that does not hold what the model needs.
    """
    is_first = isinstance(model, HasMesh) and model.mesh.rank == 0
    log = StructuredLogger("worker")
    if is_first and (skipped := towers(read_config(model_config.path))):
        log.info("only the text model is served", modalities=["text"], skipped=skipped)
    matrices = FLOAT_MATRICES
    if isinstance(model, HoldsTensors):
        device = next(each.device for each in model.parameters() if not each.is_meta)
        matrices = matrices_to_load(named_matrices(model), packing, device)
    if not is_sharded(model_config):
        if is_first:
            with closing(open_checkpoint(model_config)) as stored:
                for note in stored.notes:
                    log.info(note, model=model_config.path)
        nbytes = load_weight_shards(model.weight_shards, model_config, progress, matrices)
        loaded = LoadedWeights(nbytes, 0)
    else:
        assert isinstance(model, HasMesh), "only models that sample are saved sharded"
        folder = weights_folder(model_config.path)
        refuse_other_model(folder, read_index(folder), model_config)
        report = _LoadProgress(progress)
        mapped_bytes = load_sharded(model, folder, report, matrices)
        matrices.quantize_rest(model)
        before, after = matrices.quantized
        loaded = LoadedWeights(report.total_bytes - before + after, max(0, mapped_bytes - before))
    if isinstance(model, HoldsTensors) and (
        not isinstance(model, HasMesh) or model.mesh.tensor_rank == 0
    ):
        matrices.log(model, log)
    return loaded


def load_experts(
    experts: dict[int, list[WeightShard]],
    mesh: Mesh,
    model_config: ModelConfig,
    progress: Progress | None = None,
    matrices: LoadedMatrices = FLOAT_MATRICES,
) -> None:
    """Fills the shards of experts that engines share, from saved weights or from a checkpoint, and
    quantizes `matrices` if they come from a checkpoint. Removes all shards from `experts`: a target
    keeps the memory of its matrix."""
    if is_sharded(model_config):
        folder = weights_folder(model_config.path)
        load_saved_experts(folder, mesh, experts, _LoadProgress(progress))
        experts.clear()
        return
    shards = chain.from_iterable(experts.pop(expert) for expert in list(experts))
    load_weight_shards(lambda _stored: shards, model_config, progress, matrices)


def load_weight_shards(
    shards_of: ShardsOf,
    model_config: ModelConfig,
    progress: Progress | None = None,
    matrices: LoadedMatrices = FLOAT_MATRICES,
) -> int:
    """Fills the shards that `shards_of` returns, and quantizes `matrices`; returns the bytes of the
    weights.

    `load_format: dummy` fills them with random numbers that depend only on `model.seed`, the
    tensor's name, the part and the kind of the device, which draws them. Raises `ValueError` for a
    folder that does not hold the shards.
    """
    with closing(open_checkpoint(model_config)) as stored:
        shards = list(shards_of(stored.names))
        all_bytes = sum(shard.target.nbytes for shard in shards)
        report = _LoadProgress(progress, all_bytes, len(shards))
        devices = [shard.target.device for shard in shards if not shard.target.is_meta]
        device = devices[0] if devices else torch.device("cpu")
        groups = matrices.group(shards)
        del shards  # a target keeps the memory of its matrix
        if model_config.load_format == "dummy":
            for group in _popped(groups):
                _fill_group(group, model_config.seed, matrices, report)
        else:
            with Uploads(device) as uploads:
                for group in _popped(_by_file(groups, stored, model_config.path)):
                    _read_group(group, stored, matrices, uploads, report)
        matrices.allocate_rest()
        before, after = matrices.quantized
        return report.total_bytes - before + after


def checkpoint_names(model_config: ModelConfig) -> Collection[str]:
    """Returns the names of the checkpoint's tensors. Returns none for dummy weights, and none for
    saved weights, whose config.json says which embeddings are tied."""
    if is_sharded(model_config):
        return ()
    with closing(open_checkpoint(model_config)) as stored:
        return stored.names


def stored_equal(model_config: ModelConfig, one: str, other: str, dtype: torch.dtype) -> bool:
    """Whether two stored tensors are the same parameter of type `dtype`. Reads one part at a
    time."""
    with closing(open_checkpoint(model_config)) as stored:
        left, right = stored.tensor(one), stored.tensor(other)
        shape = left.shape
        if shape != right.shape or not shape:
            return False
        step = checkpoint.CHUNK_BYTES * shape[0] // (dtype.itemsize * max(1, math.prod(shape)))
        step, others = max(1, step), (slice(None),) * (len(shape) - 1)
        parts = [
            (slice(row, min(row + step, shape[0])), *others) for row in range(0, shape[0], step)
        ]
        return all(
            torch.equal(left.read(part, dtype).to(dtype), right.read(part, dtype).to(dtype))
            for part in parts
        )


def stored_backend(model_config: ModelConfig) -> str:
    """Returns `model.backend`; for saved weights, `auto` is the backend that they were saved
    with."""
    if model_config.backend == "auto" and is_sharded(model_config):
        return read_index(weights_folder(model_config.path)).backend
    return model_config.backend


def open_checkpoint(model_config: ModelConfig) -> Checkpoint:
    """Returns the checkpoint of a model, with the names that its tensors have for the served model:
    for the text model of a wrapper, without the wrapper's prefixes. Returns an empty one for random
    weights. Raises `ValueError` for a folder without weights, and for a damaged file.
    """
    if model_config.load_format == "dummy":
        return NoCheckpoint()
    path = model_config.path
    if is_gguf(path):
        return GgufCheckpoint(Path(path))
    folder = weights_folder(path)
    config = parse_json(read_file(folder / "config.json", MAX_CONFIG_BYTES))
    files = SafetensorsCheckpoint(folder, partial(cache_notes, config, folder))
    stored: Checkpoint = files
    if (scheme := find_scheme(path, config, folder)) is not None:
        stored = QuantizedCheckpoint(files, scheme)
    own = renamed(config, stored.names)
    names = {name: own[old] for name, old in text_names(own).items()}
    if names.keys() == stored.names:
        return stored
    if has_parts(served_part(model_config, read_config(path))):  # it knows its names
        return stored
    return RenamedCheckpoint(stored, names)


class _LoadProgress:
    """Counts bytes and tensors towards their totals."""

    def __init__(
        self, progress: Progress | None, total_bytes: int = 0, total_tensors: int = 0
    ) -> None:
        self._done_bytes = self._tensor = 0
        self._progress = progress or (lambda share: None)
        self.begin(total_bytes, total_tensors)

    def begin(self, total_bytes: int, total_tensors: int) -> None:
        self.total_bytes, self._total_tensors = total_bytes, total_tensors

    def begin_tensor(self) -> None:
        self._tensor += 1

    def add(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        counts = self._done_bytes, self.total_bytes, self._tensor, self._total_tensors
        self._progress(LoadShare(*counts))


def _popped(groups: list[list[WeightShard]]) -> Iterator[list[WeightShard]]:
    """Yields the groups, and drops each before the next: a target keeps the memory of its
    matrix."""
    groups.reverse()
    while groups:
        yield groups.pop()


def _by_file(
    groups: list[list[WeightShard]], stored: Checkpoint, path: str
) -> list[list[WeightShard]]:
    """Sorts groups by the file of their first shard. Raises `ValueError` for a shard without a
    tensor."""
    for shard in chain.from_iterable(groups):
        if shard.name not in stored.names:
            raise ValueError(
                f"model {path!r}: the weights have no tensor {shard.name!r}; the files do not "
                "belong to this config.json, or the download is incomplete"
            )
    groups.sort(key=lambda group: stored.tensor(group[0].name).file)
    return groups


def _fill_group(
    group: Sequence[WeightShard], seed: int, matrices: LoadedMatrices, report: _LoadProgress
) -> None:
    for shard in matrices.allocate(group):
        report.begin_tensor()
        _fill(shard, seed, report)
    matrices.on_filled(group)


def _fill(shard: WeightShard, seed: int, report: _LoadProgress) -> None:
    """Fills matrices with random numbers, norm weights with ones and biases with zeros, as in a new
    model."""
    target, device = shard.target, shard.target.device
    if not target.is_floating_point():
        target.zero_()
    elif target.dim() >= 2:
        generator = torch.Generator(device)
        generator.manual_seed(_seed(seed, shard))
        noise = torch.empty(target.shape, dtype=torch.float32, device=device)
        target.copy_(noise.normal_(0.0, DUMMY_STD, generator=generator))
    else:
        target.fill_(0.0 if shard.name.endswith("bias") else 1.0)
    report.add(target.nbytes)


def _seed(seed: int, shard: WeightShard) -> int:
    """Returns a seed for a shard that depends only on `seed`, the tensor's name and the part."""
    text = f"{seed} {shard.name} {shard.index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _read_group(
    group: Sequence[WeightShard],
    stored: Checkpoint,
    matrices: LoadedMatrices,
    uploads: Uploads,
    report: _LoadProgress,
) -> None:
    needed = [(stored.tensor(shard.name), shard) for shard in group]
    if matrices.keep(needed, uploads):
        for shard in group:
            report.begin_tensor()
            report.add(shard.target.nbytes)
        return
    for (tensor, _), shard in zip(needed, matrices.allocate(group), strict=True):
        report.begin_tensor()
        _read(tensor, shard, uploads, report)
    matrices.on_filled(group)


def _read(
    tensor: StoredTensor, needed: WeightShard, uploads: Uploads, report: _LoadProgress
) -> None:
    shape = tensor.shape
    shard = needed.as_stored(shape)
    if shape != tuple(shard.shape):
        raise ValueError(
            f"{tensor.description} has the shape {list(shape)}, but its config.json requires "
            f"{list(shard.shape)}; use the weights and the config.json of one model"
        )
    for target, index in _chunks(shard):
        uploads.copy(target, tensor.read(index, target.dtype))
        if shard.offset:
            target += shard.offset
        report.add(target.nbytes)


def _chunks(shard: WeightShard) -> Iterator[tuple[torch.Tensor, Index]]:
    """Splits a large shard along its first dimension into chunks of at most `CHUNK_BYTES`."""
    target, index = shard.target, shard.index
    limit = checkpoint.CHUNK_BYTES
    if target.nbytes <= limit or target.dim() == 0 or isinstance(index[0], int):
        yield target, index
        return
    step = max(1, limit // max(1, target[0].nbytes))
    first = index[0].start or 0
    for row in range(0, len(target), step):
        part = target[row : row + step]
        yield part, (slice(first + row, first + row + len(part)), *index[1:])
