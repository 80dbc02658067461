"""Loads a worker's model from the worker's own file.

On the kind of CPU for which the file was saved, it is mapped and its tensors become the model's: no
weight is copied, and the workers of one host share the memory. Otherwise tensors are copied into
the model, and unpacked on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from swell.configs.files.sharded_index import (
    AGAIN,
    INDEX_NAME,
    PackedLayout,
    ShardedIndex,
    expert_file_name,
    file_name,
    read_index,
    refuse_other_split,
)
from swell.configs.runtime.log import StructuredLogger
from swell.configs.schema import ParallelConfig
from swell.kernels.linear import LAYOUT_VERSION, FloatWeight, PackedTensor, panel
from swell.worker.comm.mesh import Mesh
from swell.worker.layers.weight_shard import WeightShard, replicated_shard
from swell.worker.memory.uploads import Uploads
from swell.worker.model_interfaces import HasMesh
from swell.worker.quantization.loaded_matrices import FLOAT_MATRICES, LoadedMatrices
from swell.worker.sharded.state import StateTensor, state_of
from swell.worker.sharded.tensor_file import TensorFile, data_of


def local_packing(device_type: str) -> PackedLayout | None:
    """Returns the order in which weights are packed here; None: they are not packed."""
    width = panel(device_type)
    return None if width is None else PackedLayout(version=LAYOUT_VERSION, panel=width)


class Report(Protocol):
    """Receives the progress of a load."""

    def begin(self, total_bytes: int, total_tensors: int) -> None:
        """Sets the totals; called before the first byte is read."""

    def begin_tensor(self) -> None:
        """Counts a tensor; called before its first byte is read."""

    def add(self, nbytes: int) -> None:
        """Adds the number of bytes that were read since the last call."""


def load_sharded(
    model: HasMesh, folder: Path, report: Report, matrices: LoadedMatrices = FLOAT_MATRICES
) -> int:
    """Loads the model. Returns how many of its bytes are the file's own memory. Quantizes
    `matrices` that are copied.

    Raises `ValueError` for a folder that does not hold this worker's tensors.
    """
    index, mesh = read_index(folder), model.mesh
    parallel = _split_of(mesh)
    refuse_other_split(folder, index, parallel)
    name = file_name(mesh.stage, mesh.tensor_rank, parallel)
    file = TensorFile(folder / name, index.files[name])
    state = state_of(model)
    _check_names(file, state)
    for key, tensor in state.items():
        _check_tensor(file, key, tensor, index)
    nbytes = sum(file.tensor(key).nbytes for key in state)
    report.begin(nbytes, len(state))
    maps = _maps(index, mesh.device.type)
    with Uploads(mesh.device) as uploads:
        for key in list(state):
            tensor = state.pop(key)
            report.begin_tensor()
            file.check(key, report.add)
            stored = _stored(file, key)
            if maps:
                tensor.replace(stored)
            else:
                assert isinstance(tensor.weight, torch.Tensor)
                plain = stored.unpack() if isinstance(stored, PackedTensor) else stored
                shard = replicated_shard(key, tensor.weight)
                _copy(shard, plain, matrices, uploads)
    return nbytes if maps else 0


def _copy(
    shard: WeightShard, stored: torch.Tensor, matrices: LoadedMatrices, uploads: Uploads
) -> None:
    for one in matrices.allocate([shard]):
        uploads.copy(one.target, stored)
    matrices.on_filled([shard])


def load_saved_experts(
    folder: Path, mesh: Mesh, experts: Mapping[int, Sequence[WeightShard]], report: Report
) -> None:
    """Fills the shards of experts that engines share, each expert from its own file; the shards may
    cover only some of its layers. Raises `ValueError`."""
    index, parallel = read_index(folder), _split_of(mesh)
    refuse_other_split(folder, index, parallel)
    sizes = [shard.target.nbytes for shards in experts.values() for shard in shards]
    report.begin(sum(sizes), len(sizes))
    with Uploads(mesh.device) as uploads:
        for expert, shards in experts.items():
            name = expert_file_name(expert, index.experts, mesh.stage, parallel)
            file = TensorFile(folder / name, index.files[name])
            state = {shard.name: StateTensor(shard.target) for shard in shards}
            _check_names(file, state, may_have_more=True)
            for key, target in state.items():
                _check_tensor(file, key, target, index)
                report.begin_tensor()
                file.check(key, report.add)
                uploads.copy(data_of(target.weight), file.tensor(key))


def _split_of(mesh: Mesh) -> ParallelConfig:
    return ParallelConfig(
        tensor=mesh.tensor.size, pipeline=mesh.pipeline.size, expert=mesh.shares_experts
    )


def _maps(index: ShardedIndex, device_type: str) -> bool:
    """Whether the file's tensors are in the form that this device uses; otherwise logs why not."""
    here = local_packing(device_type)
    if index.packing is not None and index.packing == here:
        return True
    if index.packing is not None or here is not None:
        StructuredLogger("worker").warning(
            "the weights were saved for another kind of processor: they are copied and converted "
            "at each start; save them again on this machine to map them",
            saved=index.machine,
            saved_panel=index.packing.panel if index.packing else None,
            panel=here.panel if here else None,
        )
    return False


def _stored(file: TensorFile, name: str) -> FloatWeight:
    packed = file.notes.packed.get(name)
    return PackedTensor(file.tensor(name), *packed) if packed else file.tensor(name)


def _check_names(
    file: TensorFile, state: dict[str, StateTensor], may_have_more: bool = False
) -> None:
    missing, extra = sorted(state.keys() - file.names), sorted(file.names - state.keys())
    if may_have_more:
        extra = []
    if missing or extra:
        what = f"has no tensor {missing[0]!r}" if missing else f"has the tensor {extra[0]!r}"
        raise ValueError(
            f"{str(file.path)!r} {what}, unlike the model of this configuration ({len(missing)} "
            f"are missing, {len(extra)} unknown); {AGAIN} with this version"
        )


def _check_tensor(file: TensorFile, name: str, state: StateTensor, index: ShardedIndex) -> None:
    """Raises `ValueError` unless type and shape are the model's."""
    stored, target = file.tensor(name), state.weight
    assert isinstance(target, torch.Tensor)
    shape, expected = tuple(stored.shape), tuple(target.shape)
    packed = file.notes.packed.get(name)
    if packed is not None:
        packing = index.packing
        if packing is None or packing.version != LAYOUT_VERSION or not state.layers:
            raise ValueError(
                f"tensor {name!r} in {str(file.path)!r} is packed in an order that this version "
                f"does not support ({INDEX_NAME} has packing={packing}, this version has the "
                f"order {LAYOUT_VERSION}); {AGAIN}"
            )
        shape = (
            packed if shape == PackedTensor.shape(*packed, packing.panel, stored.dtype) else shape
        )
    if shape != expected or stored.dtype != target.dtype:
        raise ValueError(
            f"tensor {name!r} in {str(file.path)!r} is {list(shape)} {stored.dtype}, but the model "
            f"of this configuration has {list(expected)} {target.dtype}; {AGAIN}"
        )
