"""Builds a transformers model: first without memory, to inspect it, then on its device."""

from __future__ import annotations

import copy
import inspect
import threading
from typing import Any

import torch
from torch import nn

from swell.configs.runtime.log import first_line
from swell.worker.models import generic_attention

SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")

INITIALIZED = "_is_hf_initialized"
"""The attribute with which transformers marks tensors that `initialize_weights` must not change."""

_CONSTRUCTION = threading.Lock()
"""Held while transformers builds or initializes a model, because it patches torch functions."""


def on_meta(config: Any) -> tuple[Any, Any]:
    """Returns the model on the meta device, and its body. Raises `ValueError` if it is not a causal
    LM."""
    from transformers import AutoModelForCausalLM

    generic_attention.register()
    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    try:
        with _CONSTRUCTION, torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                dtype=torch.float32,
                attn_implementation=generic_attention.NAME,
                trust_remote_code=False,
            )
    except KeyError as error:
        raise ValueError(
            f"architecture {name!r} cannot be served: its attention does not go through "
            f"transformers' attention interface ({error})"
        ) from None
    except Exception as error:
        raise ValueError(
            f"architecture {name!r} is not a causal LM that transformers can build: "
            f"{first_line(error)}"
        ) from None
    name, base = type(causal).__name__, causal.base_model
    text = base.config.get_text_config()
    parts = [] if text is base.config else sorted(set(base.config.sub_configs) - {"text_config"})
    why = None
    if base is causal:
        why = "its body cannot be separated from its head"
    elif getattr(causal, "_is_stateful", False):
        why = "its layers have a recurrent state"
    elif "position_ids" not in inspect.signature(base.forward).parameters:
        why = "its forward does not accept positions"
    elif parts:
        why = f"it has {', '.join(parts)} besides its text model, but only text models are served"
    elif not all(isinstance(getattr(base.config, k, None), int) for k in SIZES):
        why = f"its config lacks one of {', '.join(SIZES)}"
    if why:
        raise ValueError(f"architecture {name!r} cannot be served: {why}")
    return causal.eval(), base


def materialize(causal: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Allocates parameters and buffers, and initializes those that a checkpoint does not hold.

    Works like `from_pretrained`: tensors marked as initialized are not changed.
    """
    fp32 = list(causal._keep_in_fp32_modules_strict)
    if dtype == torch.float16:
        fp32 += list(causal._keep_in_fp32_modules)
    made: dict[int, torch.Tensor] = {}

    def real(old: torch.Tensor, name: str) -> torch.Tensor:
        if id(old) not in made:
            keep = not old.is_floating_point() or any(part in name for part in fp32)
            made[id(old)] = torch.empty(
                old.shape, dtype=old.dtype if keep else dtype, device=device
            )
        return made[id(old)]

    for path, module in causal.named_modules():
        for name, old in module._parameters.items():
            if old is not None:
                data = real(old, f"{path}.{name}")
                made[id(old)] = new = nn.Parameter(data, requires_grad=False)
                setattr(new, INITIALIZED, True)
                module._parameters[name] = new
        for name, old in module._buffers.items():
            if old is None:
                continue
            if name in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty(old.shape, dtype=old.dtype, device=device)
            else:
                module._buffers[name] = real(old, f"{path}.{name}")
                setattr(module._buffers[name], INITIALIZED, True)
    with _CONSTRUCTION:
        causal.initialize_weights()
