"""`python -m tests.benchmarks.draft_heads`: output tokens a second with drafts by an EAGLE head, by
an EAGLE-3 head and by a layer for multi-token prediction, over those without.

The model is nano in the weights of a larger and deeper one, as in `draft_model.py`. All added
weights are zero, so it answers as nano does, but its steps read as much memory as those of the
larger model. The heads are trained here for nano, and enlarged in the same way. As in `drafts.py`,
two engines answer the same prompts in turn, greedy, and the answers must be equal.

A head learns from chats of nano's tasks (`configs/models/train.py`), and its targets are nano's
probabilities. Training unrolls the passes of a proposal. Pass s at position q stands for a row
whose last features by the model are those of q - s; it reads the token at q + 1 and predicts the
token at q + 2:

    pass 0    reads features by the model          sees pass 0 at <= q
    pass 1    its own of pass 0 at q - 1           pass 0 at <= q - 1, pass 1 at q
    pass 2    its own of pass 1 at q - 1           pass 0 at <= q - 2, pass 1 at q - 1, pass 2 at q
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from swell.cluster.local import LLM
from swell.configs.runtime.process import available_cores
from tests.benchmarks.draft_model import Weights, enlarge_tensor, enlarged
from tests.benchmarks.drafts import NANO, compare

NANO_LAYERS, LAYERS = 4, 8
"""Layers of nano and of the served model. The served model alternates a layer of nano with one that
adds nothing."""
LAYERS_READ = (2, LAYERS // 2, LAYERS - 2)
"""The layers whose inputs EAGLE-3 reads, about those of published heads."""
NANO_LAYERS_READ = (1, 2, 3)
"""The same layers of nano."""
PASSES, STEP_CHATS, PEAK_RATE = 3, 8, 4e-3
CACHE: dict[str, Any] = {"cache.memory_bytes": 300_000_000, "drafts.max_tokens": 3}
Seen = list[tuple[Tensor, Tensor]]
"""K and V of the previous passes, [B, heads, T, dim] each."""


def deepened(weights: Weights) -> Weights:
    """Returns nano's weights with `LAYERS` layers and the same answers."""
    found = {name: each for name, each in weights.items() if ".layers." not in name}
    for at in range(LAYERS):
        of, behind = divmod(at, LAYERS // NANO_LAYERS)
        prefix = f"model.layers.{of}."
        for name, each in weights.items():
            if name.startswith(prefix):
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                copy = torch.zeros_like(each) if adds and behind else each.clone()
                found[f"model.layers.{at}.{name.removeprefix(prefix)}"] = copy
    return found


def enlarged_head(weights: Weights, size: int) -> Weights:
    """Returns a head's weights for a model of hidden size `HIDDEN` instead of `size`. A weight that
    reads several states side by side is split, so that each part reads its state at the new
    offset."""

    def enlarge(name: str, tensor: Tensor) -> Tensor:
        parts = tensor.shape[-1] // size if name.startswith(("fc.", "midlayer.self_attn")) else 1
        if parts > 1 and "o_proj" not in name:
            each = [enlarge("", part) for part in tensor.chunk(parts, -1)]
            found = torch.cat(each, -1)
            return found if name.startswith("fc.") else found[: len(tensor)]
        return enlarge_tensor(name, tensor)

    return {
        name: tensor if name == "d2t" else enlarge(name, tensor) for name, tensor in weights.items()
    }


@dataclass(frozen=True, slots=True)
class Chats:
    """The tensors that nano computes for B chats of T + 2 tokens, at all positions except the last
    two."""

    behind: Tensor
    """[B, T] the token after each position"""
    inputs: list[Tensor]
    """[B, T, hidden] each: the inputs of the layers `NANO_LAYERS_READ`"""
    last: Tensor
    """[B, T, hidden] normed hidden states"""
    next_last: Tensor
    """[B, T, hidden] those of the next position"""
    targets: Tensor
    """[B, T, vocab] probabilities of the token after `behind`"""
    is_answer: Tensor
    """[B, T + 1] bool: whether the next token belongs to an answer; includes the last position but
    one"""

    def guessing(self, index: int) -> Tensor:
        """Returns [B, T] bool: the positions at which pass `index` may propose for a request."""
        return self.is_answer[:, 1:] & self.is_answer[:, :-1].roll(index, 1)


class Nano:
    def __init__(self) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()
        self.model.model.norm.register_forward_pre_hook(self._keep)
        self._unnormed = torch.empty(0)
        self._micro_batches = runpy.run_path(str(NANO.parent / "train.py"))["micro_batches"]
        self._random = random.Random(0)

    def _keep(self, _norm: Any, args: tuple[Tensor]) -> None:
        self._unnormed = args[0]

    def step(self) -> Iterator[Chats]:
        """Yields batches of chats of similar length, `STEP_CHATS` in total."""
        for ids, labels in self._micro_batches(self._random, STEP_CHATS):
            with torch.no_grad():
                found = self.model(ids[:, :-1], output_hidden_states=True)
            inputs = [*found.hidden_states[:-1], self._unnormed]
            last = found.hidden_states[-1]
            yield Chats(
                behind=ids[:, 1:-1],
                inputs=[inputs[layer][:, :-1] for layer in NANO_LAYERS_READ],
                last=last[:, :-1],
                next_last=last[:, 1:],
                targets=found.logits[:, 1:].softmax(-1),
                is_answer=labels[:, 1:] != -100,
            )


class Layer(nn.Module):
    """A layer of llama without the norm before the attention. `width`: the width of the attention's
    input."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        size, inner, self.dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        inside, kv = heads * self.dim, kv_heads * self.dim
        shapes = {"q": (width, inside), "k": (width, kv), "v": (width, kv), "o": (inside, size)}
        self.self_attn = _projections(shapes)
        self.mlp = _projections({"gate": (size, inner), "up": (size, inner), "down": (inner, size)})
        self.post_attention_layernorm = nn.RMSNorm(size, config.rms_norm_eps)
        self.theta = config.rope_parameters["rope_theta"]

    def forward(self, x: Tensor, residual: Tensor, seen: Seen) -> Tensor:
        """x [B, T, width], residual [B, T, hidden] -> [B, T, hidden]; appends K and V to `seen`."""
        q, k, v = (
            self.self_attn[f"{name}_proj"](x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for name in "qkv"
        )
        seen.append((self._rotated(k), v))
        keys, values = (torch.cat(parts, 2) for parts in zip(*seen, strict=True))
        out = functional.scaled_dot_product_attention(
            self._rotated(q), keys, values, _mask(x.shape[1], len(seen) - 1), enable_gqa=True
        )
        x = residual + self.self_attn["o_proj"](out.transpose(1, 2).flatten(2))
        read = self.post_attention_layernorm(x)
        inner = functional.silu(self.mlp["gate_proj"](read)) * self.mlp["up_proj"](read)
        added: Tensor = self.mlp["down_proj"](inner)
        return x + added

    def _rotated(self, x: Tensor) -> Tensor:
        rates = self.theta ** -(torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.outer(torch.arange(x.shape[2]), rates).repeat(1, 2)
        one, two = x.chunk(2, -1)
        rotated: Tensor = x * angles.cos() + torch.cat((-two, one), -1) * angles.sin()
        return rotated


def _projections(shapes: dict[str, tuple[int, int]]) -> nn.ModuleDict:
    made = {f"{name}_proj": nn.Linear(*shape, bias=False) for name, shape in shapes.items()}
    return nn.ModuleDict(made)


def _mask(tokens: int, index: int) -> Tensor:
    """Returns what pass `index` attends to in all passes up to itself, [T, (index + 1) * T]
    bool."""
    one = torch.eye(tokens, dtype=torch.bool)
    later = [one.roll(at - index, 1).tril() for at in range(1, index + 1)]
    return torch.cat((torch.ones_like(one).tril(-index), *later), 1)


class Head(nn.Module):
    """A draft head. The parts that it takes from the model are neither trained nor saved."""

    learns_features = False
    """Whether the head's own features are trained to be the model's."""
    embed: Tensor
    model_head: Tensor

    def __init__(self, nano: Any, reads: int) -> None:
        super().__init__()
        self.fc = nn.Linear(reads * nano.config.hidden_size, nano.config.hidden_size, bias=False)
        embed, head = nano.get_input_embeddings(), nano.get_output_embeddings()
        self.register_buffer("embed", embed.weight.detach(), persistent=False)
        self.register_buffer("model_head", head.weight.detach(), persistent=False)

    def features(self, chats: Chats) -> Tensor:
        """Returns [B, T, hidden]: the features that pass 0 reads."""
        raise NotImplementedError

    def forward(self, ids: Tensor, features: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """Computes one pass; returns its own features [B, T, hidden] and logits [B, T, vocab]."""
        raise NotImplementedError


class EagleHead(Head):
    learns_features = True

    def __init__(self, nano: Any) -> None:
        super().__init__(nano, 2)
        self.layers = nn.ModuleList([Layer(nano.config, nano.config.hidden_size)])

    def features(self, chats: Chats) -> Tensor:
        return chats.last

    def forward(self, ids: Tensor, features: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat((self.embed[ids], features), -1))
        own = self.layers[0](x, x, seen)
        return own, functional.linear(own, self.model_head)


class Eagle3Head(Head):
    """An EAGLE-3 head, whose norm and head start as the model's. The values of the layers that it
    reads are large compared with what a new layer adds, so the fusion starts small."""

    def __init__(self, nano: Any) -> None:
        super().__init__(nano, 3)
        size, eps = nano.config.hidden_size, nano.config.rms_norm_eps
        self.midlayer = Layer(nano.config, 2 * size)
        self.midlayer.add_module("input_layernorm", nn.RMSNorm(size, eps))
        self.midlayer.add_module("hidden_norm", nn.RMSNorm(size, eps))
        self.norm = nn.RMSNorm(size, eps)
        self.norm.load_state_dict(nano.model.norm.state_dict())
        self.lm_head = nn.Linear(size, nano.config.vocab_size, bias=False)
        self.lm_head.load_state_dict({"weight": self.model_head})
        # It has all tokens of the model with the same ids.
        self.register_buffer("d2t", torch.zeros(len(self.embed), dtype=torch.int64))
        nn.init.normal_(self.fc.weight, std=0.005)

    def features(self, chats: Chats) -> Tensor:
        fused: Tensor = self.fc(torch.cat(chats.inputs, -1))
        return fused

    def forward(self, ids: Tensor, features: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        layer: Any = self.midlayer
        read = layer.input_layernorm(self.embed[ids]), layer.hidden_norm(features)
        own = layer(torch.cat(read, -1), features, seen)
        return own, self.lm_head(self.norm(own))


class MtpHead(Head):
    learns_features = True

    def __init__(self, nano: Any) -> None:
        super().__init__(nano, 2)
        size, eps = nano.config.hidden_size, nano.config.rms_norm_eps
        self.enorm, self.hnorm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.layer = Layer(nano.config, size)
        self.layer.add_module("input_layernorm", nn.RMSNorm(size, eps))
        self.norm = nn.RMSNorm(size, eps)
        self.norm.load_state_dict(nano.model.norm.state_dict())

    def features(self, chats: Chats) -> Tensor:
        return chats.last

    def forward(self, ids: Tensor, features: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        layer: Any = self.layer
        x = self.fc(torch.cat((self.enorm(self.embed[ids]), self.hnorm(features)), -1))
        own = self.norm(layer(layer.input_layernorm(x), x, seen))
        return own, functional.linear(own, self.model_head)


HEADS: dict[str, type[Head]] = {"eagle": EagleHead, "eagle3": Eagle3Head, "mtp": MtpHead}
MTP_NAMES = {"fc.": "eh_proj.", "norm.": "shared_head.norm.", "layer.": ""}
"""Prefixes of names -> their prefixes in a checkpoint."""


def unrolled_loss(head: Head, chats: Chats) -> tuple[Tensor, Tensor]:
    """Returns the loss, and for each pass the number of right proposals and of all proposals,
    [PASSES, 2]."""
    features, seen = head.features(chats), Seen()
    loss, guesses = torch.zeros(()), torch.zeros(PASSES, 2)
    for index in range(PASSES):
        own, logits = head(chats.behind, features, seen)
        rows = chats.guessing(index)
        got, targets = logits[rows], chats.targets[rows]
        loss = loss + functional.cross_entropy(got, targets)
        if head.learns_features:
            loss = loss + functional.smooth_l1_loss(own[rows], chats.next_last[rows])
        is_right = got.argmax(-1) == targets.argmax(-1)
        guesses[index] = torch.tensor([is_right.sum(), len(is_right)])
        features = own.roll(1, 1)
    return loss, guesses


def train(head: Head, nano: Nano, minutes: float) -> str:
    """Trains for this many minutes of processor time; returns a description of the result."""
    torch.set_num_threads(1)  # small products: two threads would wait for each other
    adam = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    began, steps, newest = time.process_time(), 0, deque[Tensor](maxlen=100)
    while (progress := (time.process_time() - began) / (60 * minutes)) < 1:
        adam.param_groups[0]["lr"] = PEAK_RATE * min(progress / 0.03, 1) * (1 - progress)
        for chats in nano.step():
            loss, guesses = unrolled_loss(head, chats)
            torch.autograd.backward(loss)
            newest.append(guesses)
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        steps += 1
    right, count = torch.stack(list(newest)).sum(0).unbind(-1)
    shares = " ".join(f"{share:.0%}" for share in (right / count).tolist())
    return f"{steps * STEP_CHATS} chats; guesses of each pass that are right: {shares}"


def save(head: Head, folder: Path, served: str) -> str:
    """Saves a head for the model of the folder `served`; returns its folder."""
    config = json.loads(Path(served, "config.json").read_text())
    if not isinstance(head, MtpHead):  # an MTP layer is saved in a model's folder
        config |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
        config |= {"eagle_aux_hidden_state_layer_ids": LAYERS_READ}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = enlarged_head(head.state_dict(), len(head.fc.weight))
    if isinstance(head, MtpHead):
        weights = {_mtp_name(name): tensor for name, tensor in weights.items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return str(folder)


def _mtp_name(name: str) -> str:
    for own, stored in MTP_NAMES.items():
        if name.startswith(own):
            name = stored + name.removeprefix(own)
            break
    return f"model.layers.{LAYERS}.{name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=4, help="of training of each head (4)")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as top:
        weights = deepened(load_file(str(NANO / "model.safetensors")))
        model = enlarged(Path(top, "model"), weights, num_hidden_layers=LAYERS)
        folders = {}
        for method in args.heads:
            make: Any = HEADS[method]
            torch.manual_seed(0)
            nano = Nano()
            head = make(nano.model)
            print(f"{method}: {train(head, nano, args.minutes)}", flush=True)
            folders[method] = save(head, Path(top, method), model)
        torch.set_num_threads(available_cores())
        print("\n| head: answers | rows | without, tokens/s | with | ratio | accepted |")
        print("|---|---:|---:|---:|---:|---:|")
        for method, folder in folders.items():
            options = CACHE | {"drafts.method": method, "drafts.model": {"path": folder}}
            with LLM(model, **CACHE) as plain, LLM(model, **options) as drafting:
                for rows in (1, 8):
                    line = compare(plain, drafting, "mixed", rows, args.pairs)
                    print(line.replace("mixed", f"{method}: mixed"), flush=True)


if __name__ == "__main__":
    main()
