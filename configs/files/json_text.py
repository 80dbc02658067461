"""Parses JSON files that other programs wrote."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises ValueError if the text is not JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its objects and arrays are nested too deeply") from None
