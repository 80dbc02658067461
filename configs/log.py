"""Structured logs: one line a fact, `key=value` behind it, rank and epoch where they are known."""

from __future__ import annotations

import logging
import sys
from typing import Any


class KeyValueFormatter(logging.Formatter):
    """`2026-01-31T12:00:00 INFO swell.engine loaded rank=0 epoch=3 blocks=512`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line above a traceback, where there is one."""
        line = super().formatMessage(record)
        fields: dict[str, Any] = getattr(record, "fields", {})
        return line + "".join(f" {key}={_quoted(value)}" for key, value in fields.items())


class StructuredLogger:
    """A logger whose every line carries the fields that it was made with."""

    def __init__(self, name: str, **fields: Any) -> None:
        self._logger = logging.getLogger(f"swell.{name}")
        self._fields = fields

    def info(self, message: str, **fields: Any) -> None:
        self._logger.info(message, extra={"fields": {**self._fields, **fields}})

    def warning(self, message: str, **fields: Any) -> None:
        self._logger.warning(message, extra={"fields": {**self._fields, **fields}})

    def error(self, message: str, **fields: Any) -> None:
        self._logger.error(message, extra={"fields": {**self._fields, **fields}})

    def exception(self, message: str, error: BaseException, **fields: Any) -> None:
        """An error with its traceback."""
        self._logger.error(message, exc_info=error, extra={"fields": {**self._fields, **fields}})


def configure_logging(level: int = logging.INFO) -> None:
    """Send our logs to standard error. Called once by whoever owns the process."""
    root = logging.getLogger("swell")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(KeyValueFormatter())
        root.addHandler(handler)
        root.propagate = False
    root.setLevel(level)


def _quoted(value: Any) -> str:
    text = str(value)
    return repr(text) if " " in text or not text else text
