"""Turns the tokenizer in a file's metadata into the files of a model folder: `tokenizer.json`,
`tokenizer_config.json` and the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any, NamedTuple

from swell.configs.files.gguf.header import GgufError, GgufFile, shown

MAX_TOKENS = 2**20
"""Limit for the tokens. The largest vocabularies have 262 144."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The types of tokens, as the file numbers them."""

END_TEXTS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|eom_id|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
        "</s>",
        "<eos>",
    )
)
"""Control tokens that end an answer although the metadata does not say so: many files state only
one end token, and chat templates use another one."""

_UNSTRIPPED = frozenset(("<s>", "<|endoftext|>"))
"""The control tokens of Phi-3 that do not remove the spaces after them."""


class Vocabulary(NamedTuple):
    """The tokens of a file, by id."""

    texts: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]

    def ids(self) -> dict[str, int]:
        """Returns text -> id. If a text is there twice, its last id is the one in use."""
        return {text: id for id, text in enumerate(self.texts)}


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """Reads the tokens. Raises GgufError."""
    texts = _list(file, "tokens", str)
    if not texts:
        raise GgufError(
            f"{file.path} has no tokenizer: its metadata lack tokenizer.ggml.tokens; specify a "
            "file of a whole model"
        )
    if len(texts) > MAX_TOKENS:
        raise GgufError(
            f"{file.path} is damaged: it has {len(texts)} tokens; the limit is {MAX_TOKENS}"
        )
    types = _list(file, "token_type", int) or [NORMAL] * len(texts)
    scores = _list(file, "scores", float) or [0.0] * len(texts)
    for name, values in (("token_type", types), ("scores", scores)):
        if len(values) != len(texts):
            raise GgufError(
                f"{file.path} is damaged: it has {len(texts)} tokens and {len(values)} values of "
                f"tokenizer.ggml.{name}; copy it there again"
            )
    if wrong := [id for id, score in enumerate(scores) if isnan(score)]:
        raise GgufError(
            f"{file.path} is damaged: tokenizer.ggml.scores of token {wrong[0]} is not a number; "
            "copy it there again"
        )
    return Vocabulary(texts, types, scores, _list(file, "merges", str))


def _list(file: GgufFile, name: str, kind: type) -> list[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise GgufError(
            f"{file.path} is damaged: tokenizer.ggml.{name} is not a list of {kind.__name__}"
        )
    return values


def token_id(file: GgufFile, vocabulary: Vocabulary, name: str) -> int | None:
    """Returns the id in `tokenizer.ggml.NAME_token_id`; None if it is missing or not a token."""
    id = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return id if type(id) is int and 0 <= id < len(vocabulary.texts) else None


def end_token_ids(file: GgufFile, vocabulary: Vocabulary) -> list[int]:
    """Returns the ids that end an answer."""
    stated = {token_id(file, vocabulary, name) for name in ("eos", "eot", "eom")}
    known = {
        id
        for id, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=True))
        if kind == CONTROL and text in END_TEXTS
    }
    return sorted(id for id in stated | known if id is not None)


def tokenizer_files(file: GgufFile, vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the name -> content of each file: text, or an object to write as JSON. Raises
    GgufError."""
    from swell.configs.files.gguf.byte_pairs import byte_pairs
    from swell.configs.files.gguf.spm import sentence_pieces

    kinds = {"llama": sentence_pieces, "gpt2": byte_pairs}
    kind = file.metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in kinds:
        raise GgufError(
            f"{file.path}: the tokenizer model {shown(kind)} is not supported (supported are "
            f"{', '.join(kinds)}); serve the folder from which the file was made"
        )
    model = kinds[kind](file, vocabulary)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(file, vocabulary),
        **model.parts,
        "post_processor": _post_processor(file, vocabulary, model.adds_bos),
    }
    config = {
        "tokenizer_class": "TokenizersBackend",
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        **_named_tokens(file, vocabulary),
    }
    files: dict[str, Any] = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        files["chat_template.jinja"] = template
    return files


class TokenizerModel(NamedTuple):
    """The parts of a `tokenizer.json` that depend on the kind of the tokenizer."""

    parts: Mapping[str, Any]
    adds_bos: bool
    """Whether a prompt begins with the bos token if the metadata do not say so."""


def _added_tokens(file: GgufFile, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Returns the tokens that are found in a text before all others. Only control tokens are
    special: they are not part of an answer's text."""
    strips = file.metadata.get("general.architecture") == "phi3"
    ids = vocabulary.ids()
    special = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
    return [
        {
            "id": id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and kind == CONTROL and text not in _UNSTRIPPED,
            "normalized": False,
            "special": special[kind],
        }
        for id, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=True))
        if kind in special and text and ids[text] == id
    ]


def _post_processor(file: GgufFile, vocabulary: Vocabulary, adds_bos: bool) -> dict[str, Any]:
    """Returns the part that puts a bos token before a text, and an eos token after it, if the
    metadata say so."""
    adds = file.metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    bos = token_id(file, vocabulary, "bos") if adds else None
    ends = file.metadata.get("tokenizer.ggml.add_eos_token", False)
    eos = token_id(file, vocabulary, "eos") if ends else None
    edges = [None if id is None else vocabulary.texts[id] for id in (bos, eos)]
    special = {
        text: {"id": text, "ids": [id], "tokens": [text]}
        for text, id in zip(edges, (bos, eos), strict=True)
        if text is not None
    }

    def template(*sequences: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for type_id, name in enumerate(sequences):
            one = {"Sequence": {"id": name, "type_id": type_id}}
            before, after = (
                [{"SpecialToken": {"id": edge, "type_id": type_id}}] if edge is not None else []
                for edge in edges
            )
            found += [*before, one, *after]
        return found

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": special,
    }


def _named_tokens(file: GgufFile, vocabulary: Vocabulary) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {own: token_id(file, vocabulary, name) for name, own in names.items()}
    return {f"{own}_token": vocabulary.texts[id] for own, id in found.items() if id is not None}
