"""Small files of every architecture, with zeros as weights: the metadata, the tensors and the
tokenizer are those of a model that is served."""

from __future__ import annotations

from typing import Any

from tests.support.gguf.files import Tensors
from tests.support.gguf.tokenizers import byte_pair_metadata, sentence_piece_metadata

LAYERS, HIDDEN, HEADS, HEAD, INNER, EXPERTS = 2, 32, 2, 16, 64, 4
BYTES = {"F32": 4, "F16": 2, "BF16": 2}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3")

_ATTENTION = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HEADS * HEAD, HIDDEN),
    "attn_k": (HEADS * HEAD, HIDDEN),
    "attn_v": (HEADS * HEAD, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD),
    "ffn_norm": (HIDDEN,),
}
_DENSE = {
    **_ATTENTION,
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
_QK_NORMS = {"attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,)}
_SANDWICH = {**_DENSE, "post_attention_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,)}
_BLOCKS: dict[str, dict[str, tuple[int, ...]]] = {
    "llama": _DENSE,
    "qwen2": _DENSE,
    "qwen3": {**_DENSE, **_QK_NORMS},
    "qwen3moe": {
        **_ATTENTION,
        **_QK_NORMS,
        "ffn_gate_inp": (EXPERTS, HIDDEN),
        "ffn_gate_exps": (EXPERTS, INNER, HIDDEN),
        "ffn_up_exps": (EXPERTS, INNER, HIDDEN),
        "ffn_down_exps": (EXPERTS, HIDDEN, INNER),
    },
    "phi3": {
        "attn_norm": (HIDDEN,),
        "attn_qkv": (3 * HEADS * HEAD, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD),
        "ffn_norm": (HIDDEN,),
        "ffn_up": (2 * INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    },
    "gemma2": _SANDWICH,
    "gemma3": {**_SANDWICH, **_QK_NORMS},
}
_BYTE_PAIRS = {"qwen2": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2"}
"""Architecture -> how its tokenizer splits words; the others have SentencePiece."""


def small_model(
    architecture: str, matrices: str = "F32", vectors: str = "F32"
) -> tuple[dict[str, Any], Tensors]:
    """Returns the metadata and the tensors, whose matrices and vectors have one type each."""
    pre = _BYTE_PAIRS.get(architecture)
    tokenizer = byte_pair_metadata(pre) if pre else sentence_piece_metadata()
    own: dict[str, Any] = {
        "context_length": 64,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 32,
        "rope.freq_base": 10000.0,
    }
    if architecture == "qwen3moe":
        own |= {
            "expert_count": EXPERTS,
            "expert_used_count": 2,
            "expert_feed_forward_length": INNER,
        }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(tokenizer["tokenizer.ggml.tokens"]), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, shape in _BLOCKS[architecture].items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, shape in shapes.items():
        kind, numbers = (vectors if len(shape) == 1 else matrices), 1
        for length in shape:
            numbers *= length
        tensors[name] = kind, shape, bytes(numbers * BYTES[kind])
    metadata = {f"{architecture}.{key}": value for key, value in own.items()}
    return {"general.architecture": architecture, **metadata, **tokenizer}, tensors
