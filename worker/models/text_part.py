"""The text model within the checkpoint of a wrapper: a text model with towers for images or sound.

The text model of a wrapper is often an architecture of its own that has a native model. Then the
checkpoint is read as one of that architecture: with the config of the text model, and with the
names that its weights have without the wrapper.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from swell.worker.models import NATIVE

_PART = r"(?:language_model|text_model|llm)"
_PREFIXES = (
    (re.compile(rf"(?:model\.)?(?:{_PART}\.)?lm_head\."), "lm_head."),
    (re.compile(rf"(?:model\.)?{_PART}\.(?:model\.)?"), "model."),
)
"""A prefix in a wrapper's checkpoint -> the prefix in that of the text model."""

SEPARATE = {"fast_vlm", "gemma3n", "llama4", "perception_lm"}
"""Wrappers whose text model transformers builds only separately: their towers need other libraries,
or the body of their text model cannot be separated from its head."""


def wrapper_class(hf_config: Any) -> str | None:
    """Returns the class of transformers that the config names if it wraps a text model; None for
    any other config."""
    wrapper: str | None = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(hf_config.model_type)
    named = (getattr(hf_config, "architectures", None) or [wrapper])[0]
    return wrapper if wrapper == named else None


def has_parts(hf_config: Any) -> bool:
    """Whether the checkpoint has the tensors of a text model among those of other parts, as that of
    a wrapper has. transformers lists a few such types as causal language models."""
    is_wrapper = wrapper_class(hf_config) is not None
    return is_wrapper or hf_config.get_text_config() is not hf_config


def towers(hf_config: Any) -> list[str]:
    """Returns the names of a wrapper's parts besides its text model, as `vision_config` names the
    part `vision`."""
    if not has_parts(hf_config):
        return []
    text = hf_config.get_text_config()
    parts = [name for name in hf_config.sub_configs if getattr(hf_config, name, None) is not None]
    others = [name for name in parts if getattr(hf_config, name) is not text]
    return sorted(name.removesuffix("_config") for name in others)


def text_architecture(hf_config: Any) -> str | None:
    """Returns the architecture of the text model in a wrapper; None for a config without a wrapper,
    and for a text model that transformers knows only within its wrapper."""
    if wrapper_class(hf_config) is None:
        return None
    text = hf_config.get_text_config()
    if text is hf_config:
        return None
    own = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    return own if own is None or isinstance(own, str) else own[0]


def text_config(hf_config: Any) -> Any:
    """Returns the config of the text model in a wrapper, as if it were published separately."""
    text = copy.deepcopy(hf_config.get_text_config())
    is_tied = getattr(hf_config, "tie_word_embeddings", text.tie_word_embeddings)
    dtype = hf_config.dtype or text.dtype
    own = [text_architecture(hf_config)]
    text.update({"architectures": own, "tie_word_embeddings": is_tied, "dtype": dtype})
    return text


def renamed(config: Mapping[str, Any], stored: Collection[str]) -> dict[str, str]:
    """Returns name in a checkpoint of a native architecture -> stored name. A model type may store
    other names than its architecture, as `exaone` does, which is a llama: transformers lists them.
    Returns the names unchanged for other architectures, and if tensors have to be converted, too.

    `config`: the content of config.json.
    """
    is_native = (config.get("architectures") or [""])[0] in NATIVE
    kind = config.get("model_type") if is_native else None
    changes = get_checkpoint_conversion_mapping(kind) or []
    if not all(isinstance(change, WeightRenaming) for change in changes):
        changes = []
    return {apply_renamings(name, changes): name for name in stored}


def text_names(stored: Collection[str]) -> dict[str, str]:
    """Returns name in a checkpoint of only the text model -> stored name, for all names that
    belong to the text model of a wrapper. Returns the names unchanged if they are not those of a
    wrapper."""
    found, is_wrapped = {}, False
    for name in stored:
        for pattern, prefix in _PREFIXES:
            if match := pattern.match(name):
                found[prefix + name[match.end() :]] = name
                is_wrapped |= prefix == "model."
                break
    return found if is_wrapped else {name: name for name in stored}
