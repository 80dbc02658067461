"""The error of a failed start, and its one-line reason from the messages of Ray and Serve."""

from __future__ import annotations


class StartupError(RuntimeError):
    """Raised if the cluster did not start; the message is the reason, in one line."""


def last_line(text: str) -> str:
    """Returns the line with the error, which is at the end of a remote traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return (errors or lines or ["Ray gave no reason"])[-1]
