"""Encodes prompt embeddings as a client sends them."""

from __future__ import annotations

import base64

import torch
from safetensors.torch import save

from swell.cluster.text.prompt.prompt_embeds import EmbedsPrompt, read_prompt_embeds


def encoded(embeds: torch.Tensor) -> str:
    """Encodes embeddings [tokens, width] as a value of `prompt_embeds`."""
    return base64.b64encode(save({"prompt_embeds": embeds.contiguous()})).decode()


def prompt_of(embeds: torch.Tensor) -> EmbedsPrompt:
    return read_prompt_embeds(encoded(embeds), "prompt_embeds")
