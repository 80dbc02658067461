"""Unknown fields of a body: found, and left out where they may be.

History is tolerant, requests are strict. Objects of a conversation (`HistoryPart`) come from other
programs, which add fields of their own: these are ignored and counted. At the top of a body the
table of its kind (`known_fields.py`) says what a field of another server is. Everywhere else an
unknown field stays, so that the decoder refuses it; under `serve.unknown_fields: ignore` it is
left out, and its path is kept for a warning.

Only a body in which the decoder met an unknown field is read here. Its objects are split into names
and raw values without building these, so what is kept is the very bytes that came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from swell.cluster.text.sampling_params import BadRequest
from swell.cluster.text.schema.known_fields import IGNORED_FIELDS
from swell.cluster.text.schema.request_body import HistoryPart, RequestBody, check_neutral

UnknownFields = Literal["refuse", "ignore"]
"""`serve.unknown_fields`"""
StructTypes = Mapping[str | None, type[msgspec.Struct]]
"""What a value may be: by the object's `type`, None for all others."""

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OBJECTS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_LABELS = frozenset(IGNORED_FIELDS)
_MAX_KEPT_CHARS = 64
"""Of a name that is remembered as JSON: clients make them as long as they like."""
_NULL = b"null"
_OPEN_OBJECT, _OPEN_LIST, _QUOTE = b'{["'


class StrippedFields(msgspec.Struct):
    """What was left out of a body."""

    ignored: Counter[str] = msgspec.field(default_factory=Counter)
    """By label of `IGNORED_FIELDS`."""
    warnings: list[str] = []
    """Paths of what `serve.unknown_fields: ignore` left out of the request itself."""
    aliases: dict[str, str] = {}
    """Fields of ours that were sent under another name, which refusals name."""


class _StructInfo(NamedTuple):
    names: frozenset[str]
    parts: tuple[tuple[str, StructTypes], ...]
    """Fields that hold objects of ours, or lists of them."""
    is_history: bool


class UnknownFieldFilter:
    """Of one body."""

    def __init__(self, unknown: UnknownFields, stripped: StrippedFields) -> None:
        self._unknown = unknown
        self._stripped = stripped

    def strip(self, body: bytes, kind: type[RequestBody]) -> bytes:
        """The body without what may be left out. Raises `BadRequest` for a field of another server
        that asks for what is not here, and what the JSON reader raises."""
        fields = _OBJECT.decode(body)
        names = _struct_info(kind).names
        changed = False
        for name in [name for name in fields if name not in names]:
            changed |= self._translate(name, fields, kind)
        changed |= self._strip_unknown(fields, _struct_info(kind), "")
        return _encode_object(fields) if changed else body

    def _translate(
        self, name: str, fields: dict[str, msgspec.Raw], kind: type[RequestBody]
    ) -> bool:
        """One field that the kind has not, as its table says; whether that knows it."""
        table = kind.ECOSYSTEM
        if name in table.taken:
            del fields[name]
        elif name in table.means:
            target, raw = table.means[name], fields.pop(name)
            if bytes(raw) != _NULL:
                if bytes(fields.get(target, _NULL)) != _NULL:
                    other = self._stripped.aliases.get(target, target)
                    raise BadRequest(f"{name} and {other} mean the same; send one of them", name)
                fields[target] = raw
                self._stripped.aliases[target] = name
        elif name in table.neutral:
            check_neutral(name, msgspec.json.decode(fields.pop(name)), table.neutral[name])
        else:
            return False
        return True

    def _value(self, raw: Any, kinds: StructTypes, path: str) -> Any:
        """The same value, itself where nothing of it is left out."""
        head = memoryview(raw)[0]
        if head == _OPEN_OBJECT:
            fields = _OBJECT.decode(raw)
            return _encode_object(fields) if self._object(fields, kinds, path) else raw
        if head != _OPEN_LIST:
            return raw
        try:
            items = _OBJECTS.decode(raw)
        except msgspec.ValidationError:  # a list of something else
            return raw
        changed = False
        for fields in items:
            changed |= self._object(fields, kinds, path)
        return b"[" + b",".join(map(_encode_object, items)) + b"]" if changed else raw

    def _object(self, fields: dict[str, Any], kinds: StructTypes, path: str) -> bool:
        """Whether `fields` have changed."""
        kind = kinds.get(None)
        if kind is None or len(kinds) > 1:
            kind = kinds.get(_type_of(fields), kind)
        return kind is not None and self._strip_unknown(fields, _struct_info(kind), path)

    def _strip_unknown(self, fields: dict[str, Any], shape: _StructInfo, path: str) -> bool:
        """Whether `fields` have changed."""
        changed = False
        if not shape.names.issuperset(fields):
            for name in [name for name in fields if name not in shape.names]:
                if shape.is_history:
                    self._stripped.ignored[name if name in _LABELS else "other"] += 1
                elif self._unknown == "ignore":
                    self._stripped.warnings.append(f"{path}{name}")
                else:
                    continue
                del fields[name]
                changed = True
        for name, kinds in shape.parts:
            raw = fields.get(name)
            if raw is not None:
                fields[name] = self._value(raw, kinds, f"{path}{name}.")
                changed |= fields[name] is not raw
        return changed


def _encode_object(fields: dict[str, Any]) -> bytes:
    return b"{" + b",".join([b"%b:%b" % (_key(name), raw) for name, raw in fields.items()]) + b"}"


def _key(name: str) -> bytes:
    return msgspec.json.encode(name) if len(name) > _MAX_KEPT_CHARS else _short_key(name)


@lru_cache(maxsize=1024)
def _short_key(name: str) -> bytes:
    return msgspec.json.encode(name)


def _type_of(fields: Mapping[str, msgspec.Raw]) -> str | None:
    raw = fields.get("type")
    if raw is None or memoryview(raw)[0] != _QUOTE:
        return None
    return str(msgspec.json.decode(raw))


@cache
def _struct_info(kind: type[msgspec.Struct]) -> _StructInfo:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType), "bodies are structs"
    names = {field.encode_name for field in info.fields}
    if info.tag_field is not None:
        names.add(info.tag_field)
    parts: dict[str, StructTypes] = {}
    for field in info.fields:
        if kinds := _struct_types(field.type):
            parts[field.encode_name] = kinds
    if issubclass(kind, RequestBody):
        parts |= kind.PARTS
    is_history = issubclass(kind, HistoryPart)
    return _StructInfo(frozenset(names), tuple(parts.items()), is_history)


def _struct_types(type_: msgspec.inspect.Type) -> dict[str | None, type[msgspec.Struct]]:
    """Structs of a field's type, alone or in a list."""
    match type_:
        case msgspec.inspect.StructType():
            return {None if type_.tag is None else str(type_.tag): type_.cls}
        case msgspec.inspect.ListType():
            return _struct_types(type_.item_type)
        case msgspec.inspect.UnionType():
            return {tag: kind for one in type_.types for tag, kind in _struct_types(one).items()}
    return {}
