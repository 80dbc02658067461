"""Token ids to text, one token at a time.

The law: all pieces together, the last from `flush`, are
`tokenizer.decode(ids, skip_special_tokens=..., clean_up_tokenization_spaces=False)`, however the
ids were grouped, at a cost per token that does not grow with the answer.

Decoding the last few ids again, as is common, cannot keep that law: a decoder may treat the first
token apart, drop a leading space, or judge bytes by what follows them. So the tokenizer's decoder
is read, and one of three machines runs:

    ByteLevelText   every token is bytes, the text is UTF-8 with errors replaced   (gpt2, llama 3)
    PieceText       every token is a piece of text; the first may differ; runs of byte tokens
                    are judged as a whole                                 (llama 2, t5, bert)
    WindowText      nothing is known: a window is decoded again, whatever is uncertain is held

A machine is taken only if it agrees with the tokenizer on a few hundred random answers. Limits of
the law: a run of more than `MAX_RUN_TOKENS` byte tokens that later turns out not to be UTF-8 has
its valid characters shown already (`PieceText`); `WindowText` shows text after at most
`MAX_PENDING_TOKENS`, which a decoder without any locality can contradict.
Cleaning of spaces (" ." to ".") is never applied: it would rewrite text that the model meant.
"""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable
from typing import Any, Protocol

from tokenizers import Tokenizer

MAX_RUN_TOKENS = 64
MAX_PENDING_TOKENS = 16
REPLACEMENT = "\ufffd"

Decode = Callable[[list[int]], str]


class IncrementalDetokenizer(Protocol):
    """The text of one answer as it grows."""

    def push(self, token_id: int) -> str:
        """The text that this token makes certain."""

    def flush(self) -> str:
        """The rest, once the answer has ended."""


class NoText:
    """Without a tokenizer an answer is ids alone."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class ByteTable(dict[int, bytes]):
    """id -> the bytes it stands for under a byte-level decoder, filled on use."""

    def __init__(self, backend: Tokenizer, special: frozenset[str]) -> None:
        super().__init__()
        self._backend = backend
        self._special = special

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        self[token_id] = data = b"" if token is None or token in self._special else to_bytes(token)
        return data


def to_bytes(token: str) -> bytes:
    """A token outside the byte alphabet, such as an added one with a space, is its own text."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_of_char()
_Utf8 = codecs.getincrementaldecoder("utf-8")


class ByteLevelText:
    def __init__(self, table: ByteTable) -> None:
        self.table = table
        self._decode = _Utf8("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self.table[token_id])

    def flush(self) -> str:
        return self._decode(b"", True)


class PieceTable:
    """id -> its text at the start of an answer and behind other tokens, a byte, or None.

    The pieces are asked from the tokenizer itself: what it decodes for an id alone, and what an
    id adds behind `anchor`, an ordinary word.
    """

    def __init__(
        self, decode: Decode, backend: Tokenizer, special: frozenset[str], shape: DecoderShape
    ) -> None:
        self.shape = shape
        self.first: dict[int, str | int | None] = {}
        self.rest: dict[int, str | int | None] = {}
        self._decode = decode
        self._backend = backend
        self._special = special
        self._anchor = self._find_anchor()
        self._anchor_text = decode([self._anchor])

    def fill(self, token_id: int) -> None:
        token = self._backend.id_to_token(token_id)
        if token is None or token in self._special:
            self.first[token_id] = self.rest[token_id] = None
            return
        byte = _byte_token(token) if self.shape.byte_fallback else None
        if byte is not None:
            self.first[token_id] = self.rest[token_id] = byte
            return
        behind = self._decode([self._anchor, token_id])
        if not behind.startswith(self._anchor_text):
            raise ValueError(f"token {token_id} changes the text before it")
        self.rest[token_id] = piece = behind[len(self._anchor_text) :]
        self.first[token_id] = self._decode([token_id]) if self.shape.first_differs else piece

    def _find_anchor(self) -> int:
        for token, token_id in sorted(self._backend.get_vocab().items(), key=lambda item: item[1]):
            if token.isalnum() and token.isascii() and token not in self._special:
                return int(token_id)
        raise ValueError("the vocabulary holds no plain word to compare with")


class PieceText:
    def __init__(self, table: PieceTable) -> None:
        self.table = table
        self._started = False
        self._strip_chars = table.shape.strip_chars
        """Leading characters that may still be dropped."""
        self._run = bytearray()
        self._long_run: codecs.IncrementalDecoder | None = None

    def push(self, token_id: int) -> str:
        table = self.table
        if token_id not in table.rest:
            table.fill(token_id)
        piece = table.rest[token_id] if self._started else table.first[token_id]
        if piece is None:
            return ""
        self._started = True
        if isinstance(piece, int):
            return self._strip(self._push_byte(piece))
        if self._run or self._long_run is not None:
            piece = self._end_run() + piece
        return self._strip(piece) if self._strip_chars else piece

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _push_byte(self, byte: int) -> str:
        """One byte that is not UTF-8 spoils its whole run, so the run waits for its end."""
        if self._long_run is not None:
            return self._long_run.decode(bytes([byte]))
        self._run.append(byte)
        if len(self._run) <= MAX_RUN_TOKENS:
            return ""
        self._long_run = _Utf8("replace")
        text = self._long_run.decode(bytes(self._run))
        self._run.clear()
        return text

    def _end_run(self) -> str:
        if self._long_run is not None:
            text = self._long_run.decode(b"", True)
            self._long_run = None
            return text
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while self._strip_chars and text:
            if text[0] != self.table.shape.strip_char:
                self._strip_chars = 0
                break
            text = text[1:]
            self._strip_chars -= 1
        return text


class WindowText:
    """Decodes again from one emission before the last, and shows what has been added.

    ids: .......... | context | pending |
                    ^start    ^read
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._all_ids: list[int] = []
        self._window: list[int] = []
        self._read = 0
        self._context_text = ""
        self._shown: list[str] = []

    def push(self, token_id: int) -> str:
        self._all_ids.append(token_id)
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = text.startswith(self._context_text) and not text.endswith(REPLACEMENT)
        full = len(self._window) - self._read >= MAX_PENDING_TOKENS
        added = text[len(self._context_text) :]
        if not added and full:
            # Tokens without text must not push the context out of the window.
            del self._window[self._read :]
            return ""
        if not added or not (certain or full):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._context_text = self._decode(self._window)
        self._shown.append(added)
        return added

    def flush(self) -> str:
        shown, text = "".join(self._shown), self._decode(self._all_ids)
        if text.startswith(shown):
            return text[len(shown) :]
        return self._decode(self._window)[len(self._context_text) :]


class DecoderShape:
    """What `PieceText` must know of a decoder's stages; `parse` gives None for other decoders."""

    def __init__(
        self,
        *,
        first_differs: bool = False,
        byte_fallback: bool = False,
        strip_char: str = "",
        strip_chars: int = 0,
    ) -> None:
        self.first_differs = first_differs
        self.byte_fallback = byte_fallback
        self.strip_char = strip_char
        self.strip_chars = strip_chars

    @staticmethod
    def parse(stages: list[dict[str, Any]]) -> DecoderShape | None:
        """Stages that look at one token at a time, then at most ByteFallback, then at most
        Fuse, then at most a Strip of the beginning."""
        kinds = [stage["type"] for stage in stages]
        if not kinds or kinds in (["Metaspace"], ["WordPiece"]):
            return DecoderShape(first_differs=True)
        local = 0
        while local < len(kinds) and kinds[local] in ("Replace", "Strip"):
            local += 1
        tail, last = kinds[local:], stages[-1]
        byte_fallback = tail[:1] == ["ByteFallback"]
        tail = tail[1:] if byte_fallback else tail
        if tail in ([], ["Fuse"]):
            return DecoderShape(byte_fallback=byte_fallback)
        if tail == ["Fuse", "Strip"] and last["stop"] == 0:
            return DecoderShape(
                byte_fallback=byte_fallback, strip_char=last["content"], strip_chars=last["start"]
            )
        return None


def _byte_token(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _stages(backend: Tokenizer) -> list[dict[str, Any]]:
    """The decoder's stages, flat; empty without a decoder."""
    if backend.decoder is None:
        return []
    found: list[dict[str, Any]] = []
    stack = [json.loads(backend.decoder.__getstate__())]
    while stack:
        stage = stack.pop()
        if stage["type"] == "Sequence":
            stack.extend(reversed(stage["decoders"]))
        else:
            found.append(stage)
    return found


class Detokenizer:
    """What a tokenizer's answers share: the chosen machine and its tables.

    `tokenizer` is one of transformers', or a `tokenizers.Tokenizer`, or None for no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._backend = backend if isinstance(backend, Tokenizer) else None
        self._start = {skip: self._choose(skip) for skip in (False, True)}

    def start(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """The text machine of a new answer."""
        return self._start[skip_special_tokens]()

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The whole text at once: the right side of the law."""
        if self._tokenizer is None:
            return ""
        if self._tokenizer is self._backend:
            return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
        return str(
            self._tokenizer.decode(
                token_ids,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def _choose(self, skip: bool) -> Callable[[], IncrementalDetokenizer]:
        if self._tokenizer is None:
            return NoText

        def decode(token_ids: list[int]) -> str:
            return self.decode(token_ids, skip)

        try:
            machine = self._exact_machine(decode, skip)
            if machine is not None and self._agrees(machine, decode):
                return machine
        except ValueError:
            pass  # a decoder that only looked like one of ours
        return lambda: WindowText(decode)

    def _exact_machine(
        self, decode: Decode, skip: bool
    ) -> Callable[[], IncrementalDetokenizer] | None:
        if self._backend is None:
            return None
        added = self._backend.get_added_tokens_decoder().values()
        special = frozenset(token.content for token in added if token.special and skip)
        stages = _stages(self._backend)
        if [stage["type"] for stage in stages] in (["ByteLevel"], ["ByteLevel", "Fuse"]):
            bytes_of = ByteTable(self._backend, special)
            return lambda: ByteLevelText(bytes_of)
        shape = DecoderShape.parse(stages)
        if shape is None:
            return None
        pieces = PieceTable(decode, self._backend, special, shape)
        return lambda: PieceText(pieces)

    def _agrees(self, machine: Callable[[], IncrementalDetokenizer], decode: Decode) -> bool:
        """Random answers, half of them rich in added tokens, single bytes and blanks."""
        assert self._backend is not None
        vocab = self._backend.get_vocab()
        rare = sorted(self._backend.get_added_tokens_decoder())
        rare += sorted(
            token_id
            for token, token_id in vocab.items()
            if _byte_token(token) is not None or not token.strip(" \u2581")
        )
        size, draw = max(vocab.values(), default=0) + 2, random.Random(0)
        for trial in range(200):
            pool = rare if rare and trial % 2 else range(size)
            ids = [
                draw.choice(pool) if draw.random() < 0.7 else draw.randrange(size)
                for _ in range(draw.randint(1, 16))
            ]
            text = machine()
            if "".join(map(text.push, ids)) + text.flush() != decode(ids):
                return False
        return True
