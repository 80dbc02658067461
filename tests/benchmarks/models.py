"""Random llamas that are the same on every machine; missing ones are made from a seed.

The tokenizer is constructed, not trained: bytes, pairs of letters, and words of two pairs, with and
without a leading space. So a prompt of random words has a known number of tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
FLOAT_BYTES = 4
_STD = 0.02


class Shape(NamedTuple):
    """The sizes of one llama: tied embeddings, float32."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab_size: int = 32_000
    positions: int = 4096

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_bytes(self) -> int:
        """Returns the bytes of keys and values of one position, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * FLOAT_BYTES

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes that one token reads: every matrix once."""
        attention = 2 * self.hidden * (self.hidden + self.kv_heads * self.head_dim)
        layer = attention + 3 * self.hidden * self.intermediate
        return (self.layers * layer + self.vocab_size * self.hidden) * FLOAT_BYTES


SHAPES = {
    "tiny": Shape(128, 2, 4, 2, 256),
    "m15": Shape(256, 6, 4, 2, 768),
    "m125": Shape(768, 12, 12, 4, 2048),
    "m15-long": Shape(256, 6, 4, 2, 768, positions=16_384),
    "dot": Shape(64, 1, 2, 2, 64, vocab_size=1024),
}
"""Models of 4.4, 12.9 and 100 million parameters; `dot` computes almost nothing."""


def default_folder() -> Path:
    """Returns the folder next to the compiled kernels: `$SWELL_CACHE/bench`, or
    `~/.cache/swell/bench`."""
    home = os.environ.get("SWELL_CACHE") or Path.home() / ".cache" / "swell"
    return Path(home) / "bench"


def prepare(name: str, folder: Path) -> Path:
    """Returns the complete folder of a model under `folder`; any number of processes may call this
    at once."""
    target = folder / name
    if (target / "config.json").exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
    try:
        write(SHAPES[name], made)
        made.rename(target)
    except OSError:
        if not target.exists():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def write(shape: Shape, folder: Path) -> None:
    """Writes weights, config and tokenizer."""
    from safetensors.torch import save_file

    save_file(weights(shape), folder / "model.safetensors", metadata={"format": "pt"})
    texts = {
        "config.json": config(shape),
        "tokenizer.json": tokenizer(shape.vocab_size),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIALS[0],
            "eos_token": SPECIALS[1],
            "model_max_length": shape.positions,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=1))


def weights(shape: Shape) -> dict[str, Any]:
    """Returns checkpoint name -> tensor, normal with a standard deviation of 0.02; norms are
    one."""
    import torch

    generator = torch.Generator().manual_seed(0)
    hidden, kv = shape.hidden, shape.kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (shape.intermediate, hidden),
        "mlp.up_proj": (shape.intermediate, hidden),
        "mlp.down_proj": (hidden, shape.intermediate),
    }
    made = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.layers):
        made |= {f"model.layers.{layer}.{name}.weight": size for name, size in sizes.items()}
    tensors = {name: torch.randn(size, generator=generator) * _STD for name, size in made.items()}
    norms = [f"model.layers.{layer}.{part}" for layer in range(shape.layers) for part in _NORMS]
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in [*norms, "model.norm"]}
    return tensors


_NORMS = ("input_layernorm", "post_attention_layernorm")


def config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }


def tokenizer(vocab_size: int) -> dict[str, Any]:
    """Returns the contents of tokenizer.json for a byte-level BPE of exactly `vocab_size`
    tokens."""
    from tokenizers import pre_tokenizers

    names = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {name: index for index, name in enumerate(names)}
    merges: list[list[str]] = []
    for left, right in _merges():
        if len(vocab) == vocab_size:
            break
        vocab[left + right] = len(vocab)
        merges.append([left, right])
    assert len(vocab) == vocab_size, f"no tokenizer of {vocab_size} tokens"
    kind = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": name, "special": True, **special}
            for index, name in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": kind,
        "post_processor": None,
        "decoder": kind,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def _merges() -> Any:
    """Yields pairs of letters, then pairs after a space, then words: frequent letters first."""
    pairs = [(left, right) for left, right in itertools.product(LETTERS, repeat=2)]
    yield from pairs
    spaced = [("Ġ", left + right) for left, right in pairs]
    yield from spaced
    for first, second in itertools.product(pairs, repeat=2):
        yield "Ġ" + "".join(first), "".join(second)
        yield "".join(first), "".join(second)
