"""The index of a model whose weights are saved in the shards that the workers hold (`swell
save-sharded`).

    OUT/config.json, tokenizer, ...                those of the original
    OUT/weights-pp0of1-tp0of2.safetensors, ...     one per worker: its tensors by their modules
    OUT/expert0of8-pp0of1.safetensors, ...         with `parallel.expert` one per expert, for the
                                                   worker that owns it
    OUT/sharded.index.json                         the contents of the files, and their split

Workers and the command line read the index. It is written last, and contains the size and a digest
of the header of each file, so that files of two saves are never mixed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from swell.configs.files.bounded_files import MAX_CONFIG_BYTES, parse_json, read_file
from swell.configs.schema import Config, ConfigError, ModelConfig, ParallelConfig

INDEX_NAME = "sharded.index.json"
FORMAT = 1
"""Version of the index and the files; any other version is refused."""

MAX_INDEX_BYTES = 4 * 2**20
"""Enough for some thousand workers."""
MAX_WORKERS = 4096
MAX_FILES = 32_768

AGAIN = "save it again with `swell save-sharded` from the original model"

_Count = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
_Bytes = Annotated[int, Meta(ge=0, le=2**62)]
_Digest = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class _Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of the parts of the index."""


class PackedLayout(_Frozen, frozen=True):
    """The memory layout of packed weights (`swell.kernels.linear`)."""

    version: Annotated[int, Meta(ge=1)]
    """Version of the layout."""
    panel: Annotated[int, Meta(ge=1, le=4096)]
    """Outputs of one panel: depends on the vector width of the processor."""


class ShardFile(_Frozen, frozen=True):
    """The file of one worker or of one shared expert."""

    size_bytes: _Bytes
    header_digest: _Digest
    """Digest of its safetensors header, which has the names, shapes, types and checksums of its
    tensors."""


class ShardedIndex(_Frozen, frozen=True):
    """The contents of `sharded.index.json`."""

    format: int
    tensor: _Count
    pipeline: _Count
    experts: Annotated[int, Meta(ge=0, le=MAX_WORKERS)]
    """Number of experts in a layer if engines share experts: then each expert has its own file. 0:
    the files of the workers contain the experts."""
    dtype: Literal["float32", "bfloat16", "float16"]
    backend: Literal["native", "transformers"]
    """The backend whose module names the tensors have."""
    config_digest: _Digest
    """Digest of `config.json` in the same folder."""
    packing: PackedLayout | None
    """Layout of packed weights; None: no weight is packed."""
    machine: Annotated[str, Meta(max_length=64)]
    """The machine that saved the files, for messages."""
    files: dict[str, ShardFile]


def file_name(stage: int, tensor_rank: int, parallel: ParallelConfig) -> str:
    """Returns the name of a worker's file."""
    return f"weights-pp{stage}of{parallel.pipeline}-tp{tensor_rank}of{parallel.tensor}.safetensors"


def expert_file_name(expert: int, experts: int, stage: int, parallel: ParallelConfig) -> str:
    """Returns the name of the file of an expert that engines share."""
    return f"expert{expert}of{experts}-pp{stage}of{parallel.pipeline}.safetensors"


def is_sharded(model: ModelConfig) -> bool:
    """Whether the model's weights are read with an index: as `model.load_format` says; with `auto`,
    if the folder has an index."""
    if model.load_format == "auto":
        return (Path(model.path) / INDEX_NAME).is_file()
    return model.load_format == "sharded"


def read_index(folder: Path) -> ShardedIndex:
    """Reads the index of a folder. Raises ConfigError if it is missing or inconsistent."""
    path = folder / INDEX_NAME
    try:
        data = read_file(path, MAX_INDEX_BYTES)
    except FileNotFoundError:
        raise ConfigError(
            f"model {str(folder)!r} has no {INDEX_NAME}, which model.load_format=sharded needs; "
            "write it with `swell save-sharded`, or set model.load_format=auto"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}); {AGAIN}") from None
    try:
        version = parse_json(data)["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error!r}): it is damaged; {AGAIN}") from None
    if version != FORMAT:
        raise ConfigError(
            f"{path} has the format {version!r}, but this version of Swell reads {FORMAT}; {AGAIN}"
        )
    try:
        index = msgspec.json.decode(data, type=ShardedIndex)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is damaged ({error}); {AGAIN}") from None
    split = ParallelConfig(tensor=index.tensor, pipeline=index.pipeline)
    count = split.world + index.experts * split.pipeline
    if count > MAX_FILES or sorted(index.files) != sorted(file_names(split, index.experts)):
        raise ConfigError(f"{path} does not list one file for each worker; {AGAIN}")
    return index


def file_names(parallel: ParallelConfig, experts: int = 0) -> list[str]:
    """Returns the file names of all workers, by rank, then those of all experts."""
    stages = range(parallel.pipeline)
    return [
        *(file_name(stage, rank, parallel) for stage in stages for rank in range(parallel.tensor)),
        *(
            expert_file_name(expert, experts, stage, parallel)
            for stage in stages
            for expert in range(experts)
        ),
    ]


def config_digest(folder: Path) -> str:
    """Returns a digest of the values in `config.json`, which its formatting does not change. Raises
    ConfigError if the file cannot be read."""
    path = folder / "config.json"
    try:
        values = parse_json(read_file(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return digest_of(json.dumps(values, sort_keys=True).encode())


def digest_of(content: bytes) -> str:
    """Returns the digest by which the index identifies its files."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def check_sharded(config: Config) -> None:
    """Raises ConfigError if the files do not suit the configuration, before anything is started."""
    folder = Path(config.model.path)
    index = read_index(folder)
    refuse_other_split(folder, index, config.parallel)
    refuse_other_model(folder, index, config.model)
    for name, file in index.files.items():
        refuse_other_length(folder / name, file)


def refuse_other_split(folder: Path, index: ShardedIndex, parallel: ParallelConfig) -> None:
    """Raises ConfigError unless the parallelism is the one for which the weights were saved."""
    if parallel.expert != bool(index.experts):
        saved = str(bool(index.experts)).lower()
        raise ConfigError(
            f"model {str(folder)!r} was saved for parallel.expert={saved}, which determines the "
            f"files with the experts; set parallel.expert={saved}, or {AGAIN} for the other value"
        )
    if (parallel.tensor, parallel.pipeline) != (index.tensor, index.pipeline):
        raise ConfigError(
            f"model {str(folder)!r} was saved for parallel.tensor={index.tensor} and "
            f"parallel.pipeline={index.pipeline}, but the configuration has "
            f"parallel.tensor={parallel.tensor} and parallel.pipeline={parallel.pipeline}; set "
            f"the saved values, or {AGAIN} for the configured ones"
        )


def refuse_other_model(folder: Path, index: ShardedIndex, model: ModelConfig) -> None:
    """Raises ConfigError if dtype, backend or config.json differ from the saved ones."""
    for key, wanted, saved in (
        ("model.dtype", model.dtype, index.dtype),
        ("model.backend", model.backend, index.backend),
    ):
        if wanted not in ("auto", saved):
            raise ConfigError(
                f"model {str(folder)!r} was saved with {key}={saved}, but the configuration has "
                f"{key}={wanted}; set {key}={saved} or auto, or {AGAIN} with {key}={wanted}"
            )
    if config_digest(folder) != index.config_digest:
        raise ConfigError(
            f"{folder / 'config.json'} is not the file that was saved with these weights; restore "
            f"that file, or {AGAIN}"
        )


def refuse_other_length(path: Path, file: ShardFile) -> None:
    """Raises ConfigError if a file is missing or truncated."""
    try:
        size_bytes = path.stat().st_size
    except OSError:
        raise ConfigError(
            f"{path} is missing, but {INDEX_NAME} lists it; copy it there again"
        ) from None
    if size_bytes != file.size_bytes:
        raise ConfigError(
            f"{path} has {size_bytes} bytes instead of {file.size_bytes}: it is damaged; copy it "
            "there again"
        )
