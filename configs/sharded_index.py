"""The index of a model whose weights are saved as each worker holds them (`swell save-sharded`).

    OUT/config.json, tokenizer, ...                those of the original
    OUT/weights-pp0of1-tp0of2.safetensors, ...     one a worker: its tensors by their modules
    OUT/expert0of8-pp0of1.safetensors, ...         with `parallel.expert` one an expert, for
                                                   whichever worker owns it
    OUT/sharded.index.json                         what the files hold, and for which split

Worker and command line read it; it is written last, and says of each file how long it is and how
its header looks, so that files of two saves are never mixed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from swell.configs.bounded_files import MAX_CONFIG_BYTES, read_file
from swell.configs.json_text import parse_json
from swell.configs.schema import Config, ConfigError, ModelConfig, ParallelConfig

INDEX_NAME = "sharded.index.json"
FORMAT = 1
"""Version of index and files; another one is refused."""

MAX_INDEX_BYTES = 4 * 2**20
"""Some thousand workers."""
MAX_WORKERS = 4096
MAX_FILES = 32_768

AGAIN = "save it again with `swell save-sharded` from the original model"

_Count = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
_Bytes = Annotated[int, Meta(ge=0, le=2**62)]
_Digest = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class _Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the parts."""


class Packing(_Frozen, frozen=True):
    """The order of packed weights (`swell.kernels.linear`)."""

    version: Annotated[int, Meta(ge=1)]
    """Of the order itself."""
    panel: Annotated[int, Meta(ge=1, le=4096)]
    """Outputs of one panel: it depends on the vectors of the processor."""


class ShardFile(_Frozen, frozen=True):
    """One worker's file."""

    size_bytes: _Bytes
    header_digest: _Digest
    """Of its safetensors header, which has the names, shapes, types and sums of its tensors."""


class ShardedIndex(_Frozen, frozen=True):
    """What `sharded.index.json` holds."""

    format: int
    tensor: _Count
    pipeline: _Count
    experts: Annotated[int, Meta(ge=0, le=MAX_WORKERS)]
    """Of a layer, if engines share them: each has a file of its own then. 0: workers have them."""
    dtype: Literal["float32", "bfloat16", "float16"]
    backend: Literal["native", "transformers"]
    """Whose modules name the tensors."""
    config_digest: _Digest
    """Of `config.json` beside it."""
    packing: Packing | None
    """None: no weight is packed."""
    machine: Annotated[str, Meta(max_length=64)]
    """The machine that saved it, for messages."""
    files: dict[str, ShardFile]


def file_name(stage: int, tensor_rank: int, parallel: ParallelConfig) -> str:
    """The file of one worker."""
    return f"weights-pp{stage}of{parallel.pipeline}-tp{tensor_rank}of{parallel.tensor}.safetensors"


def expert_file_name(expert: int, experts: int, stage: int, parallel: ParallelConfig) -> str:
    """The file of one of the experts that engines share."""
    return f"expert{expert}of{experts}-pp{stage}of{parallel.pipeline}.safetensors"


def is_sharded(model: ModelConfig) -> bool:
    """Whether its weights are read by an index: as `model.load_format` says, and `auto` where the
    folder has one."""
    if model.load_format == "auto":
        return (Path(model.path) / INDEX_NAME).is_file()
    return model.load_format == "sharded"


def read_index(folder: Path) -> ShardedIndex:
    """The index of a folder. Raises ConfigError if it is missing or wrong in itself."""
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
        raise ConfigError(f"{path} has the format {version!r}, this Swell reads {FORMAT}; {AGAIN}")
    try:
        index = msgspec.json.decode(data, type=ShardedIndex)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is damaged ({error}); {AGAIN}") from None
    split = ParallelConfig(tensor=index.tensor, pipeline=index.pipeline)
    count = split.world + index.experts * split.pipeline
    if count > MAX_FILES or sorted(index.files) != sorted(file_names(split, index.experts)):
        raise ConfigError(f"{path} does not list one file for each worker of its split; {AGAIN}")
    return index


def file_names(parallel: ParallelConfig, experts: int = 0) -> list[str]:
    """The files of all workers, by rank, then those of all experts."""
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
    """Of `config.json`, whatever its layout. Raises ConfigError if it cannot be read."""
    path = folder / "config.json"
    try:
        values = parse_json(read_file(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return digest_of(json.dumps(values, sort_keys=True).encode())


def digest_of(content: bytes) -> str:
    """The digest by which index and files know each other."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def check_sharded(config: Config) -> None:
    """Refuse what the index cannot serve, before anything is started. Raises ConfigError."""
    folder = Path(config.model.path)
    index = read_index(folder)
    refuse_other_split(folder, index, config.parallel)
    refuse_other_model(folder, index, config.model)
    for name, file in index.files.items():
        refuse_other_length(folder / name, file)


def refuse_other_split(folder: Path, index: ShardedIndex, parallel: ParallelConfig) -> None:
    """Raise ConfigError unless the workers are those for which it was saved."""
    if parallel.expert != bool(index.experts):
        saved = str(bool(index.experts)).lower()
        raise ConfigError(
            f"model {str(folder)!r} is saved for parallel.expert={saved}: whether engines share "
            f"experts decides which file has them; set parallel.expert={saved}, or {AGAIN} for "
            "the other"
        )
    if (parallel.tensor, parallel.pipeline) != (index.tensor, index.pipeline):
        raise ConfigError(
            f"model {str(folder)!r} is saved for parallel.tensor={index.tensor} and "
            f"parallel.pipeline={index.pipeline}, but the configuration has "
            f"parallel.tensor={parallel.tensor} and parallel.pipeline={parallel.pipeline}; set "
            f"those, or {AGAIN} for these"
        )


def refuse_other_model(folder: Path, index: ShardedIndex, model: ModelConfig) -> None:
    """Raise ConfigError for another type or backend than the saved one, or another config.json."""
    for key, wanted, saved in (
        ("model.dtype", model.dtype, index.dtype),
        ("model.backend", model.backend, index.backend),
    ):
        if wanted not in ("auto", saved):
            raise ConfigError(
                f"model {str(folder)!r} is saved with {key}={saved}, but the configuration has "
                f"{key}={wanted}; set {key}={saved} or auto, or {AGAIN} with {key}={wanted}"
            )
    if config_digest(folder) != index.config_digest:
        raise ConfigError(
            f"{folder / 'config.json'} is not the one that was saved with the weights beside it; "
            f"put that one back, or {AGAIN}"
        )


def refuse_other_length(path: Path, file: ShardFile) -> None:
    """Raise ConfigError if a file is missing or cut off."""
    try:
        size_bytes = path.stat().st_size
    except OSError:
        raise ConfigError(
            f"{path} is missing although {INDEX_NAME} lists it; copy it there again"
        ) from None
    if size_bytes != file.size_bytes:
        raise ConfigError(
            f"{path} has {size_bytes} bytes of {file.size_bytes}: it is damaged; copy it there "
            "again"
        )
