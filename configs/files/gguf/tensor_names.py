"""The names that a file's tensors have in transformers, and how a file stores them differently."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from swell.configs.files.gguf.architectures import architecture_of
from swell.configs.files.gguf.header import GgufError, GgufFile, Tensor, shown
from swell.configs.files.gguf.metadata import Metadata
from swell.configs.files.gguf.rope import FACTORS


class Source(NamedTuple):
    """The place of a tensor of transformers in a file, and the form in which it is stored there."""

    tensor: Tensor
    expert: int | None = None
    """The number of its matrix in a tensor with one for each expert; None for a whole tensor."""
    rotated_heads: int = 0
    """If not 0: the rows of each of this many heads are in pairs (0, d/2, 1, d/2 + 1, ...), which
    llama.cpp rotates together; in transformers they are in the order (0, 1, 2, ...)."""
    added: float = 0.0
    """Added to each number before it was stored: Gemma multiplies by 1 + w, and a file
    has 1 + w."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in transformers."""
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]


MAX_MATRICES = 2**19
"""Limit for the tensors with each expert's counted by itself. The largest models that are supported
have some 40 000."""
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)", re.ASCII)
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FEED_FORWARD = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA = {**_ATTENTION, **_FEED_FORWARD, "ffn_norm": "post_attention_layernorm"}
_SANDWICH = {
    **_ATTENTION,
    **_FEED_FORWARD,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK_NAMES = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, **_QK_NORMS},
    "qwen3moe": {
        **_ATTENTION,
        **_QK_NORMS,
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
    "phi3": {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
    "gemma2": _SANDWICH,
    "gemma3": {**_SANDWICH, **_QK_NORMS},
}
"""Architecture -> the name of a tensor within a block -> its name within a layer, where `{}` stands
for the number of an expert."""


def sources(file: GgufFile) -> Mapping[str, Source]:
    """Returns the name in transformers -> where the tensor is. Raises GgufError for a tensor that
    the architecture does not have: without it the model would compute something else."""
    architecture = architecture_of(file)
    metadata = Metadata(file, architecture)
    heads = {
        "attn_q": metadata.integer("attention.head_count"),
        "attn_k": metadata.integer(
            "attention.head_count_kv", metadata.integer("attention.head_count")
        ),
    }
    experts = metadata.integer("expert_count") if architecture == "qwen3moe" else 0
    found: dict[str, Source] = {}
    for name, tensor in file.tensors.items():
        if name in FACTORS:
            continue
        block = _BLOCK.fullmatch(name)
        rotated = heads.get(block[2], 0) if block and architecture == "llama" else 0
        is_norm = name.endswith("norm.weight")
        added = 1.0 if architecture.startswith("gemma") and is_norm else 0.0
        _check_shape(name, tensor, 2 * rotated, file)
        own_experts = tensor.shape[0] if "exps" in name else 0
        if own_experts and own_experts != experts:
            raise GgufError(
                f"{file.path} is damaged: tensor {shown(name)} has {own_experts} experts, and "
                f"{architecture}.expert_count={experts}; copy it there again"
            )
        if len(found) + own_experts > MAX_MATRICES:
            raise GgufError(
                f"{file.path} is damaged: it has more than {MAX_MATRICES} matrices, the limit, up "
                f"to tensor {shown(name)}"
            )
        names = list(_names(name, tensor, architecture, file))
        for expert, own in enumerate(names):
            index = expert if "exps" in name else None
            found[own] = Source(tensor, index, rotated, added)
    return found


def _check_shape(name: str, tensor: Tensor, divisor: int, file: GgufFile) -> None:
    dimensions = {3} if "exps" in name else {1, 2}
    is_known = len(tensor.shape) in dimensions and (
        len(tensor.shape) > 1 or tensor.type.numbers == 1
    )
    if not is_known or (divisor and tensor.shape[0] % divisor):
        raise GgufError(
            f"{file.path} is damaged: tensor {shown(name)} has the shape {list(tensor.shape)} and "
            f"the type {tensor.type.name}"
        )


def _names(name: str, tensor: Tensor, architecture: str, file: GgufFile) -> Iterator[str]:
    if name in _TOP:
        yield _TOP[name]
        return
    block = _BLOCK.fullmatch(name)
    own = _BLOCK_NAMES[architecture].get(block[2]) if block else None
    if block is None or own is None:
        raise GgufError(
            f"{file.path}: the tensor {shown(name)} is not known of the architecture "
            f"{architecture!r}; serve the folder from which the file was made"
        )
    experts = tensor.shape[0] if "{}" in own else 1
    for expert in range(experts):
        yield f"model.layers.{block[1]}.{own.format(expert)}.{block[3]}"
