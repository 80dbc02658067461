"""Marks secrets, so that no log line, error or HTTP response shows them.

A field or a parameter that holds a secret has one of the types below. A struct with such a field
derives from `HoldsSecrets`, which hides it in the struct's repr; other classes that hold a secret
must not define a repr. `tests/test_secrets.py` checks both by these types, and finds names that
look like secrets but have another type.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any

import msgspec

SECRET = msgspec.Meta(extra={"secret": True})
SecretBytes = Annotated[bytes, SECRET]
SecretText = Annotated[str, SECRET]

HIDDEN = "<secret>"


class HoldsSecrets(msgspec.Struct, frozen=True):
    """Base class of a struct with secret fields."""

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({fields})"

    def __rich_repr__(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        for name in self.__struct_fields__:
            is_hidden = name in secret_fields(type(self))
            yield name, _Hidden() if is_hidden else getattr(self, name)


class _Hidden:
    """Placeholder that is shown instead of a secret."""

    def __repr__(self) -> str:
        return HIDDEN


@cache
def secret_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Returns the names of a struct's fields with a secret type, also if it is optional or in a
    list."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType), "the kind is a struct"
    return frozenset(field.name for field in info.fields if _is_secret(field.type))


def _is_secret(kind: msgspec.inspect.Type) -> bool:
    if isinstance(kind, msgspec.inspect.UnionType):
        return any(map(_is_secret, kind.types))
    if isinstance(kind, msgspec.inspect.ListType):
        return _is_secret(kind.item_type)
    return isinstance(kind, msgspec.inspect.Metadata) and bool((kind.extra or {}).get("secret"))
