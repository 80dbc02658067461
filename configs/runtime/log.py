"""Structured logs: one line per event, followed by `key=value` fields, with rank and epoch if
known."""

from __future__ import annotations

import logging
import sys
from typing import Any

_LOGGERS = ("swell", "opentelemetry.exporter.otlp")


class KeyValueFormatter(logging.Formatter):
    """Formats a line as `2026-01-31T12:00:00 INFO swell.engine loaded rank=0 epoch=3
    blocks=512`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Formats the line of a record; if there is a traceback, `logging` appends it."""
        line = super().formatMessage(record)
        fields: dict[str, Any] = getattr(record, "fields", {})
        return line + "".join(f" {key}={_quoted(value)}" for key, value in fields.items())


class StructuredLogger:
    """A logger that adds its constant fields to every line."""

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
        """Logs an error with its traceback."""
        self._logger.error(message, exc_info=error, extra={"fields": {**self._fields, **fields}})


def configure_logging(level: int = logging.INFO) -> None:
    """Sends Swell's logs, and those of the exporter of traces, to standard error. The entry point
    of a process calls this once."""
    for name in _LOGGERS:
        root = logging.getLogger(name)
        if not root.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(KeyValueFormatter())
            root.addHandler(handler)
            root.propagate = False
        root.setLevel(level)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if the message is
    empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip()


def _quoted(value: Any) -> str:
    text = str(value)
    return repr(text) if " " in text or not text else text
