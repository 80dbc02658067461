"""EAGLE heads with random weights, and a plain torch implementation on top of a transformers
model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM

from tests.support.weights.prefixes import PrefixValues

SCALE = 0.2
"""Standard deviation of the weights, large enough that drafts differ between rows."""


def make(folder: Path, method: str, model: str, **options: Any) -> str:
    """Writes a head for the model in a folder. Options: `vocab`, the number of tokens that an
    EAGLE-3 head can draft; `own`, names of tensors that it does not share with the model; `layers`,
    the number of layers of EAGLE; `aux`, the layers whose outputs EAGLE-3 reads; `bias`; `seed`.
    All others are keys of config.json."""
    served = json.loads(Path(model, "config.json").read_text())
    size, inner, vocab = (served[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    seed, bias, own = options.pop("seed", 0), options.pop("bias", False), options.pop("own", ())
    layers, aux = options.pop("layers", 1), options.pop("aux", None)
    drafted = options.pop("vocab", vocab)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * SCALE

    def layer(name: str, width: int) -> dict[str, Tensor]:
        heads, kv_heads, dim = (
            served[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        return {
            f"{name}.self_attn.q_proj.weight": random(heads * dim, width),
            f"{name}.self_attn.k_proj.weight": random(kv_heads * dim, width),
            f"{name}.self_attn.v_proj.weight": random(kv_heads * dim, width),
            f"{name}.self_attn.o_proj.weight": random(size, heads * dim),
            f"{name}.mlp.gate_proj.weight": random(inner, size),
            f"{name}.mlp.up_proj.weight": random(inner, size),
            f"{name}.mlp.down_proj.weight": random(size, inner),
            f"{name}.post_attention_layernorm.weight": 1 + random(size),
        }

    config = served | {"num_hidden_layers": layers, "tie_word_embeddings": False}
    tensors = {"fc.weight": random(size, (3 if method == "eagle3" else 2) * size)}
    if bias:
        tensors["fc.bias"] = random(size)
    if method == "eagle":
        for at in range(layers):
            tensors |= layer(f"layers.{at}", size)
            if at:
                tensors[f"layers.{at}.input_layernorm.weight"] = 1 + random(size)
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": drafted}
        tensors |= layer("midlayer", 2 * size)
        for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
            tensors[f"{norm}.weight"] = 1 + random(size)
        known = torch.randperm(vocab, generator=generator)[:drafted].sort().values
        tensors["d2t"] = known - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, known, True)
        tensors["lm_head.weight"] = random(drafted, size)
        if aux is not None:
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": aux}
    for name in own:
        tensors[f"{name}.weight"] = random(vocab, size)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | options))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return str(folder)


@cache
def plain_head(folder: str, model: str) -> PlainHead:
    """Returns the head of a folder on a model. No test may change the folders: tests of the same
    head share it, and so its proposals."""
    return PlainHead(folder, model)


class PlainHead:
    """Computes one row without a KV cache, in float32."""

    def __init__(self, folder: str, model: str) -> None:
        self._proposals: dict[tuple[int, ...], list[int]] = {}
        self._features = PrefixValues(self._compute_features)
        self._weights = load_file(str(Path(folder, "model.safetensors")))
        self._config = json.loads(Path(folder, "config.json").read_text())
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._is_third = "d2t" in self._weights
        embed = self._model.get_input_embeddings().weight.detach()
        head = self._model.get_output_embeddings().weight.detach()
        self._embed = self._weights.get("embed_tokens.weight", embed)
        self._head = self._weights.get("lm_head.weight", head)

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Returns `count` draft tokens for a row. Each row is computed once."""
        row = tuple(tokens)
        if len(self._proposals.get(row, ())) < count:
            self._proposals[row] = self._compute(tokens, count)
        return self._proposals[row][:count]

    @torch.no_grad()
    def _compute(self, tokens: list[int], count: int) -> list[int]:
        """The head reads the model's hidden states of all tokens except the last."""
        features = self._features(tokens[:-1])
        known, proposals = tokens[1:], []
        for _ in range(count):
            own, last = self._forward(torch.tensor(known), features)
            token = int(linear(last[-1:], self._head).argmax())
            token += int(self._weights["d2t"][token]) if self._is_third else 0
            proposals.append(token)
            known = [*known, token]
            features = torch.cat((features, own[-1:]))
        return proposals

    def _compute_features(self, tokens: list[int]) -> Tensor:
        found = self._model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        if not self._is_third:
            return found[-1][0]
        num_layers = self._model.config.num_hidden_layers
        key = "eagle_aux_hidden_state_layer_ids"
        outputs = self._config.get("eagle_config", {}).get(key, ())
        layers = [each + 1 for each in outputs] or self._config.get(key)
        layers = layers or [2, num_layers // 2, num_layers - 3]
        return self._fuse(torch.cat([found[layer][0] for layer in layers], -1))

    def _fuse(self, x: Tensor) -> Tensor:
        return linear(x, self._weights["fc.weight"], self._weights.get("fc.bias"))

    def _forward(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the head's own features and the input of its LM head, each [T, hidden]."""
        embeds = embedding(ids, self._embed)
        if not self._is_third:
            x = self._fuse(torch.cat((embeds, features), -1))
            for at in range(self._config["num_hidden_layers"]):
                name = f"layers.{at}"
                read = self._norm(x, f"{name}.input_layernorm") if at else x
                x = self._after_attention(x + self._attention(read, name), name)
            return x, x
        read = (
            self._norm(embeds, "midlayer.input_layernorm"),
            self._norm(features, "midlayer.hidden_norm"),
        )
        added = read[1] if self._config.get("norm_before_residual") else features
        x = added + self._attention(torch.cat(read, -1), "midlayer")
        x = self._after_attention(x, "midlayer")
        return x, self._norm(x, "norm")

    def _after_attention(self, x: Tensor, layer: str) -> Tensor:
        read = self._norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (self._project(read, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        return x + self._project(silu(gate) * up, f"{layer}.mlp.down_proj")

    def _attention(self, x: Tensor, layer: str) -> Tensor:
        dim, heads = self._config["head_dim"], self._config["num_attention_heads"]
        q, k, v = (
            self._project(x, f"{layer}.self_attn.{name}_proj").unflatten(-1, (-1, dim))
            for name in "qkv"
        )
        angles = torch.outer(
            torch.arange(len(x)).float(),
            self._config["rope_parameters"]["rope_theta"]
            ** -(torch.arange(0, dim, 2).float() / dim),
        )
        q, k = _rotated(q, angles), _rotated(k, angles)
        each = [part.transpose(0, 1) for part in (q, k, v)]
        each[1:] = [part.repeat_interleave(heads // len(part), 0) for part in each[1:]]
        out = scaled_dot_product_attention(*each, is_causal=True)
        return self._project(out.transpose(0, 1).flatten(1), f"{layer}.self_attn.o_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        root = (x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).rsqrt()
        return x * root * self._weights[f"{name}.weight"]

    def _project(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._weights[f"{name}.weight"])


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Applies rotary embeddings. x [T, heads, dim], angles [T, dim / 2]"""
    cos, sin = (part.repeat(1, 2).unsqueeze(1) for part in (angles.cos(), angles.sin()))
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat((-two, one), -1) * sin
