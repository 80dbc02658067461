"""The config of a model: its architecture and sizes, from config.json.

Every error about it is one line that names the cause and the fix.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from swell.configs.files.bounded_files import MAX_CONFIG_BYTES, parse_json, read_file
from swell.configs.files.model_path import local_folder
from swell.configs.runtime.log import first_line
from swell.configs.schema import ModelConfig
from swell.worker.model_folder import check_path
from swell.worker.models import NATIVE
from swell.worker.models.text_part import (
    SEPARATE,
    text_architecture,
    text_config,
    wrapper_class,
)
from swell.worker.quantization.detection import find_scheme, without_quantization

POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_config(model_config: ModelConfig, *, pools: bool = False) -> Any:
    """Returns the model's `PretrainedConfig`, from a folder or from the hub. `pools`: the model
    pools, so it need not be a causal language model. Returns the config of the text model for a
    wrapper whose text model is served as an architecture of its own. The config does not say how
    the checkpoint is quantized. Raises `ValueError`, also for a quantization that is not
    supported."""
    path = model_config.path
    config = read_config(path)
    find_scheme(path, config.to_dict(), local_folder(path))
    without_quantization(config)
    if not pools:
        _check_architecture(config)
        config = served_part(model_config, config)
    try:
        config.get_text_config()
    except ValueError as error:
        reason = first_line(error).partition(". ")[0]  # the rest is advice for programs
        raise ValueError(f"model {path!r} is not a single text model: {reason}") from None
    return config


def read_config(path: str) -> Any:
    check_path(path)
    folder = local_folder(path)
    try:
        return AutoConfig.from_pretrained(folder or path, trust_remote_code=False)
    except Exception as error:
        raise ValueError(_explain_config(path, error)) from None


def served_part(model_config: ModelConfig, hf_config: Any) -> Any:
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


def _explain_config(path: str, error: Exception) -> str:
    text = first_line(error)
    folder = local_folder(path)
    if folder is None:
        return (
            f"model {path!r}: there is no such folder, and the hub did not return its config.json "
            f"({text}); check model.path, the network, and HF_TOKEN"
        )
    file = folder / "config.json"
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
