"""One small random model in a folder: its weights, its config and a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.zoo.configs import VOCAB

NORM_NOISE = 0.1


def make(folder: Path, config: Any, seed: int = 0) -> Any:
    """Saves a float32 model of `config`; returns the eager model of transformers.

    Returns the exception if transformers itself cannot build the model; the folder then only holds
    the config.
    """
    write_tokenizer(folder)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            _randomize(model)
        model.save_pretrained(folder)
    except Exception as error:
        config.save_pretrained(folder)
        return error
    return model


@torch.no_grad()
def _randomize(model: Any) -> None:
    """Makes weights large enough that attention is not uniform, and that no two answers are
    alike."""
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0.0, min(1.0, 2.0 * parameter.shape[-1] ** -0.5))
        else:
            parameter.add_(torch.randn_like(parameter) * NORM_NOISE)


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer in which every id is a word of its own."""
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": None})
    )
