"""The error of a start that failed, and its reason in one line of what Ray and Serve say."""

from __future__ import annotations


class StartupError(RuntimeError):
    """The cluster did not start; the message is the reason, in one line."""


def last_line(text: str) -> str:
    """The end of a remote traceback has the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return (errors or lines or ["Ray gave no reason"])[-1]
