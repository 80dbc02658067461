"""Small random pooling models, saved as folders with a tokenizer and the files of
sentence-transformers, and their expected results: transformers' hidden states, pooled here.

`python -m tests.support.weights.pooled_models FOLDER` saves an embedder and a ranker for tests in
other environments."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?!"
VOCABULARY = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    # Model type -> values that differ from SIZES.
    "bert": {},
    "roberta": {"pad_token_id": 1, "max_position_embeddings": 130, "type_vocab_size": 1},
    "xlm-roberta": {"pad_token_id": 1, "max_position_embeddings": 130, "type_vocab_size": 1},
    "modernbert": {
        "local_attention": 16,
        "global_attn_every_n_layers": 2,
        "num_hidden_layers": 4,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "llama": {"num_key_value_heads": 2},
}
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")
TEXTS = [
    "a",
    "what is a pool?",
    "the quick brown fox jumps over the lazy dog, and then it sleeps.",
    "one two three four five six seven eight nine ten eleven twelve",
    "x y z",
    "a longer text. " * 5,
    "0 1 2 3 4 5 6 7 8 9 a b c d",
]
"""Texts of mixed lengths, from 3 to 72 tokens."""


def make(
    folder: Path,
    family: str,
    *,
    head: str = "",
    modes: Mapping[str, Any] | None = None,
    normalizes: bool = False,
    dense: tuple[int, str] | None = None,
    seed: int = 0,
    **changes: Any,
) -> Any:
    """Saves a float32 model into `folder` and returns the transformers model.

    `head` is empty or the suffix of the architecture's name. `modes` are written to its
    `1_Pooling/config.json`. `dense` is the output width and the activation of a Dense module.
    """
    values = {**SIZES, **FAMILIES[family], **changes}
    config = transformers.AutoConfig.for_model(family, **values)
    config._attn_implementation = "eager"
    kind = transformers.AutoModelForSequenceClassification if head else transformers.AutoModel
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
        layer = torch.nn.Linear(values["hidden_size"], dense[0] if dense else 1)
    model.save_pretrained(folder)
    save_tokenizer(folder, family)
    if modes is not None:
        _save_modules(folder, modes, normalizes, dense, layer)
    model.dense = layer if dense else None
    return model


def save_tokenizer(folder: Path, family: str) -> None:
    """Saves a WordPiece tokenizer over letters. Encoders put a text between [CLS] and [SEP];
    decoders append an end token."""
    backend = Tokenizer(
        models.WordPiece(
            {word: i for i, word in enumerate(VOCABULARY)},
            unk_token="[UNK]",
            max_input_chars_per_word=1000,
        )
    )
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
    if family not in ENCODERS:
        single, pair = "$A [SEP]", "$A $B:1 [SEP]:1"
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * (family == "bert")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=names,
    ).save_pretrained(folder)


def _save_modules(
    folder: Path,
    modes: Mapping[str, Any],
    normalizes: bool,
    dense: tuple[int, str] | None,
    layer: torch.nn.Linear,
) -> None:
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    _save(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": size, **modes})
    if dense is not None:
        values, activation = dense
        modules.append(("Dense", "2_Dense"))
        what = {"in_features": size, "out_features": values, "bias": True}
        name = f"torch.nn.modules.activation.{activation}"
        _save(folder / "2_Dense" / "config.json", {**what, "activation_function": name})
        state = {f"linear.{name}": data.data for name, data in layer.named_parameters()}
        save_file(state, folder / "2_Dense" / "model.safetensors")
    if normalizes:
        modules.append(("Normalize", f"{len(modules)}_Normalize"))
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(modules)
    ]
    _save(folder / "modules.json", listed)


def _save(file: Path, data: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(data))


@torch.no_grad()
def pooled(model: Any, method: str, ids: list[int]) -> Tensor:
    """Returns the pooled hidden state [hidden] of one text, computed without a batch."""
    hidden: Tensor = model(torch.tensor([ids])).last_hidden_state[0]
    return {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[method]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    make(folder / "embedder", "bert", modes={"pooling_mode_mean_tokens": True}, normalizes=True)
    make(folder / "ranker", "bert", head="ForSequenceClassification", num_labels=1)
