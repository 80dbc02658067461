"""Reads the files of a LoRA adapter, as PEFT's `save_pretrained` writes them, with size limits.

    FOLDER/adapter_config.json          rank, scale, and the modules that it adapts
    FOLDER/adapter_model.safetensors    base_model.model.MODULE.lora_A.weight  [rank, in]
                                        base_model.model.MODULE.lora_B.weight  [out, rank]

An adapted module computes y = W x + scale * B (A x), with scale = alpha / rank, or with
`use_rslora` alpha / sqrt(rank). Any setting that changes this formula is refused, and the error
names it. The command line, ingresses and workers use the same reader; it runs no code of the files.

Raises only `ConfigError`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from swell.configs.error_text import SHOWN_CHARS, shown
from swell.configs.files.bounded_files import digest_file, open_regular, read_file
from swell.configs.lora import Adapter, LoraConfig
from swell.configs.section import ConfigError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 256 * 1024
MAX_HEADER_BYTES = 16 * 2**20
MAX_WEIGHTS_BYTES = 4 * 2**30
_LIMITS_BYTES = {CONFIG_NAME: MAX_CONFIG_BYTES, WEIGHTS_NAME: MAX_WEIGHTS_BYTES}
MAX_PATTERNS = 10_000
MAX_ALPHA = 1e5
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
ALL_LINEAR = "all-linear"
MERGE = "merge the adapter into a copy of the weights and serve this copy"

_PREFIX = "base_model.model."
_MATRICES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern",
    "init_lora_weights",
}  # fmt: skip
_NO_MATTER = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version",
    "revision", "runtime_config", "task_type", "qalora_group_size", "megatron_core",
    "ensure_weight_tying",
}  # fmt: skip
"""Keys that concern training only, and keys whose effect depends on another key that is refused."""
_NEUTRAL: dict[str, Any] = {"bias": "none"}
"""Key -> value with which it changes nothing. Null, false and empty texts, lists and objects change
nothing for any key. A number never counts as neutral: 0 may be the index of the first layer."""
_KEEPS_BASE = ("gaussian", "eva", "orthogonal", "lora_ga")
"""Values of `init_lora_weights` with which training leaves the weights of the base model
unchanged."""
_MODULE = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*\Z")


class AdapterTensor(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One tensor as the safetensors header describes it."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class AdapterModule(NamedTuple):
    """The matrices that an adapter adds to one module."""

    a: AdapterTensor
    """[rank, in]"""
    b: AdapterTensor
    """[out, rank]"""
    rank: int
    scale: float


class AdapterFiles(NamedTuple):
    """One adapter without the values of its matrices."""

    name: str
    folder: Path
    modules: dict[str, AdapterModule]
    """Name of a module in the base model's checkpoint, without `.weight` -> its matrices."""
    targets: list[str] | str
    """`target_modules`."""

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS_NAME

    def adapts(self, module: str) -> bool:
        """Whether `target_modules` names a linear module, by its full name or by its last parts. A
        regular expression in a file is not run: then the modules are those that the weights
        contain."""
        if self.targets == ALL_LINEAR:
            return True
        if isinstance(self.targets, str):
            return module in self.modules
        return any(module == name or module.endswith(f".{name}") for name in self.targets)


class _Settings(msgspec.Struct, frozen=True):
    """The keys of adapter_config.json that are used."""

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: list[str] | str
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}


def read_adapter(name: str, folder: str, max_rank: int) -> AdapterFiles:
    """Checks both files and returns their contents without the values of the matrices."""
    where, path = f"adapter {shown(name)}", Path(folder)
    if not _is_folder(path):
        raise ConfigError(
            f"{where}: {folder!r} is not a folder; specify a folder with {CONFIG_NAME} and "
            f"{WEIGHTS_NAME}, as PEFT's save_pretrained writes it"
        )
    settings = _read_settings(path / CONFIG_NAME, where)
    tensors = _read_header(path, where)
    modules: dict[str, dict[str, AdapterTensor]] = {}
    for key, tensor in tensors.items():
        module, matrix = _module_of(key, where)
        modules.setdefault(module, {})[matrix] = tensor
    read = {module: _pair(module, parts, settings, where) for module, parts in modules.items()}
    found = AdapterFiles(name, path, read, settings.target_modules)
    for module, pair in read.items():
        if not found.adapts(module):
            raise ConfigError(
                f"{where}: the weights adapt {shown(module)}, which "
                f"target_modules={shown(settings.target_modules)} does not contain; use the two "
                "files of one save_pretrained"
            )
        if pair.rank > max_rank:
            raise ConfigError(
                f"{where}: {shown(module)} has the rank {pair.rank}, above lora.max_rank="
                f"{max_rank}; raise it, or train the adapter with a smaller r",
                "lora.max_rank",
            )
    return found


def check_adapter(name: str, folder: str, max_rank: int) -> Adapter:
    """Reads and checks an adapter in a folder of this host, and returns it with its digest."""
    read_adapter(name, folder, max_rank)
    return Adapter(name, folder, adapter_digest(name, folder))


def adapters_of(lora: LoraConfig) -> dict[str, Adapter]:
    """Returns name -> adapter for the adapters of the configuration. Reads all their files."""
    return {
        name: Adapter(name, folder, adapter_digest(name, folder))
        for name, folder in lora.adapters.items()
    }


def check_adapters(lora: LoraConfig) -> None:
    """Raises `ConfigError` for adapters that no model could use."""
    for name, folder in lora.adapters.items():
        read_adapter(name, folder, lora.max_rank)


def adapter_digest(name: str, folder: str) -> str:
    """Returns a digest of both files, which identifies what the adapter computes."""
    found = hashlib.blake2b(digest_size=16)
    for file_name, limit_bytes in _LIMITS_BYTES.items():
        path = Path(folder, file_name)
        try:
            found.update(digest_file(path, limit_bytes, found.digest_size).encode())
        except OSError as error:
            raise ConfigError(
                f"adapter {shown(name)}: {path} cannot be read: {error.strerror}"
            ) from None
    return found.hexdigest()


def _is_folder(path: Path) -> bool:
    """Whether this is a folder. False for a name that no file can have or a folder without
    access."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _read_settings(path: Path, where: str) -> _Settings:
    try:
        data = read_file(path, MAX_CONFIG_BYTES)
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error.strerror}") from None
    try:
        raw = json.loads(data)
        if not isinstance(raw, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {path} is not JSON: {error}") from None
    _refuse_other_methods(raw, where)
    known = {key: raw[key] for key in _Settings.__struct_fields__ if raw.get(key) is not None}
    try:
        settings = msgspec.convert(known, _Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {path}: {error}") from None
    _check_numbers(settings, where)
    return settings


def _refuse_other_methods(raw: Mapping[str, Any], where: str) -> None:
    """Raises `ConfigError` for any key that would change what is computed."""
    if raw.get("peft_type") != "LORA":
        raise ConfigError(
            f"{where}: peft_type={shown(raw.get('peft_type'))} is not supported, only 'LORA'; "
            f"{MERGE}"
        )
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init not in _KEEPS_BASE:
        raise ConfigError(
            f"{where}: init_lora_weights={shown(init)} changes the weights of the model itself; "
            "convert the adapter (path_initial_model_for_weight_conversion of PEFT's "
            f"save_pretrained), or {MERGE}"
        )
    for key, value in raw.items():
        changes_nothing = value in (None, "", [], {}, _NEUTRAL.get(key)) or value is False
        if key in _READ or key in _NO_MATTER or changes_nothing:
            continue
        raise ConfigError(
            f"{where}: {_named(key)}={shown(value)} of {CONFIG_NAME} is not supported; train the "
            f"adapter without it, or {MERGE}"
        )


def _named(key: str) -> str:
    """Formats a key of a file, which may be any text, for an error message."""
    return key if key.isidentifier() and len(key) <= SHOWN_CHARS else shown(key)


def _check_numbers(settings: _Settings, where: str) -> None:
    targets = settings.target_modules
    if not targets or len(targets) > MAX_PATTERNS:
        raise ConfigError(
            f"{where}: target_modules has {len(targets)} names or characters; it must have 1 to "
            f"{MAX_PATTERNS}"
        )
    for key in ("rank_pattern", "alpha_pattern"):
        pattern: Mapping[str, float] = getattr(settings, key)
        if len(pattern) > MAX_PATTERNS:
            raise ConfigError(
                f"{where}: {key} has {len(pattern)} entries; the limit is {MAX_PATTERNS}"
            )
        for name in pattern:
            if not _MODULE.match(name.removeprefix("^")):
                raise ConfigError(
                    f"{where}: {key} has {shown(name)}, which is not the name of a module; write "
                    "one entry for each module"
                )
    for rank in (settings.r, *settings.rank_pattern.values()):
        if not 1 <= rank <= 2**20:
            raise ConfigError(f"{where}: the rank {rank} is outside 1 .. {2**20}")
    for alpha in (settings.lora_alpha, *settings.alpha_pattern.values()):
        if not 0 < alpha <= MAX_ALPHA:
            raise ConfigError(
                f"{where}: lora_alpha={alpha} must be above 0 and at most {MAX_ALPHA:g}"
            )


def _read_header(folder: Path, where: str) -> dict[str, AdapterTensor]:
    """Returns the tensors that the file describes."""
    path = folder / WEIGHTS_NAME
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            text = file.read(header_bytes) if header_bytes <= MAX_HEADER_BYTES else b""
    except OSError as error:
        other = " (adapter_model.bin is a pickle: convert it to safetensors)"
        found = other if (folder / "adapter_model.bin").exists() else ""
        raise ConfigError(f"{where}: {path} cannot be read: {error.strerror}{found}") from None
    if size_bytes > MAX_WEIGHTS_BYTES:
        raise ConfigError(
            f"{where}: {path} has {size_bytes} bytes; the limit is {MAX_WEIGHTS_BYTES}"
        )
    if header_bytes > MAX_HEADER_BYTES or len(text) < header_bytes:
        raise ConfigError(
            f"{where}: {path} has a header of {header_bytes} bytes in a file of {size_bytes}; the "
            f"limit is {MAX_HEADER_BYTES}: it is damaged, or not a safetensors file"
        )
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = msgspec.convert(header, dict[str, AdapterTensor])
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise ConfigError(
            f"{where}: {path} has no header that lists tensors: it is damaged, or not a "
            "safetensors file"
        ) from None
    if not tensors:
        raise ConfigError(f"{where}: {path} has no tensors")
    for key, tensor in tensors.items():
        _check_place(key, tensor, size_bytes - 8 - header_bytes, where)
    return tensors


def _check_place(key: str, tensor: AdapterTensor, data_bytes: int, where: str) -> None:
    (start, end), shape = tensor.data_offsets, tensor.shape
    if tensor.dtype not in ITEM_BYTES:
        raise ConfigError(
            f"{where}: {shown(key)} has the type {shown(tensor.dtype)}; supported types: "
            f"{', '.join(ITEM_BYTES)}"
        )
    if len(shape) != 2 or not all(0 < size < 2**31 for size in shape):
        raise ConfigError(
            f"{where}: {shown(key)} has the shape {shown(shape)}, which is not that of a matrix"
        )
    item_bytes = ITEM_BYTES[tensor.dtype]
    fits = 0 <= start <= end <= data_bytes and start % item_bytes == 0
    if not fits or end - start != math.prod(shape) * item_bytes:
        raise ConfigError(
            f"{where}: {shown(key)} has the shape {shape} and the place {start} .. {end} in "
            f"{data_bytes} bytes: the file is damaged; copy it again"
        )


def _module_of(key: str, where: str) -> tuple[str, str]:
    """Returns the module of a tensor and which of its matrices the tensor is, A or B."""
    for ending, matrix in _MATRICES.items():
        module = key.removeprefix(_PREFIX).removesuffix(ending)
        if key.startswith(_PREFIX) and key.endswith(ending) and _MODULE.match(module):
            return module, matrix
    raise ConfigError(
        f"{where}: the tensor {shown(key)} is not supported: only the matrices lora_A and lora_B "
        f"of linear modules are; {MERGE}"
    )


def _pair(
    module: str, parts: Mapping[str, AdapterTensor], settings: _Settings, where: str
) -> AdapterModule:
    rank = int(_of_pattern(settings.rank_pattern, module, settings.r))
    alpha = _of_pattern(settings.alpha_pattern, module, settings.lora_alpha)
    for matrix, axis in (("A", 0), ("B", 1)):
        if matrix not in parts:
            raise ConfigError(
                f"{where}: {shown(module)} has no lora_{matrix}: the file is "
                "incomplete; copy it again"
            )
        if parts[matrix].shape[axis] != rank:
            raise ConfigError(
                f"{where}: lora_{matrix} of {shown(module)} has the shape {parts[matrix].shape}, "
                f"but {CONFIG_NAME} sets the rank {rank}; use the two files of one save_pretrained"
            )
    scale = alpha / (math.sqrt(rank) if settings.use_rslora else rank)
    return AdapterModule(parts["A"], parts["B"], rank, scale)


def _of_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Returns the value of the first entry that names the module, by its full name or by its last
    parts, else the default. An entry that starts with `^` matches only the full name."""
    for name, value in pattern.items():
        whole = name.removeprefix("^")
        if module == whole or (whole == name and module.endswith(f".{name}")):
            return value
    return default
