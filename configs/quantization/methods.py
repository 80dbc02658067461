"""The values that a checkpoint declares for each method of quantization. Those that are not
supported are refused here, before anything is started; wrong tensors are refused when they are
read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

GPTQ_BITS = (2, 3, 4, 8)
_GPTQ_VERSION_KEYS = ("checkpoint_format", "format")
"""Keys that name the version of the format, the first of them first."""
_COMPRESSED_FORMATS = (
    *("dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"),
)
_ORDERED, _UNORDERED = ("group", "dynamic", True), ("weight", "static", False)
"""Values of `actorder`: with the first ones, inputs have any groups."""
_FUSED = ("weight_input", "weight_output")
"""Locations of transforms that the stored weights already contain."""
_MODELOPT_ALGORITHMS = (
    *("fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "nvfp4", "mxfp8", "mixed_precision"),
)
_INPUT_FACTORS = ".pre_quant_scale"
"""Factors by which AWQ multiplies the inputs of a matrix; its weights are divided by them."""


@dataclass(frozen=True)
class Fp8Values:
    block: tuple[int, int] | None
    """Rows and columns with one scale; None: the stored scales say which."""


@dataclass(frozen=True)
class GptqValues:
    """Some matrices may have other bits and groups."""

    bits: int
    group_size: int
    """-1: one group has all inputs."""
    is_symmetric: bool
    is_second_version: bool
    is_ordered: bool
    """Whether inputs are ordered by activation."""


@dataclass(frozen=True)
class ModuleGroup:
    """Modules of compressed-tensors with the same format."""

    targets: tuple[str | re.Pattern[str], ...] = ()
    """Names of modules, patterns of names, and classes."""
    bits: int = 0
    group_size: int = -1
    """-1: one group has all inputs."""
    block: tuple[int, int] | None = None
    needed: tuple[str, ...] = ()
    """The suffixes of tensors that each of their matrices has."""


def awq(config: Mapping[str, Any]) -> None:
    _refuse_values(config, {"bits": (4,), "w_bit": (4,), "zero_point": (True,)})
    layout = ("gemm",)
    _refuse_values(config, {"version": layout, "format": layout, "backend": ("autoawq",)})


def compressed_tensors(config: Mapping[str, Any]) -> tuple[ModuleGroup, ...]:
    _refuse_values(config, {"format": _COMPRESSED_FORMATS})
    _refuse_values(_mapping(config, "sparsity_config"), {"format": ("dense",)})
    _refuse_online(_mapping(config, "transform_config"))
    groups = _mapping(config, "config_groups")
    return tuple(_module_group(_mapping(groups, name)) for name in groups)


def fp8(config: Mapping[str, Any]) -> Fp8Values:
    _refuse_values(config, {"expert_dtype": ("fp8",), "fmt": ("e4m3", "float8_e4m3")})
    return Fp8Values(_block_size(config, "weight_block_size"))


def gptq(config: Mapping[str, Any]) -> GptqValues:
    versions = dict.fromkeys(_GPTQ_VERSION_KEYS, ("gptq", "gptq_v2"))
    _refuse_values(config, {"bits": GPTQ_BITS, "is_marlin_format": (False,), **versions})
    version = next((config[key] for key in _GPTQ_VERSION_KEYS if config.get(key)), "gptq")
    return GptqValues(
        bits=_integer(config, "bits") or 0,
        group_size=_integer(config, "group_size") or -1,
        is_symmetric=bool(config.get("sym")),
        is_second_version=version.lower() == "gptq_v2",
        is_ordered=bool(config.get("desc_act")),
    )


def modelopt(config: Mapping[str, Any]) -> None:
    declared = _mapping(config, "quantization") or config  # hf_quant_config.json has it inside
    _refuse_values(declared, {"quant_algo": _MODELOPT_ALGORITHMS})
    layers = _mapping(declared, "quantized_layers")
    for name in layers:
        try:
            _refuse_values(_mapping(layers, name), {"quant_algo": _MODELOPT_ALGORITHMS})
        except ValueError as error:
            raise ValueError(f"{error} of {name}") from None


def mxfp4(config: Mapping[str, Any]) -> None:
    """Accepts all values: the stored tensors have only one format."""


METHODS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fbgemm_fp8": fp8,
    "fp8": fp8,
    "gptq": gptq,
    "modelopt": modelopt,
    "mxfp4": mxfp4,
}
"""Method -> a function that returns the values that its matrices need. It raises `ValueError` with
the key and the value that is not supported."""


def refuse_tensor(method: str, name: str) -> None:
    """Raises `ValueError` for a stored tensor without which the matrices of a method have other
    values, and which is not supported."""
    if method == "modelopt" and name.endswith(_INPUT_FACTORS):
        raise ValueError(
            f"tensor {name!r} has factors of activations, which are not supported; serve the "
            "checkpoint from which it was made"
        )


def _refuse_online(transforms: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a transform that is not fused into the weights: it would have to be
    applied to activations."""
    groups = _mapping(transforms, "config_groups")
    for name in groups:
        applied = _mapping(groups, name).get("apply")
        for each in applied if isinstance(applied, list) else [applied]:
            location = each.get("location") if isinstance(each, Mapping) else None
            if location not in _FUSED:
                raise ValueError(
                    f"transform_config: location={location!r} of {name} (supported: "
                    f"{', '.join(_FUSED)}, which are fused into the weights)"
                )


def _module_group(declared: Mapping[str, Any]) -> ModuleGroup:
    _refuse_values(declared, {"format": _COMPRESSED_FORMATS})
    _refuse_values(_mapping(declared, "weights"), {"actorder": (*_ORDERED, *_UNORDERED)})
    targets, weights = declared.get("targets") or [], _mapping(declared, "weights")
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise ValueError(f"targets={targets!r} (names are expected)")
    try:
        found = [
            re.compile(target.removeprefix("re:")) if target.startswith("re:") else target
            for target in targets
        ]
    except re.error as error:
        raise ValueError(f"targets={targets!r} ({error})") from None
    return ModuleGroup(
        targets=tuple(found),
        bits=_integer(weights, "num_bits") or 0,
        group_size=_integer(weights, "group_size") or -1,
        block=_block_size(weights, "block_structure"),
        needed=_needed(weights),
    )


def _needed(weights: Mapping[str, Any]) -> tuple[str, ...]:
    if weights.get("type") == "float":
        return ()
    order = weights.get("actorder")
    is_ordered = (order.lower() if isinstance(order, str) else order) in _ORDERED
    zeros = (".weight_zero_point",) if weights.get("symmetric") is False else ()
    return (*zeros, ".weight_g_idx") if is_ordered else zeros


def _refuse_values(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises `ValueError` for a key with a value that is not allowed. A missing key is allowed;
    strings are compared without case."""
    for key, values in allowed.items():
        value = config.get(key)
        plain = value.lower() if isinstance(value, str) else value
        if plain is not None and plain not in values:
            known = ", ".join(str(each) for each in values)
            raise ValueError(f"{key}={value!r} (supported: {known})")


def _integer(config: Mapping[str, Any], key: str) -> int | None:
    """Returns the integer of a key; None if it is missing or null. Raises `ValueError`."""
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"{key}={value!r} (an integer is expected)")
    return value


def _block_size(config: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Returns the rows and columns of a block; None if the key is missing or null. Raises
    `ValueError`."""
    value = config.get(key)
    parts = value.split("x") if isinstance(value, str) else value
    if parts is None:
        return None
    try:
        rows, columns = (int(part) for part in parts)
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        raise ValueError(f"{key}={value!r} (two sizes are expected)")
    return rows, columns


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the object of a key; an empty one if it is missing or null. Raises `ValueError`."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key}={value!r} (an object is expected)")
    return value or {}
