"""Finds unknown fields of a body, and leaves them out where this is allowed.

History is tolerant, requests are strict. Objects of a conversation (`HistoryPart`) come from other
programs, which add their own fields: these are ignored and counted. At the top of a body, the table
of its kind (`known_fields.py`) says how a field of another server is handled. Everywhere else an
unknown field stays, so that the decoder refuses it; with `serve.unknown_fields: ignore` it is left
out, and its path is kept for a warning.

This module only handles bodies in which the decoder met an unknown field. It splits objects into
names and raw values without decoding the values, so it keeps the original bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

import msgspec

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.schema.known_fields import IGNORED_FIELDS, Ecosystem
from swell.cluster.text.schema.request_body import HistoryPart, RequestBody, check_neutral

UnknownFields = Literal["refuse", "ignore"]
"""The values of `serve.unknown_fields`."""
StructTypes = Mapping[str | None, type[msgspec.Struct]]
"""Structs that a value may be, by the object's `type`; None is for all other types."""

Fields = dict[str, msgspec.Raw]
_OBJECT = msgspec.json.Decoder(Fields)
_PARTS = msgspec.json.Decoder(Fields | list[Fields])
_LABELS = frozenset(IGNORED_FIELDS)
_NULL = msgspec.Raw(b"null")
_BRACKETS, _QUOTE = b"{[", b'"'[0]


class _StructInfo(NamedTuple):
    names: frozenset[str]
    parts: tuple[tuple[str, StructTypes], ...]
    """Fields that hold objects of ours, or lists of them."""
    is_history: bool


class StrippedFields(msgspec.Struct):
    """The fields that are left out of one body."""

    unknown: UnknownFields
    ignored: Counter[str] = msgspec.field(default_factory=Counter)
    """Number of ignored fields, by label in `IGNORED_FIELDS`."""
    warnings: list[str] = []
    """Paths of fields of the request itself that `serve.unknown_fields: ignore` left out."""
    aliases: dict[str, str] = {}
    """Fields of ours that were sent under another name, which errors must use."""

    def strip(self, body: bytes, kind: type[RequestBody]) -> bytes:
        """Returns the body without fields that may be left out. Raises `BadRequest` for a field of
        another server that needs an unsupported feature, and the errors of the JSON decoder."""
        fields, info = _OBJECT.decode(body), _struct_info(kind)
        changed = False
        for name in [name for name in fields if name not in info.names]:
            changed |= self._translate(name, fields, kind.ECOSYSTEM)
        changed |= self._strip_object(fields, info, "")
        return msgspec.json.encode(fields) if changed else body

    def _translate(self, name: str, fields: Fields, table: Ecosystem) -> bool:
        """Handles a field that is not in the body's type according to the table; returns whether
        the table has it."""
        if name in table.accepted:
            del fields[name]
        elif name in table.means:
            target, raw = table.means[name], fields.pop(name)
            if raw != _NULL:
                if fields.get(target, _NULL) != _NULL:
                    other = self.aliases.get(target, target)
                    raise BadRequest(
                        f"{name} and {other} are two names of the same field; send one of them",
                        name,
                    )
                fields[target] = raw
                self.aliases[target] = name
        elif name in table.neutral:
            check_neutral(name, msgspec.json.decode(fields.pop(name)), table.neutral[name])
        else:
            return False
        return True

    def _strip_object(self, fields: Fields, info: _StructInfo, path: str) -> bool:
        """Strips an object; returns whether `fields` have changed."""
        changed = False
        if not info.names.issuperset(fields):
            for name in [name for name in fields if name not in info.names]:
                if info.is_history:
                    self.ignored[name if name in _LABELS else "other"] += 1
                elif self.unknown == "ignore":
                    self.warnings.append(f"{path}{name}")
                else:
                    continue
                del fields[name]
                changed = True
        for name, kinds in info.parts:
            raw = fields.get(name)
            if raw is not None and memoryview(raw)[0] in _BRACKETS:
                fields[name] = self._strip_value(raw, kinds, f"{path}{name}.")
                changed |= fields[name] is not raw
        return changed

    def _strip_value(self, raw: msgspec.Raw, kinds: StructTypes, path: str) -> msgspec.Raw:
        """Returns an object or a list without the fields that may be left out; the original if
        there are none."""
        try:
            value = _PARTS.decode(raw)
        except msgspec.ValidationError:  # a list of something else
            return raw
        changed = False
        for fields in value if isinstance(value, list) else (value,):
            kind = kinds.get(None)
            if kind is None or len(kinds) > 1:
                kind = kinds.get(_type_of(fields), kind)
            if kind is not None:
                changed |= self._strip_object(fields, _struct_info(kind), path)
        return msgspec.Raw(msgspec.json.encode(value)) if changed else raw


def _type_of(fields: Fields) -> str | None:
    raw = fields.get("type", _NULL)
    return str(msgspec.json.decode(raw)) if memoryview(raw)[0] == _QUOTE else None


@cache
def _struct_info(kind: type[msgspec.Struct]) -> _StructInfo:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType), "bodies are structs"
    names = {field.encode_name for field in info.fields}
    if info.tag_field is not None:
        names.add(info.tag_field)
    parts: dict[str, StructTypes] = {
        field.encode_name: kinds for field in info.fields if (kinds := _struct_types(field.type))
    }
    if issubclass(kind, RequestBody):
        parts |= kind.PARTS
    is_history = issubclass(kind, HistoryPart)
    return _StructInfo(frozenset(names), tuple(parts.items()), is_history)


def _struct_types(type_: msgspec.inspect.Type) -> dict[str | None, type[msgspec.Struct]]:
    """Returns the structs of a field's type, also those in a list."""
    match type_:
        case msgspec.inspect.StructType():
            return {None if type_.tag is None else str(type_.tag): type_.cls}
        case msgspec.inspect.ListType():
            return _struct_types(type_.item_type)
        case msgspec.inspect.UnionType():
            return {tag: kind for one in type_.types for tag, kind in _struct_types(one).items()}
    return {}
