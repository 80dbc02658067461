"""The part of a configuration that the user has written, without the keys that have their
defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from swell.configs.schema import load, override, read_source


def given_settings(source: str, overrides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the sections with the keys that the source or the overrides contain, and the values
    that `load` gives them. Raises `ConfigError`."""
    whole = msgspec.to_builtins(load(source, overrides))
    data, _ = read_source(source)
    for key, value in overrides.items():
        override(data, key, value)
    return {section: {key: whole[section][key] for key in keys} for section, keys in data.items()}
