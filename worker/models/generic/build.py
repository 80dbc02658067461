"""Builds a transformers model: first without memory, to inspect it, then on its device."""

from __future__ import annotations

import copy
import inspect
import threading
from typing import Any

import torch
from torch import nn

from swell.configs.runtime.log import first_line
from swell.worker.layers.packed_weight import PackedWeight
from swell.worker.models.generic import attention
from swell.worker.models.text_part import wrapper_class

SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")

INITIALIZED = "_is_hf_initialized"
"""The attribute with which transformers marks tensors that `initialize_weights` must not change."""

_CONSTRUCTION = threading.Lock()
"""Held while transformers builds or initializes a model, because it patches torch functions."""


def on_meta(config: Any) -> tuple[Any, Any]:
    """Returns the model on the meta device, and its text body. Raises `ValueError` if no causal LM
    can be built."""
    from transformers import GenerationMixin

    attention.register()
    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    try:
        with _CONSTRUCTION, torch.device("meta"):
            causal = auto_class(config).from_config(
                copy.deepcopy(config),
                dtype=torch.float32,
                attn_implementation=_attention_of(config),
                trust_remote_code=False,
            )
    except KeyError as error:
        raise ValueError(
            f"architecture {name!r} cannot be served: its attention does not go through "
            f"transformers' attention interface ({error})"
        ) from None
    except Exception as error:
        reason = first_line(error)
        if reason.startswith("Unrecognized configuration class"):
            reason = "it has no class that computes the logits of a text"
        raise ValueError(
            f"architecture {name!r} is not a causal LM that transformers can build: {reason}"
        ) from None
    name, body = type(causal).__name__, body_of(causal)
    base, why = text_body(body), None
    if not isinstance(causal, GenerationMixin):
        why = "it does not generate one token after another"
    elif base not in body.modules() or body is causal:
        why = "its body cannot be separated from its head"
    elif getattr(causal, "_is_stateful", False):
        why = "its layers have a recurrent state"
    elif "position_ids" not in inspect.signature(base.forward).parameters:
        why = "its forward does not accept positions"
    elif not all(isinstance(getattr(base.config, k, None), int) for k in SIZES):
        why = f"its config lacks one of {', '.join(SIZES)}"
    if why:
        raise ValueError(f"architecture {name!r} cannot be served: {why}")
    return causal.eval(), base


def _attention_of(config: Any) -> str | dict[str, str]:
    """Returns our attention for the text model; towers, which are dropped, have their own."""
    own = attention.NAME
    if wrapper_class(config) is None:
        return own
    text = config.get_text_config()
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    return {"": own, **{key: own if part is text else "eager" for key, part in parts.items()}}


def auto_class(config: Any) -> Any:
    """Returns the class of transformers that builds a model with a head for tokens: a wrapper's
    own, otherwise that of causal LMs."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if wrapper_class(config) else AutoModelForCausalLM


def body_name(causal: Any) -> str:
    """Returns the name of the model's part that computes hidden states; '' if it is not
    a part of its own."""
    from transformers import PreTrainedModel

    parts = [name for name, part in causal.named_children() if isinstance(part, PreTrainedModel)]
    if causal.base_model_prefix in parts:
        return str(causal.base_model_prefix)
    return parts[0] if len(parts) == 1 else ""


def body_of(causal: Any) -> Any:
    """Returns the model's part that computes hidden states; the model if that is not a part of
    its own."""
    return causal.get_submodule(body_name(causal))


def text_body(body: Any) -> Any:
    """Returns the part that computes hidden states of tokens: the body, or the text model within
    the body of a wrapper."""
    return body if body.config.get_text_config() is body.config else body.get_decoder()


def drop_towers(causal: nn.Module, base: nn.Module) -> None:
    """Removes what surrounds the text body `base` within the body of a wrapper: the towers and
    their projectors."""
    inner = body_of(causal)
    while inner is not base:
        around = [name for name, child in inner.named_children() if base not in child.modules()]
        for name in around:
            setattr(inner, name, nn.Identity())
        inner = next(child for child in inner.children() if base in child.modules())


def materialize(causal: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Allocates parameters and buffers, and initializes those that a checkpoint does not hold. The
    matrices of linear layers get their type, but no memory yet.

    Works like `from_pretrained`: tensors marked as initialized are not changed.
    """
    from transformers.pytorch_utils import Conv1D

    fp32 = list(causal._keep_in_fp32_modules_strict)
    if dtype == torch.float16:
        fp32 += list(causal._keep_in_fp32_modules)
    late = {
        id(module.weight)
        for module in causal.modules()
        if type(module) in (nn.Linear, Conv1D) or isinstance(module, PackedWeight)
    }
    made: dict[int, torch.Tensor] = {}

    def real(old: torch.Tensor, name: str) -> torch.Tensor:
        if id(old) not in made:
            keep = not old.is_floating_point() or any(part in name for part in fp32)
            made[id(old)] = torch.empty(
                old.shape,
                dtype=old.dtype if keep else dtype,
                device="meta" if id(old) in late else device,
            )
        return made[id(old)]

    for path, module in causal.named_modules():
        for name, old in module._parameters.items():
            if old is None:
                continue
            new = real(old, f"{path}.{name}")
            if not isinstance(new, nn.Parameter):  # of the first module that has it
                made[id(old)] = new = nn.Parameter(new, requires_grad=False)
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
