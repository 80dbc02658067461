"""Base classes of request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar

import msgspec

from swell.cluster.text.errors import bad_value
from swell.cluster.text.json_types import JsonValue
from swell.cluster.text.schema.known_fields import Ecosystem


def neutral(*values: Any) -> msgspec.Meta:
    """Marks a field that is known but not served: these values, and null, are accepted without
    effect."""
    return msgspec.Meta(description=describe_neutral(values), extra={"neutral": values})


def describe_neutral(values: tuple[Any, ...]) -> str:
    return f"Not served; it must be {' or '.join(map(repr, (*values, None)))}."


NotServed = Annotated[Any, neutral()]


class RequestBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of every request body. An unknown field is refused, except as in `unknown_fields.py`.

    A field of OpenAI's API that is not served is known nevertheless: a `neutral` value is accepted,
    and any other is refused by name, so that no answer silently ignores a field.
    """

    POOLS: ClassVar[bool] = False
    """Whether the body is for a pooling model."""
    ECOSYSTEM: ClassVar[Ecosystem] = Ecosystem()
    """Fields of other servers, in addition to those of the struct."""
    PARTS: ClassVar[Mapping[str, Mapping[str | None, type[msgspec.Struct]]]] = {}
    """Maps a field that is converted after the body is decoded to the structs of its objects, by
    `type`."""

    def check(self) -> None:
        """Checks the rules between fields; raises `BadRequest`."""

    def keep(self, body: bytes) -> None:
        """Keeps details of the original body that the types lose."""

    def refuse_unsupported(self, path: str = "") -> None:
        for name, values in not_served(type(self)).items():
            value = getattr(self, name)
            if value is not None:
                check_neutral(f"{path}{name}", value, values)


@cache
def not_served(kind: type[RequestBody]) -> Mapping[str, tuple[JsonValue, ...]]:
    """Returns the fields that are not served, with their neutral values."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType), "bodies are structs"
    return {
        field.name: field.type.extra["neutral"]
        for field in info.fields
        if isinstance(field.type, msgspec.inspect.Metadata) and field.type.extra
    }


def check_neutral(path: str, value: JsonValue, neutral: tuple[JsonValue, ...]) -> None:
    """Raises `BadRequest` for a field whose value needs an unsupported feature; names the field."""
    # In Python 0 equals False, but not in JSON.
    if value is None or any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral
    ):
        return
    way_out = f"; leave it out or send {neutral[0]!r}" if neutral else "; leave it out"
    raise bad_value(path, value, f"is not supported{way_out}", "unsupported_value")


class HistoryPart(RequestBody, kw_only=True):
    """Base of the parts of a conversation: messages, their parts, calls and tool definitions. Other
    programs wrote them, so an unknown field is ignored and counted."""
