"""Checkpoints with a layer for multi-token prediction (MTP), and transformers' implementation of
that layer."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tests.engine.engine_harness import NANO
from tests.support.weights.prefixes import PrefixValues
from tests.worker import tiny_models

MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
ROUTED = {**MOE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Name -> (model type, values that differ from `tiny_models.SIZES`).
    "llama": ("llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "num_experts": 4}),
    "deepseek_v3": (
        "deepseek_v3",
        {key: value for key, value in (ROUTED | LATENT).items() if key != "head_dim"}
        | {"first_k_dense_replace": 1},
    ),
    "exaone_moe": (
        "exaone_moe",
        {
            **MOE,
            "num_experts": 4,
            "num_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
            "mlp_layer_types": ["dense", *["sparse"] * 3, "dense"],
            "mtp_mlp_layer_types": ["dense"],
        },
    ),
    "glm4_moe": ("glm4_moe", {**ROUTED, "first_k_dense_replace": 1, "use_qk_norm": True}),
    "mellum": (
        "mellum",
        {
            **MOE,
            "num_experts": 4,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"] * 2 + ["sliding_attention"],
            "mlp_layer_types": ["dense", *["sparse"] * 4],
        },
    ),
}
AT_THE_TOP = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
"""Names of tensors outside the layer in checkpoints that call it `mtp`."""


def make(folder: Path, kind: str, *, own: bool = False, seed: int = 0, **changes: Any) -> str:
    """Writes a random model with four layers and one MTP layer. If `own`, that layer has its own
    embedding and LM head. `changes` override its config."""
    model_type, differs = TYPES[kind]
    values = {**tiny_models.SIZES, "num_hidden_layers": 5, "initializer_range": 0.15, **differs}
    values |= changes
    config = transformers.AutoConfig.for_model(model_type, **values)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
        layer = "model.layers.4"
        size, vocab = config.hidden_size, config.vocab_size
        tensors = load_file(str(folder / "model.safetensors"))
        tensors |= {
            f"{layer}.eh_proj.weight": torch.randn(size, 2 * size) * 0.15,
            **{
                f"{layer}.{name}.weight": 1 + torch.randn(size) * 0.2
                for name in ("enorm", "hnorm", "shared_head.norm")
            },
        }
        if own:
            for name in ("embed_tokens", "shared_head.head"):
                tensors[f"{layer}.{name}.weight"] = torch.randn(vocab, size) * 0.15
    if kind in ("mellum", "exaone_moe"):
        tensors = {_called_mtp(name, layer): tensor for name, tensor in tensors.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _shorten(folder / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(NANO, name), folder)
    return str(folder)


def _called_mtp(name: str, layer: str) -> str:
    part, _, kind = name.removeprefix(f"{layer}.").rpartition(".")
    if not name.startswith(layer):
        return name
    return f"mtp.{AT_THE_TOP.get(part, f'layers.0.{part}')}.{kind}"


def _shorten(path: Path) -> None:
    """Changes config.json so that the fifth layer is the MTP layer."""
    config = json.loads(path.read_text())
    for key, value in config.items():
        if isinstance(value, list) and len(value) == 5:
            config[key] = value[:4]
    config |= {"num_hidden_layers": 4, "num_nextn_predict_layers": 1, "num_mtp_layers": 1}
    if "layer_types" in config:
        config.setdefault("mtp_layer_types", ["full_attention"])
    path.write_text(json.dumps(config))


@cache
def plain_layer(folder: str) -> PlainLayer:
    """Returns the layer of a folder. No test may change the folder: tests of the same layer share
    it, and so its proposals."""
    return PlainLayer(folder)


class PlainLayer:
    """Computes one row without a KV cache, in float32."""

    def __init__(self, folder: str, model: str = "") -> None:
        """`model` computes the hidden states, if it is not the one in `folder`."""
        self._proposals: dict[tuple[int, ...], list[int]] = {}
        self._features = PrefixValues(self._compute_features)
        self._model = _whole(model or folder)
        carrier = _whole(folder)
        carrier._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4\.", r"^mtp\."]
        stored = load_file(str(Path(folder, "model.safetensors")))
        self._mtp = MtpModel.from_pretrained(carrier).eval()
        self._embed, self._head = (
            next((stored[name] for name in stored if re.search(rf"4\.{part}\.", name)), None)
            for part in ("embed_tokens", "shared_head.head")
        )
        if model:
            self._mtp.tie_with_main_model(self._model)

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Returns `count` draft tokens for a row. Each row is computed once."""
        row = tuple(tokens)
        if len(self._proposals.get(row, ())) < count:
            self._proposals[row] = self._compute(tokens, count)
        return self._proposals[row][:count]

    @torch.no_grad()
    def _compute(self, tokens: list[int], count: int) -> list[int]:
        """The layer reads the model's hidden states of all tokens except the last."""
        features = self._features(tokens[:-1])[None]
        known, proposals = tokens[1:], []
        for _ in range(count):
            own = self._mtp.forward_layer(
                0,
                features,
                torch.arange(1, len(known) + 1)[None],
                None,
                inputs_embeds=self._embedded(torch.tensor([known])),
            )
            proposals.append(int(self._logits(own[:, -1]).argmax()))
            known = [*known, proposals[-1]]
            features = torch.cat((features, own[:, -1:]), 1)
        return proposals

    def _compute_features(self, tokens: list[int]) -> Tensor:
        return self._model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]

    def _embedded(self, ids: Tensor) -> Tensor:
        return self._mtp.embed_tokens(ids) if self._embed is None else self._embed[ids]

    def _logits(self, own: Tensor) -> Tensor:
        return self._mtp._project_to_logits(own) if self._head is None else own @ self._head.T


def _whole(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
