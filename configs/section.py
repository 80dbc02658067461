"""The base class of all configuration sections, and the field types that they share."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_INTEGER = 2**53
"""Larger integers lose precision in JSON readers that use doubles."""
MAX_SECONDS = 2_000_000.0
"""23 days: a timeout in milliseconds must fit in 31 bits."""
MAX_KEPT_S = 10 * 366 * 86400.0
"""Maximum retention time: ten years."""
MAX_TEXT_CHARS = 4096
"""Maximum length of a text: that of the longest path of a file."""
MAX_NAMES = 256
NO_CONTROLS = r"^[^\x00-\x1f\x7f\ud800-\udfff]*\Z"
"""A text without control characters, which neither paths nor HTTP headers may contain."""

SEVERAL_LINES = r"^[^\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]*\Z"
"""The same, but with newlines and tabs allowed."""

Positive = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
NonNegative = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Processes = Annotated[int, Meta(ge=1, le=65_536)]
"""A number of processes, or of things that each need one process."""
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
KeptSeconds = Annotated[float, Meta(gt=0, le=MAX_KEPT_S)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS, pattern=NO_CONTROLS)]
FilledText = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS, pattern=NO_CONTROLS)]
Template = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS, pattern=SEVERAL_LINES)]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
Names = Annotated[list[Text], Meta(max_length=MAX_NAMES)]


class ConfigError(ValueError):
    """Raised for a configuration that cannot be used; the message names the key, its value and a
    fix. `key` is `section.key`, or empty if the error concerns several keys."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of all sections."""
