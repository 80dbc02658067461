"""Unknown fields of a body: found, and left out where they may be.

History is tolerant, requests are strict. Objects of a conversation (`HistoryPart`) come from other
programs, which add fields of their own: these are ignored and counted. At the top of a body the
table of its kind (`ecosystem.py`) says what a field of another server is. Everywhere else an
unknown field stays, so that the decoder refuses it; under `serve.unknown_fields: ignore` it is
left out, and its path is kept for a warning.

Only a body in which the decoder met an unknown field is read here. Its objects are split into names
and raw values without building these, so what is kept is the very bytes that came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import msgspec

from swell.cluster.openai.base import HistoryPart, RequestBody, check_neutral
from swell.cluster.openai.ecosystem import IGNORED_FIELDS
from swell.cluster.params import BadRequest

UnknownFields = Literal["refuse", "ignore"]
"""`serve.unknown_fields`"""
Kinds = Mapping[str | None, type[Any]]
"""What may stand at a place: by the object's `type`, None for all others."""

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_LABELS = frozenset(IGNORED_FIELDS)
_NULL = b"null"


class Findings(msgspec.Struct):
    """What was left out of a body."""

    ignored: Counter[str] = msgspec.field(default_factory=Counter)
    """By label of `IGNORED_FIELDS`."""
    warnings: list[str] = []
    """Paths of what `serve.unknown_fields: ignore` left out of the request itself."""


class _Shape(NamedTuple):
    names: frozenset[str]
    parts: Mapping[str, Kinds]
    """Fields that hold objects of ours, or lists of them."""


class Sifter:
    """Of one body."""

    def __init__(self, unknown: UnknownFields, findings: Findings) -> None:
        self._unknown = unknown
        self._findings = findings

    def sift(self, body: bytes, kind: type[RequestBody]) -> bytes:
        """The body without what may be left out. Raises `BadRequest` for a field of another server
        that asks for what is not here, and what the JSON reader raises."""
        fields = _OBJECT.decode(body)
        shape = _shape(kind)
        unknown = [name for name in fields if name not in shape.names]
        for name in unknown:
            self._translate(name, fields, kind)
        return self._rewritten(fields, kind, "")

    def _translate(
        self, name: str, fields: dict[str, msgspec.Raw], kind: type[RequestBody]
    ) -> None:
        """One field that the kind has not, as its table says."""
        table = kind.ECOSYSTEM
        if name in table.taken:
            del fields[name]
        elif name in table.means:
            target, raw = table.means[name], fields.pop(name)
            if bytes(raw) == _NULL:
                return
            if bytes(fields.get(target, _NULL)) != _NULL:
                raise BadRequest(f"{name} and {target} mean the same; send one of them", name)
            fields[target] = raw
        elif name in table.neutral:
            check_neutral(name, msgspec.json.decode(fields.pop(name)), table.neutral[name])

    def _value(self, raw: msgspec.Raw, kinds: Kinds, path: str) -> Any:
        head = bytes(memoryview(raw)[:1])
        if head == b"{":
            return self._object(raw, kinds, path)
        if head != b"[":
            return raw
        items = _LIST.decode(raw)
        kept = [
            self._object(item, kinds, f"{path}[{index}]")
            if bytes(memoryview(item)[:1]) == b"{"
            else item
            for index, item in enumerate(items)
        ]
        if all(new is old for new, old in zip(kept, items, strict=True)):
            return raw
        return b"[" + b",".join(kept) + b"]"

    def _object(self, raw: msgspec.Raw, kinds: Kinds, path: str) -> Any:
        """The same object, itself where nothing of it is left out."""
        fields = _OBJECT.decode(raw)
        kind = kinds.get(_type_of(fields), kinds.get(None))
        if kind is None:
            return raw
        before = dict(fields)
        rewritten = self._rewritten(fields, kind, path)
        unchanged = len(before) == len(fields) and all(
            fields[name] is value for name, value in before.items()
        )
        return raw if unchanged else rewritten

    def _rewritten(self, fields: dict[str, Any], kind: type[Any], path: str) -> bytes:
        """`fields` are changed in place; their text."""
        shape = _shape(kind)
        for name in [name for name in fields if name not in shape.names]:
            where = f"{path}.{name}" if path else name
            if issubclass(kind, HistoryPart):
                self._findings.ignored[name if name in _LABELS else "other"] += 1
            elif self._unknown == "ignore":
                self._findings.warnings.append(where)
            else:
                continue
            del fields[name]
        for name, kinds in shape.parts.items():
            if name in fields:
                where = f"{path}.{name}" if path else name
                fields[name] = self._value(fields[name], kinds, where)
        return b"{" + b",".join(b"%b:%b" % (_key(name), raw) for name, raw in fields.items()) + b"}"


def _key(name: str) -> bytes:
    return msgspec.json.encode(name)


def _type_of(fields: Mapping[str, msgspec.Raw]) -> str | None:
    raw = fields.get("type")
    if raw is None or bytes(memoryview(raw)[:1]) != b'"':
        return None
    return str(msgspec.json.decode(raw))


@cache
def _shape(kind: type[Any]) -> _Shape:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType), "bodies are structs"
    names = {field.encode_name for field in info.fields}
    if info.tag_field is not None:
        names.add(info.tag_field)
    parts: dict[str, Kinds] = {}
    for field in info.fields:
        if kinds := _kinds(field.type):
            parts[field.encode_name] = kinds
    if issubclass(kind, RequestBody):
        parts |= kind.PARTS
    return _Shape(frozenset(names), parts)


def _kinds(type_: msgspec.inspect.Type) -> dict[str | None, type[Any]]:
    """Structs of a field's type, alone or in a list."""
    match type_:
        case msgspec.inspect.StructType():
            return {None if type_.tag is None else str(type_.tag): type_.cls}
        case msgspec.inspect.ListType():
            return _kinds(type_.item_type)
        case msgspec.inspect.UnionType():
            return {tag: kind for one in type_.types for tag, kind in _kinds(one).items()}
    return {}
