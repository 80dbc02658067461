"""Writes GGUF files, from the description of the format: files of any metadata and tensors, and the
model of a folder, as llama.cpp's converter would write it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.support.gguf.blocks import encode

TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}
ALIGNMENT = 32
Tensors = Mapping[str, tuple[str, Sequence[int], bytes]]
"""Name -> (type, shape with the row length last, bytes)."""


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Tensors, version: int = 3) -> Path:
    """Writes a file. An integer is written as uint32 if it fits, a list by the type of its first
    item, and bytes as they are: the number of a type, and a value."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _string(key) + _typed(value)
    at = 0
    for name, (kind, shape, data) in tensors.items():
        out += _string(name) + struct.pack("<I", len(shape))
        out += b"".join(struct.pack("<Q", length) for length in reversed(shape))
        out += struct.pack("<IQ", TYPES[kind], at)
        at += len(data) + -len(data) % ALIGNMENT
    out += bytes(-len(out) % ALIGNMENT)
    for _, _, data in tensors.values():
        out += data + bytes(-len(data) % ALIGNMENT)
    path.write_bytes(out)
    return path


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _item(value: Any) -> bytes:
    """Writes an item of a list. Integers in lists are int32, as in the files of llama.cpp."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return struct.pack("<Ii", 5, value) if is_integer else _typed(value)


def _typed(value: Any) -> bytes:
    if isinstance(value, list):
        items = [_item(item) for item in value]
        kind = items[0][:4] if items else struct.pack("<I", 4)
        return (
            struct.pack("<I", 9)
            + kind
            + struct.pack("<Q", len(items))
            + b"".join(item[4:] for item in items)
        )
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int) and not -(2**31) <= value < 2**32:
        return struct.pack("<Iq", 11, value) if value < 0 else struct.pack("<IQ", 10, value)
    if isinstance(value, int):
        return struct.pack("<Ii", 5, value) if value < 0 else struct.pack("<II", 4, value)
    if isinstance(value, float) and 1e38 < abs(value) < float("inf"):
        return struct.pack("<Id", 12, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<I", 8) + _string(value)


# ------------------------------------------------------------------------------- models of folders


def gguf_of(
    folder: Path,
    path: Path,
    kinds: Sequence[str] = ("F32",),
    metadata: Mapping[str, Any] | None = None,
    parts: int = 1,
) -> Path:
    """Writes the model of a folder as a GGUF file. A matrix gets the first of `kinds` whose blocks
    fit its rows. Returns the path of the (first) file."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    described = {
        **_config_metadata(architecture, config),
        **_tokenizer_metadata(folder, config),
        **(metadata or {}),
    }
    weights = load_file(folder / "model.safetensors")
    tensors = {
        name: _tensor(numbers, kinds) for name, numbers in _converted(config, weights).items()
    }
    if parts == 1:
        return write_gguf(path, described, tensors)
    names = list(tensors)
    step = -(-len(names) // parts)
    for part in range(parts):
        own = {name: tensors[name] for name in names[part * step : (part + 1) * step]}
        split = {"split.no": part, "split.count": parts, "split.tensors.count": len(names)}
        file = path.with_name(f"{path.stem}-{part + 1:05}-of-{parts:05}.gguf")
        write_gguf(file, {**(described if part == 0 else {}), **split}, own)
    return path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def twin_of(folder: Path, out: Path, kinds: Sequence[str]) -> Path:
    """Copies a model folder to `out`, with the weights that a GGUF file of `kinds` has, as
    float32."""
    out.mkdir()
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja"):
            (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    rounded = {
        name: _rounded(name, numbers.astype(np.float32), config, kinds)
        for name, numbers in weights.items()
    }
    save_file(rounded, out / "model.safetensors", metadata={"format": "pt"})
    return out


ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
_IN_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _kind_for(numbers: np.ndarray, kinds: Sequence[str]) -> str:
    if numbers.ndim == 1:
        return "F32"
    sizes = {"K": 256, "_": 32}
    for kind in kinds:
        size = sizes.get(kind[-1], sizes["_"] if kind.startswith("Q") else 1)
        if numbers.shape[-1] % size == 0:
            return kind
    raise AssertionError(f"no type of {kinds} fits rows of {numbers.shape[-1]} numbers")


def _tensor(numbers: np.ndarray, kinds: Sequence[str]) -> tuple[str, Sequence[int], bytes]:
    kind = _kind_for(numbers, kinds)
    data, _ = encode(kind, numbers.astype(np.float32).reshape(-1, numbers.shape[-1]))
    return kind, numbers.shape, data.tobytes()


def _rounded(
    name: str, numbers: np.ndarray, config: Mapping[str, Any], kinds: Sequence[str]
) -> np.ndarray:
    """Returns the numbers after a round trip through a file. Rows are quantized one by one, so that
    their order does not matter."""
    if numbers.ndim == 1:
        return numbers
    _, found = encode(_kind_for(numbers, kinds), numbers)
    return np.ascontiguousarray(found.reshape(numbers.shape))


def _converted(
    config: Mapping[str, Any], weights: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    found: dict[str, Any] = {}
    kind = config["model_type"]
    is_gemma = kind.startswith("gemma")
    for name, stored in weights.items():
        numbers = stored.astype(np.float32)
        stem, _, suffix = name.rpartition(".")
        if is_gemma and "norm" in name:
            numbers = numbers + np.float32(1)
        if not stem.startswith("model.layers."):
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
            found[f"{top.get(stem, 'output')}.{suffix}"] = numbers
            continue
        layer, _, inner = stem.removeprefix("model.layers.").partition(".")
        if inner.startswith("mlp.experts."):
            expert, _, own = inner.removeprefix("mlp.experts.").partition(".")
            stacked = f"blk.{layer}.ffn_{own.removesuffix('_proj')}_exps.{suffix}"
            found.setdefault(stacked, {})[int(expert)] = numbers
            continue
        heads = {
            "self_attn.q_proj": "num_attention_heads",
            "self_attn.k_proj": "num_key_value_heads",
        }
        if kind == "llama" and inner in heads:
            numbers = _interleaved(numbers, config[heads[inner]])
        after = "post_attention_norm" if is_gemma else "ffn_norm"
        own = {**_IN_BLOCK, "post_attention_layernorm": after}[inner]
        found[f"blk.{layer}.{own}.{suffix}"] = numbers
    return {
        name: np.stack([numbers[e] for e in sorted(numbers)])
        if isinstance(numbers, dict)
        else numbers
        for name, numbers in found.items()
    }


def _interleaved(numbers: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half goes to row 2 i, and row i of its second half to row 2 i + 1."""
    out = np.empty_like(numbers)
    size = len(numbers) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = numbers[head * size + i]
            out[head * size + 2 * i + 1] = numbers[head * size + size // 2 + i]
    return out


def _config_metadata(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    found = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if architecture == "qwen3moe":
        found["expert_count"] = config.get("num_experts") or config["num_local_experts"]
        found["expert_used_count"] = config["num_experts_per_tok"]
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if architecture == "phi3":
        found["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    if architecture.startswith("gemma"):
        found["attention.sliding_window"] = config["sliding_window"]
    if architecture == "gemma2":
        found["attn_logit_softcapping"] = float(config["attn_logit_softcapping"])
        found["final_logit_softcapping"] = float(config["final_logit_softcapping"])
    whole = {f"{architecture}.{key}": value for key, value in found.items()}
    return {"general.architecture": architecture, **whole}


def _tokenizer_metadata(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of a tokenizer of byte pairs, such as that of nano."""
    data = json.loads((folder / "tokenizer.json").read_text())
    texts = [f"[unused{id}]" for id in range(config["vocab_size"])]
    types = [5] * len(texts)
    for text, id in data["model"]["vocab"].items():
        texts[id], types[id] = text, 1
    for token in data["added_tokens"]:
        texts[token["id"]], types[token["id"]] = token["content"], 3 if token["special"] else 4
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    named = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    template = folder / "chat_template.jinja"
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        **{
            f"tokenizer.ggml.{name}_token_id": config[key]
            for name, key in named.items()
            if config.get(key) is not None
        },
        **({"tokenizer.chat_template": template.read_text()} if template.is_file() else {}),
    }
