"""The sizes of a run, the shapes of its models, and its clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

Figures = dict[str, Any]
"""Figure -> its value, which JSON can hold."""


@dataclass(frozen=True)
class Shape:
    """The shape of a model of the architecture of Qwen3, in bfloat16."""

    hidden: int
    intermediate: int
    """The width of the MLP, or of each expert."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    experts: int = 0
    """The number of experts of each layer; 0: the model is dense."""
    chosen: int = 0
    """The number of experts that each token chooses."""

    @property
    def config(self) -> dict[str, Any]:
        """The contents of the model's config.json."""
        of_experts = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": self.intermediate,
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "norm_topk_prob": True,
        }
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 16384,
            "tie_word_embeddings": self.is_tied,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "torch_dtype": "bfloat16",
            **(of_experts if self.experts else {}),
        }

    def layer_parameters(self, tokens: int = 1) -> int:
        """Returns the number of parameters of the products of all layers; of the experts, the
        expected number that `tokens` tokens choose, if each choice is equally likely."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate
        if self.experts:
            share = 1 - (1 - self.chosen / self.experts) ** tokens
            mlp = round(mlp * self.experts * share) + self.hidden * self.experts
        return self.layers * (attention + mlp)

    @property
    def head_parameters(self) -> int:
        """The number of parameters of the head."""
        return self.vocab * self.hidden

    def step_bytes(self, rows: int, context: int) -> int:
        """Returns the bytes that a decode step must read: all weights, and each row's KV."""
        kv = 2 * self.layers * self.kv_heads * self.head_dim * context * rows
        return 2 * (self.layer_parameters(rows) + self.head_parameters + kv)


SHAPES = {
    "0.6B": Shape(1024, 3072, 28, 16, 8, 128, 151936, is_tied=True),
    "8B": Shape(4096, 12288, 36, 32, 8, 128, 151936, is_tied=False),
    "30B-A3B, 6 layers": Shape(2048, 768, 6, 32, 4, 128, 151936, False, experts=128, chosen=8),
    "tiny": Shape(64, 96, 2, 4, 2, 16, 320, is_tied=True),
    "tiny experts": Shape(64, 32, 2, 4, 2, 16, 320, True, experts=8, chosen=2),
}


@dataclass(frozen=True)
class Scale:
    """A run on a GPU, or on a CPU with tiny sizes, which shows only that the command works."""

    device: str
    earlier: Mapping[str, Figures] = field(default_factory=dict)
    """The figures of the stages before this one."""

    @property
    def is_full(self) -> bool:
        return self.device == "cuda"

    def pick(self, full: Any, tiny: Any) -> Any:
        """Returns the size for this run."""
        return full if self.is_full else tiny

    def synchronize(self) -> None:
        if self.is_full:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], repeats: int = 3) -> float:
        """Returns the median time of `run`, after one call that is not measured."""
        run()
        times = []
        for _ in range(repeats):
            self.synchronize()
            begun = time.perf_counter()
            run()
            self.synchronize()
            times.append(time.perf_counter() - begun)
        return median(times)

    def queued_seconds(self, run: Callable[[], object], calls: int) -> float:
        """Returns the time of one call of `run` in a row of calls that do not wait for each other
        on the host: the time of the device, unless launching takes longer."""

        def many() -> None:
            for _ in range(calls):
                run()

        return self.seconds(many) / calls

    def times_limit(self, seconds: float, nbytes: int) -> float | None:
        """Returns how many times longer than reading `nbytes` once this is; None if the memory's
        rate is unknown."""
        rate = self.earlier.get("ceilings", {}).get("read_gb_per_s")
        return None if not rate else round(seconds / (nbytes / (rate * 1e9)), 3)
