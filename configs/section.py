"""What the sections of a configuration are made of."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_INTEGER = 2**53
"""Larger ones are not the same number to every reader of JSON."""
MAX_SECONDS = 2_000_000.0
"""23 days: what waits takes milliseconds, in 31 bits."""
MAX_KEPT_S = 10 * 366 * 86400.0
"""How long something may be kept: ten years."""
MAX_TEXT_CHARS = 4096
"""As the longest path of a file."""
MAX_NAMES = 256
NO_CONTROLS = r"^[^\x00-\x1f\x7f\ud800-\udfff]*\Z"
"""A text without control characters, which no file system and no header has."""

SEVERAL_LINES = r"^[^\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]*\Z"
"""The same with ends of lines and tabs."""

Positive = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
NonNegative = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Processes = Annotated[int, Meta(ge=1, le=65_536)]
"""A number of processes, or of what each takes one of."""
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
KeptSeconds = Annotated[float, Meta(gt=0, le=MAX_KEPT_S)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS, pattern=NO_CONTROLS)]
FilledText = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS, pattern=NO_CONTROLS)]
Template = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS, pattern=SEVERAL_LINES)]
Names = Annotated[list[Text], Meta(max_length=MAX_NAMES)]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message has the key, its value and the way out.
    `key` is `section.key`, or empty where it is about several."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section."""
