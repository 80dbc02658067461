"""The differences between the members of the llama family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from swell.worker.layers.norm import OffsetRMSNorm, RMSNorm


class NormNames(NamedTuple):
    """The names that the norms of a layer have in a checkpoint: of the inputs of attention and of
    the feed-forward block, and of their outputs, before these are added to the residual; None:
    outputs are not normalized."""

    attention: str
    mlp: str
    attention_output: str | None = None
    mlp_output: str | None = None


_PLAIN = NormNames("input_layernorm", "post_attention_layernorm")
_SANDWICH = NormNames(
    "input_layernorm",
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)


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
    rope_kinds: tuple[str, ...] = ()
    """The key of each layer's parameters in `rope_parameters`; none: all layers have the same."""
    rotated: float = 1.0
    """The part of each head that is rotated."""
    scale: float | None = None
    """The factor on attention scores; None: 1 / sqrt(head_dim)."""
    softcap: float = 0.0
    """The bound of attention scores; 0: none."""
    logits_softcap: float = 0.0
    """The bound of logits; 0: none."""
    embedding_scale: float = 1.0
    """The factor on embeddings of tokens."""
    norm: type[RMSNorm] = RMSNorm
    norms: NormNames = _PLAIN
    mlp_name: str = "mlp"
    """The name of the feed-forward block in a checkpoint."""
    qkv_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """The names of queries, keys and values in a checkpoint, or one for all, stacked."""
    gate_up_names: tuple[str, ...] = ("gate_proj", "up_proj")
    """The names of gate and up in a checkpoint, or one for both, stacked."""


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


def _phi3(config: Any) -> Traits:
    return Traits(
        windows=(config.sliding_window or 0,) * config.num_hidden_layers,
        rotated=float(config.rope_parameters.get("partial_rotary_factor") or 1.0),
        qkv_names=("qkv_proj",),
        gate_up_names=("gate_up_proj",),
    )


def _gemma2(config: Any) -> Traits:
    _refuse_bidirectional(config)
    bias = bool(config.attention_bias)
    return Traits(
        qkv_bias=bias,
        out_bias=bias,
        windows=_windows(config),
        scale=config.query_pre_attn_scalar**-0.5,
        softcap=config.attn_logit_softcapping or 0.0,
        logits_softcap=config.final_logit_softcapping or 0.0,
        embedding_scale=config.hidden_size**0.5,
        norm=OffsetRMSNorm,
        norms=_SANDWICH,
    )


def _refuse_bidirectional(config: Any) -> None:
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(
            "use_bidirectional_attention=true is not supported: a token would attend to later "
            "tokens, so answers cannot be generated one token after the other"
        )


def _gemma3(config: Any) -> Traits:
    _refuse_bidirectional(config)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, cap, None):
            raise ValueError(
                f"{cap}={getattr(config, cap)} is not supported natively for gemma3; "
                "try model.backend=transformers"
            )
    bias = bool(config.attention_bias)
    return Traits(
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        windows=_windows(config),
        rope_kinds=tuple(config.layer_types),
        scale=config.query_pre_attn_scalar**-0.5,
        embedding_scale=config.hidden_size**0.5,
        norm=OffsetRMSNorm,
        norms=_SANDWICH,
    )


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
    "Phi3ForCausalLM": _phi3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
}
"""Architecture in config.json -> its traits."""
