"""Small tokenizers that are built like those of well-known models: the same models, normalizers,
decoders, added tokens and flags, with a vocabulary of some hundred tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The sky is blue, the sea is deep. It's 12:45, isn't it?",
    "the quick brown fox jumps over the lazy dog in the city of Paris",
    "def f(x):\n    if x:\n        return x + 1\n\n\tprint(f(2))\n",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
    '[{"type": "object", "value": true}, null, 1.5]\n',
    "Grüße aus München, straße. Привет, как дела? 你好,世界! emoji 😀🎉",
] * 3
VOCAB_SIZE = 420
SPECIAL_FIRST = ["<unk>", "<s>", "</s>"]
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern by which Llama 3, Qwen and others split text into words."""


@cache
def _sentencepiece_parts() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns vocabulary and merges as in sentencepiece's BPE: first the special tokens, then a
    token for each byte, then words that begin with a space, and runs of spaces."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, show_progress=False, limit_alphabet=90)
    learner.train_from_iterator(CORPUS, trainer)
    learned = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    merges = [(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]]
    spaces = [("▁" * size, "▁" * size) for size in (1, 2, 4)]
    texts = [
        *SPECIAL_FIRST,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(token for token, _ in learned),
        *(left + right for left, right in spaces),
    ]
    vocab = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    return vocab, merges + spaces


def _with_special(tokenizer: Tokenizer, special: Sequence[str], plain: Sequence[str]) -> Tokenizer:
    """Adds tokens: `special` ones are skipped in text, `plain` ones are text."""
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return tokenizer


def _begins_with(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
    return tokenizer


def sentencepiece(special: Sequence[str] = (), *, legacy: bool) -> Tokenizer:
    """Returns a tokenizer like that of Llama 2 (`legacy`: a normalizer puts a space before every
    piece between special tokens) or of Mistral up to v3 (only before the first piece)."""
    vocab, merges = _sentencepiece_parts()
    tokenizer = Tokenizer(
        models.BPE(dict(vocab), list(merges), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _begins_with(_with_special(tokenizer, [*SPECIAL_FIRST, *special], ()), "<s>")


def gemma() -> Tokenizer:
    """Returns a tokenizer like Gemma's: spaces are ordinary characters, nothing is put before a
    text, and nothing is stripped."""
    vocab, merges = _sentencepiece_parts()
    names = {"<unk>": "<pad>", "<s>": "<eos>", "</s>": "<bos>"}
    vocab = {names.get(text, text): place for text, place in vocab.items()}
    tokenizer = Tokenizer(
        models.BPE(
            {**vocab, "<unk>": len(vocab)}, list(merges), unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    return _begins_with(_with_special(tokenizer, special, ()), "<bos>")


def byte_level(
    special: Sequence[str] = (), plain: Sequence[str] = (), *, bos: str | None = None
) -> Tokenizer:
    """Returns a tokenizer like those of Llama 3, Qwen, Mistral from Tekken on, DeepSeek, GLM, Kimi
    and gpt-oss: BPE over bytes, so a token may be a part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer = _with_special(tokenizer, special, plain)
    return _begins_with(tokenizer, bos) if bos else tokenizer
