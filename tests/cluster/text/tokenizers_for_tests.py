"""Small tokenizers of every decoder family, made in memory, and a chat tokenizer that uses one."""

from __future__ import annotations

from functools import cache
from typing import Any

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
    "the quick brown fox jumps over the lazy dog. it's 12:45, isn't it?",
    "Grüße aus München, straße und übermut",
    "我喜欢吃苹果和香蕉。你好,世界!",
    "こんにちは世界、元気ですか",
    "Привет, как дела? Всё хорошо.",
    "emoji 😀😃🎉 family 👨‍👩‍👧 flag 🇩🇪",
    "مرحبا بالعالم שלום עולם",
    "def f(x):\n    return x + 1\n\n\tprint(f(2))",
] * 3
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def byte_level(vocab_size: int = 420) -> Tokenizer:
    """Like gpt2, llama 3 and qwen: byte-level BPE, so ids may split characters anywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    tokenizer.add_special_tokens([AddedToken("<｜end▁of▁text｜>", special=True)])
    return tokenizer


def _fallback_bpe() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "a"), ("o", "n"), ("▁", "▁")]
    for char in "▁abcdefghijklmnopqrstuvwxyzüß我你.,!":
        vocab[char] = len(vocab)
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@cache
def llama2() -> Tokenizer:
    """Like SentencePiece with byte fallback. Decoding removes one leading space."""
    tokenizer = _fallback_bpe()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@cache
def gemma() -> Tokenizer:
    """Byte fallback without removal of the leading space."""
    tokenizer = _fallback_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """Like t5: decoding removes the space of the first token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def wordpiece() -> Tokenizer:
    """Like bert: decoding joins words with spaces and cleans up within a token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def words() -> Tokenizer:
    """A tokenizer without a decoder: decoding joins tokens with spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", *SPECIALS], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def suffix_bpe() -> Tokenizer:
    """Like clip: the end of a word is marked, and decoding removes the space of the last word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def replaced_after_fusing() -> Tokenizer:
    """Decoding applies a rule to the whole text, which no table of pieces can express."""
    tokenizer = _fallback_bpe()
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("▁+"), " ")])
    return tokenizer


EXACT = {
    "byte_level": byte_level,
    "llama2": llama2,
    "gemma": gemma,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "words": words,
}
WINDOWED = {"suffix_bpe": suffix_bpe}


def chat_tokenizer(chat_template: str | None = CHAT_TEMPLATE, **kwargs: Any) -> Any:
    """A transformers tokenizer around `byte_level`, without files."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="<|im_end|>", **kwargs
    )
    tokenizer.chat_template = chat_template
    return tokenizer
