"""Types of JSON values, for bodies, schemas and templates."""

from __future__ import annotations

from typing import Any, TypeAlias

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = "dict[str, JsonValue]"
JsonSchema: TypeAlias = dict[str, Any]
"""A JSON schema. Readers of a client's schema check the types of its values."""
