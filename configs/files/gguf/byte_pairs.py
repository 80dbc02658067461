"""A byte-pair encoding of bytes, as a `tokenizer.json`. The metadata name the regular expressions
that split a text into words (`tokenizer.ggml.pre`) and do not contain them: they are listed
here."""

from __future__ import annotations

from typing import Any, NamedTuple

from swell.configs.files.gguf.header import GgufError, GgufFile, shown
from swell.configs.files.gguf.tokenizer import TokenizerModel, Vocabulary

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_CASED = (f"{_FIRST}{_UPPER}*{_LOWER}+", f"{_FIRST}{_UPPER}+{_LOWER}*")
_CASED_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


class _Split(NamedTuple):
    """How a text is split into words."""

    patterns: tuple[str, ...]
    """Each splits what the one before it left."""
    keeps_words: bool = False
    """Whether a word that is a token becomes that token, even if the merges give other ones."""
    adds_bos: bool = False
    """Whether a prompt begins with the bos token if the metadata do not say so."""


_LLAMA_3 = _Split(
    (rf"{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}",), keeps_words=True, adds_bos=True
)
_QWEN_2 = _Split((rf"{_WORDS}|\p{{N}}|{_MARKS}|{_SPACES}",))
_DIGITS = _Split((r"\p{N}", _GPT2))
_WORDS_OF_GPT2 = _Split((_GPT2,))
_GPT_4O = _Split(
    (rf"{_CASED[0]}{_ENDINGS}?|{_CASED[1]}{_ENDINGS}?|\p{{N}}{{1,3}}|{_CASED_MARKS}|{_SPACES}",)
)

SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2"), _LLAMA_3),
    **dict.fromkeys(
        ("dbrx", "smaug-bpe", "chatglm-bpe"), _LLAMA_3._replace(keeps_words=False, adds_bos=False)
    ),
    "glm4": _LLAMA_3._replace(adds_bos=False),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN_2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion"), _WORDS_OF_GPT2
    ),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT_4O),
    "qwen35": _Split(
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        )
    ),
    "tekken": _Split(
        (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_MARKS}|{_SPACES}",),
        keeps_words=True,
        adds_bos=True,
    ),
    "deepseek-coder": _Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": _Split(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
        )
    ),
    "falcon": _Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""Name in `tokenizer.ggml.pre` -> the split."""


def byte_pairs(file: GgufFile, vocabulary: Vocabulary) -> TokenizerModel:
    """Returns the parts of the `tokenizer.json`. Raises GgufError."""
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    split = SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        raise GgufError(
            f"{file.path}: the tokenizer splits words as tokenizer.ggml.pre={shown(name)}, which "
            f"is not supported (supported are {', '.join(sorted(SPLITS))}); serve the folder "
            "from which the file was made"
        )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in split.patterns
    ]
    bytes_only = {**byte_level, "use_regex": False}
    parts = {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_only]},
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": split.keeps_words,
            "vocab": vocabulary.ids(),
            "merges": _merges(file, vocabulary),
        },
    }
    return TokenizerModel(parts, split.adds_bos)


def _merges(file: GgufFile, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Returns the merges. Raises GgufError for one whose parts or result are not tokens."""
    ids = vocabulary.ids()
    pairs: list[tuple[str, str]] = []
    for merge in vocabulary.merges:
        left, space, right = merge.partition(" ")
        if not space or left not in ids or right not in ids or left + right not in ids:
            raise GgufError(
                f"{file.path} is damaged: the merge {shown(merge)} of its tokenizer does not join "
                "two tokens to a third; copy it there again"
            )
        pairs.append((left, right))
    return pairs
