"""Loads a model's config, and its parameters from a model folder.

A model names the parts of checkpoint tensors that it needs (`WeightShard`), and only these parts
are read from the safetensors files, directly into the parameters: at its peak, loading needs the
memory of one chunk in addition to the parameters. Every error about the folder is one line that
names the cause and the fix.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from swell.configs.files.bounded_files import (
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    open_regular,
    parse_json,
    read_file,
)
from swell.configs.files.sharded_index import is_sharded, read_index, refuse_other_model
from swell.configs.runtime.log import StructuredLogger, first_line
from swell.configs.schema import ModelConfig
from swell.worker.comm.mesh import Mesh
from swell.worker.layers.weight_shard import WeightShard
from swell.worker.model_folder import model_folder
from swell.worker.model_interfaces import HasMesh
from swell.worker.models import NATIVE
from swell.worker.models.text_part import (
    SEPARATE,
    text_architecture,
    text_config,
    text_names,
    towers,
    wrapper_class,
)
from swell.worker.quantization import refuse_quantized, refuse_type
from swell.worker.sharded.loading import load_saved_experts, load_sharded

Progress = Callable[[int, int], None]
"""Called with (bytes filled, all bytes) of this worker's parameters."""

ShardsOf = Callable[[Collection[str]], Iterable[WeightShard]]
"""Accepts the names of a checkpoint's tensors and returns the shards to fill."""

CHUNK_BYTES = 64 * 1024 * 1024
"""The largest part of a tensor that is read at a time: the memory that loading needs in addition to
the parameters."""

DUMMY_STD = 0.02
"""Standard deviation of dummy weights: it gives logits of a few units at every depth."""

POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

HUB_FILES = ("*.json", "*.safetensors")


def load_config(model_config: ModelConfig, *, pools: bool = False) -> Any:
    """Returns the model's `PretrainedConfig`, from a folder or from the hub. `pools`: the model
    pools, so it need not be a causal language model. Returns the config of the text model for a
    wrapper whose text model is served as an architecture of its own. Raises `ValueError`."""
    path = model_config.path
    config = _read_config(path)
    refuse_quantized(path, config)
    if not pools:
        _check_architecture(config)
        config = _served_part(model_config, config)
    try:
        config.get_text_config()
    except ValueError as error:
        raise ValueError(
            f"model {path!r} is not a single text model: {first_line(error)}"
        ) from None
    return config


def _read_config(path: str) -> Any:
    _check_path(path)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise ValueError(_explain_config(path, error)) from None


def _served_part(model_config: ModelConfig, hf_config: Any) -> Any:
    """Returns the config of a wrapper's text model if that is an architecture of its own which is
    native, or which transformers builds only separately; otherwise the config."""
    own = text_architecture(hf_config)
    is_native = own in NATIVE and model_config.backend != "transformers"
    if own is None or not (is_native or hf_config.model_type in SEPARATE):
        return hf_config
    return text_config(hf_config)


def _check_architecture(hf_config: Any) -> None:
    """Raises `ValueError` if transformers knows the architecture and it is not the causal language
    model of `model_type`, nor the class that wraps it: another type, or a model with another
    head."""
    kind, named = hf_config.model_type, getattr(hf_config, "architectures", None) or []
    own = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    classes = [own] if isinstance(own, str) else list(own or ())
    if not classes or not named or named[0] in classes or not hasattr(transformers, named[0]):
        return
    if wrapper_class(hf_config) is not None:
        return
    raise ValueError(
        f"architectures={named[0]!r} is not the causal language model of model_type={kind!r}, "
        f"which is {classes[0]!r}; only this class is served. If config.json is wrong, correct it"
    )


def resolve_dtype(model_config: ModelConfig, hf_config: Any) -> torch.dtype:
    """Returns the type of parameters and activations: the configured one, otherwise the
    checkpoint's."""
    if model_config.dtype != "auto":
        return DTYPES[model_config.dtype]
    configs = hf_config, hf_config.get_text_config()
    own = next((one.dtype for one in configs if getattr(one, "dtype", None)), torch.float32)
    if isinstance(own, str):
        own = getattr(torch, own.removeprefix("torch."), torch.float32)
    return own if own in DTYPES.values() else torch.float32


def stored_backend(model_config: ModelConfig) -> str:
    """Returns `model.backend`; for saved weights, `auto` is the backend that they were saved
    with."""
    if model_config.backend == "auto" and is_sharded(model_config):
        return read_index(_folder(model_config.path)).backend
    return model_config.backend


def max_positions(hf_config: Any) -> int | None:
    """Returns the number of positions that the model supports; None if its config does not say."""
    text_config = hf_config.get_text_config()
    for key in POSITION_KEYS:
        value = getattr(text_config, key, None)
        if isinstance(value, int) and value > 0:
            rope = getattr(text_config, "rope_parameters", None) or {}
            if rope.get("rope_type") == "yarn" and rope.get("factor"):
                old = rope.get("original_max_position_embeddings") or value
                value = max(value, int(old * rope["factor"]))
            return value
    return None


def max_model_len(model_config: ModelConfig, hf_config: Any) -> int:
    """Returns the longest sequence in tokens: `model.max_model_len`, otherwise all of the model's
    positions."""
    own, configured = max_positions(hf_config), model_config.max_model_len
    if own is None and configured is None:
        raise ValueError(
            f"model {model_config.path!r}: config.json does not say how many positions the model "
            f"has (none of {', '.join(POSITION_KEYS)}); set model.max_model_len"
        )
    if own is not None and configured is not None and configured > own:
        raise ValueError(
            f"model.max_model_len={configured} is above the model's {own} positions; "
            f"set it to {own} or less"
        )
    return configured or own or 0


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
    model: Loadable, model_config: ModelConfig, progress: Progress | None = None
) -> LoadedWeights:
    """Fills the parameters of `model` with this rank's part of the checkpoint. The log names the
    parts that are not served.

    Raises `ValueError` for a folder that does not hold what the model needs.
    """
    is_first = isinstance(model, HasMesh) and model.mesh.rank == 0
    if is_first and (skipped := towers(_read_config(model_config.path))):
        log = StructuredLogger("worker")
        log.info("only the text model is served", modalities=["text"], skipped=skipped)
    if not is_sharded(model_config):
        return LoadedWeights(load_weight_shards(model.weight_shards, model_config, progress), 0)
    assert isinstance(model, HasMesh), "only models that sample are saved sharded"
    folder = _folder(model_config.path)
    refuse_other_model(folder, read_index(folder), model_config)
    report = _LoadProgress(0, progress)
    mapped_bytes = load_sharded(model, folder, report)
    return LoadedWeights(report.total, mapped_bytes)


def load_experts(
    experts: Mapping[int, Sequence[WeightShard]],
    mesh: Mesh,
    model_config: ModelConfig,
    progress: Progress | None = None,
) -> None:
    """Fills the shards of experts that engines share, from saved weights or from a checkpoint."""
    if is_sharded(model_config):
        folder = _folder(model_config.path)
        load_saved_experts(folder, mesh, experts, _LoadProgress(0, progress))
    else:
        shards = [shard for own in experts.values() for shard in own]
        load_weight_shards(lambda _stored: shards, model_config, progress)


def load_weight_shards(
    shards_of: ShardsOf, model_config: ModelConfig, progress: Progress | None = None
) -> int:
    """Fills the shards that `shards_of` returns; returns their bytes.

    `load_format: dummy` fills them with random numbers that depend only on `model.seed`, the
    tensor's name, the part and the kind of the device, which draws them. Raises `ValueError` for a
    folder that does not hold the shards.
    """
    dummy = model_config.load_format == "dummy"
    stored = {} if dummy else _stored_tensors(model_config)
    weight_shards = list(shards_of(stored.keys()))
    report = _LoadProgress(sum(p.target.nbytes for p in weight_shards), progress)
    if dummy:
        _fill(weight_shards, model_config.seed, report)
        return report.total
    by_file: dict[Path, list[WeightShard]] = defaultdict(list)
    for shard in weight_shards:
        if shard.name not in stored:
            raise ValueError(
                f"model {model_config.path!r}: the weights have no tensor {shard.name!r}; the "
                "files do not belong to this config.json, or the download is incomplete"
            )
        tensor = stored[shard.name]
        by_file[tensor.path].append(replace(shard, name=tensor.name))
    for path in sorted(by_file):
        _read(path, by_file[path], report)
    return report.total


def checkpoint_names(model_config: ModelConfig) -> Collection[str]:
    """Returns the names of the checkpoint's tensors. Returns none for dummy weights, and none for
    saved weights, whose config.json says which embeddings are tied."""
    if model_config.load_format == "dummy" or is_sharded(model_config):
        return ()
    return _stored_tensors(model_config).keys()


def stored_equal(model_config: ModelConfig, one: str, other: str, dtype: torch.dtype) -> bool:
    """Whether two stored tensors are the same parameter of type `dtype`. Reads one part at a
    time."""
    stored = _stored_tensors(model_config)
    left_tensor, right_tensor = stored[one], stored[other]
    with _open(left_tensor.path) as a, _open(right_tensor.path) as b:
        left, right = a.get_slice(left_tensor.name), b.get_slice(right_tensor.name)
        shape = tuple(left.get_shape())
        if shape != tuple(right.get_shape()) or not shape:
            return False
        step = max(1, CHUNK_BYTES * shape[0] // (dtype.itemsize * max(1, math.prod(shape))))
        return all(
            torch.equal(left[row : row + step].to(dtype), right[row : row + step].to(dtype))
            for row in range(0, shape[0], step)
        )


class _LoadProgress:
    """Counts bytes towards the total."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total = 0, total
        self.progress = progress or (lambda done, total: None)

    def begin(self, total: int) -> None:
        self.total = total

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        self.progress(self.done, self.total)


def _read(path: Path, weight_shards: Sequence[WeightShard], report: _LoadProgress) -> None:
    with _open(path) as file:
        for needed in weight_shards:
            source = file.get_slice(needed.name)
            refuse_type(needed.name, source.get_dtype(), needed.target.dtype, path)
            shape = tuple(source.get_shape())
            shard = needed.as_stored(shape)
            if shape != tuple(shard.shape):
                raise ValueError(
                    f"tensor {shard.name!r} in {str(path)!r} has the shape {list(shape)}, but its "
                    f"config.json requires {list(shard.shape)}; use the weights and the "
                    "config.json of one model"
                )
            for target, index in _chunks(shard):
                target.copy_(source[index] if index else file.get_tensor(shard.name))
                report.add(target.nbytes)


def _chunks(shard: WeightShard) -> Iterator[tuple[torch.Tensor, tuple[slice | int, ...]]]:
    """Splits a large shard along its first dimension into chunks of at most `CHUNK_BYTES`."""
    target, index = shard.target, shard.index
    if target.nbytes <= CHUNK_BYTES or target.dim() == 0 or isinstance(index[0], int):
        yield target, index
        return
    step = max(1, CHUNK_BYTES // max(1, target[0].nbytes))
    first = index[0].start or 0
    for row in range(0, len(target), step):
        part = target[row : row + step]
        yield part, (slice(first + row, first + row + len(part)), *index[1:])


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        os.close(open_regular(path))
        opened = safe_open(str(path), framework="pt", device="cpu")
    except FileNotFoundError:
        raise ValueError(
            f"the weights' file {str(path)!r} is missing, but the index lists it; copy or "
            "download it again"
        ) from None
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"the weights' file {str(path)!r} cannot be read ({error}); it is incomplete or not a "
            "safetensors file; copy or download it again"
        ) from None
    with opened as file:
        try:
            yield file
        except SafetensorError as error:
            raise ValueError(
                f"the weights' file {str(path)!r} does not have a tensor that the index lists "
                f"({error}); copy or download both again"
            ) from None


class _FileTensor(NamedTuple):
    """A tensor of a checkpoint."""

    path: Path
    name: str


def _stored_tensors(model_config: ModelConfig) -> dict[str, _FileTensor]:
    """Returns the tensors of the checkpoint, by the names that they have for the served model: for
    the text model of a wrapper, without the wrapper's prefixes."""
    folder = _folder(model_config.path)
    files = _weight_map(folder)
    names = text_names(files)
    if names.keys() != files.keys():
        served = _served_part(model_config, _read_config(model_config.path))
        if wrapper_class(served):  # it knows its names
            names = {name: name for name in files}
    return {name: _FileTensor(folder / files[own], own) for name, own in names.items()}


def _weight_map(folder: Path) -> dict[str, str]:
    """Returns stored name of a tensor -> file name."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        try:
            weight_map = parse_json(read_file(index, MAX_INDEX_BYTES))["weight_map"]
            return {str(name): str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the index {str(index)!r} cannot be read ({error!r}); copy or download it again"
            ) from None
    if single.is_file():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single.name)
    others = sorted(p.name for p in folder.glob("*.bin"))
    found = f" (found only {others[0]}: convert it to safetensors)" if others else ""
    raise ValueError(
        f"model {str(folder)!r} has no weights: neither model.safetensors nor "
        f"model.safetensors.index.json{found}; add them, or set model.load_format=dummy"
    )


def _fill(weight_shards: Sequence[WeightShard], seed: int, report: _LoadProgress) -> None:
    """Fills matrices with random numbers, norm weights with ones and biases with zeros, as in a new
    model."""
    for shard in weight_shards:
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


def _check_path(path: str) -> None:
    """Raises `ValueError` for a folder without a model, and for a path that cannot be a hub id."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"model {path!r} has no config.json, so it is not a model folder")
        return
    parts = path.split("/")
    if os.path.isabs(path) or path.startswith((".", "~")) or not 1 <= len(parts) <= 2:
        raise ValueError(f"model {path!r}: there is no such folder; check model.path")


def _folder(path: str) -> Path:
    """Returns the local folder of a model's weights; a hub id is downloaded into the hub's
    cache."""
    _check_path(path)
    try:
        folder = model_folder(path, HUB_FILES)
    except Exception as error:
        raise ValueError(
            f"model {path!r}: there is no such folder, and the hub did not return the model "
            f"({first_line(error)}); check model.path, the network, and HF_TOKEN"
        ) from None
    if not os.path.isdir(path):  # `load_config` has checked a local folder
        refuse_quantized(str(folder), None)
    return folder


def _explain_config(path: str, error: Exception) -> str:
    text = first_line(error)
    if not os.path.isdir(path):
        return (
            f"model {path!r}: there is no such folder, and the hub did not return its config.json "
            f"({text}); check model.path, the network, and HF_TOKEN"
        )
    file = Path(path) / "config.json"
    try:
        known = parse_json(read_file(file, MAX_CONFIG_BYTES))
    except (OSError, ValueError) as broken:
        return f"{str(file)!r} is not JSON ({broken}); copy or download it again"
    kind = known.get("model_type") if isinstance(known, dict) else None
    if not kind:
        return f"{str(file)!r} has no model_type; it is not the config.json of a model"
    if kind not in CONFIG_MAPPING:
        return (
            f"model {path!r}: model_type {kind!r} is unknown to the installed transformers, and "
            "code from a model folder is never run; update transformers if it is new"
        )
    return f"{str(file)!r} is refused by transformers: {text}"
