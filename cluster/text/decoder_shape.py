"""The decoders whose tokens are pieces of text, read from their stages."""

from __future__ import annotations

from typing import Any


class DecoderShape:
    """What `PieceDetokenizer` must know of a decoder's stages; `parse` gives None for other
    decoders."""

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
        """Stages that read one token at a time, then at most ByteFallback, then at most
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


def byte_of_token(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None
