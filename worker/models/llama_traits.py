"""The differences between the members of the llama family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Traits:
    """The differences between the members of the family."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalized per head, before their rotation."""
    windows: tuple[int, ...] = ()
    """How many tokens a token attends to in each layer, including itself; 0: all."""
    mlp_name: str = "mlp"
    """The name of the feed-forward block in a checkpoint."""


def _llama(config: Any) -> Traits:
    bias = bool(config.attention_bias)
    return Traits(qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.mlp_bias))


def _mistral(config: Any) -> Traits:
    return Traits(windows=(config.sliding_window or 0,) * config.num_hidden_layers)


def _qwen2(config: Any) -> Traits:
    return Traits(qkv_bias=True, windows=_windows(config))


def _qwen3(config: Any) -> Traits:
    bias = bool(config.attention_bias)
    return Traits(qkv_bias=bias, out_bias=bias, qk_norm=True, windows=_windows(config))


def _windows(config: Any) -> tuple[int, ...]:
    """Returns the window of each layer, from the layer types in the config."""
    known = {"full_attention": 0, "sliding_attention": config.sliding_window or 0}
    for kind in config.layer_types:
        if kind not in known:
            raise ValueError(
                f"layer_types has {kind!r}, which is not supported natively "
                f"(known: {', '.join(known)}); try model.backend=transformers"
            )
    return tuple(known[kind] for kind in config.layer_types)


TRAITS: dict[str, Callable[[Any], Traits]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
"""Architecture in config.json -> its traits."""
