"""One small random model in a folder: its weights, its config and a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from swell.worker.models.generic.build import auto_class
from swell.worker.models.text_part import text_config, wrapper_class
from tests.zoo.configs import VOCAB
from tests.zoo.exceptions import SAVED_AS_BUILT

NORM_NOISE = 0.1


def make(folder: Path, config: Any, seed: int = 0) -> Any:
    """Saves a float32 model of `config`; returns the eager model of transformers. For a wrapper
    whose towers need libraries that are not installed, that is its text model.

    Returns the exception if transformers itself cannot build the model; the folder then only holds
    the config.
    """
    write_tokenizer(folder)
    try:
        try:
            model = build(config, seed)
            as_published = config.model_type not in SAVED_AS_BUILT
            model.save_pretrained(folder, save_original_format=as_published)
        except ImportError:
            model = build(text_config(config), seed)
            _save_wrapped(model, config, folder)
    except Exception as error:
        config.save_pretrained(folder)
        return error
    return model


def build(config: Any, seed: int) -> Any:
    """Returns a random float32 model of transformers with eager attention."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto_class(config).from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        _randomize(model.eval())
    return model


def _save_wrapped(model: Any, config: Any, folder: Path) -> None:
    """Saves a text model as the part of a wrapper, which has `config`."""
    tied = model.all_tied_weights_keys
    weights = {
        name.replace("model.", "model.language_model.", 1): tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [wrapper_class(config)]
    config.save_pretrained(folder)


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
