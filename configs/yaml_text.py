"""YAML as people write it for us, read within bounds: nothing of it is lost silently.

A YAML reader takes the last of several equal keys, and an alias stands for as much as its anchor
holds: ten lines of ten aliases each are a list of ten billion. So the text is first followed event
by event, which takes no more than its length, and read if it is within the limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from swell.configs.section import ConfigError
from swell.configs.shown import shown

MAX_YAML_BYTES = 256 * 1024
MAX_DEPTH = 16
"""Levels of mappings and lists; a configuration has three."""
MAX_NODES = 10_000
"""Keys, values, mappings and lists, each alias counted as what it stands for."""
MAX_PLAIN_CHARS = 1024
"""Of a value without quotes, which may be a number: a long one takes long to read."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml_file(path: Path) -> Any:
    """Raises OSError and ConfigError."""
    with path.open("rb") as file:
        return read_yaml(file.read(MAX_YAML_BYTES + 1), f"configuration {str(path)!r}")


def read_yaml(text: bytes, what: str) -> Any:
    """What a YAML text holds. Raises ConfigError; `what` names the text there."""
    if len(text) > MAX_YAML_BYTES:
        raise ConfigError(f"{what} has more than {MAX_YAML_BYTES} bytes; at most so many are read")
    try:
        problem = next(_problems(text), None)
        if problem is None:
            return yaml.load(text, _LOADER)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that is none
        reason = " ".join(str(error).split()).replace('in "<byte string>", ', "in ")
        raise ConfigError(f"{what} is not YAML: {reason}") from None
    raise ConfigError(f"{what}, line {problem.line}: {problem.text}")


class _Problem(NamedTuple):
    line: int
    text: str


@dataclass
class _Open:
    """A mapping or a list of which the end has not come."""

    anchor: str | None
    lines: dict[str, int] | None
    """Of a mapping: where each key stands."""
    key: str | None = None
    """The key whose value comes next."""
    items: int = 0
    """Of a list: how many have come."""
    nodes: int = 1


@dataclass
class _Reader:
    """What is known of a text between two of its events."""

    open: list[_Open] = field(default_factory=list)
    anchors: dict[str, int] = field(default_factory=dict)
    """Nodes that an alias of this name stands for."""
    nodes: int = 0

    @property
    def where(self) -> str:
        """The key or the place in a list at which the text is, as `'serve.port'`."""
        path = ""
        for one in self.open:
            if one.lines is None:
                path += f"[{one.items}]"
            elif one.key is not None:
                path += f".{one.key}" if path else one.key
        return shown(path) if path else "the top"

    def count(self, nodes: int) -> None:
        """Nodes that have come; those of what is open come one by one."""
        self.nodes += nodes
        if self.open:
            self.open[-1].nodes += nodes

    def end_value(self) -> None:
        """The value of a key, or one of a list, is whole."""
        if self.open:
            self.open[-1].key = None
            self.open[-1].items += 1

    def close(self) -> None:
        ended = self.open.pop()
        if ended.anchor is not None:
            self.anchors[ended.anchor] = ended.nodes
        if self.open:
            self.open[-1].nodes += ended.nodes
        self.end_value()


def _problems(text: bytes) -> Iterator[_Problem]:
    """All that the text has; those of its syntax come as exceptions."""
    reader = _Reader()
    for event in yaml.parse(text, _LOADER):
        found = _follow(reader, event)
        if found is None and reader.nodes > MAX_NODES:
            found = (
                f"here are more than {MAX_NODES} keys and values, with what aliases stand for; at "
                "most so many are allowed"
            )
        if found is not None:
            yield _Problem(event.start_mark.line + 1, found)


def _follow(reader: _Reader, event: Any) -> str | None:
    """What is wrong with the event."""
    if isinstance(event, yaml.CollectionEndEvent):
        reader.close()
    if not isinstance(event, yaml.NodeEvent):
        return None
    if getattr(event, "tag", None) is not None:
        return f"the tag {shown(event.tag)} at {reader.where} is not supported; leave it out"
    top = reader.open[-1] if reader.open else None
    if top is not None and top.lines is not None and top.key is None:
        return _begin_key(reader, top.lines, event)
    if isinstance(event, yaml.CollectionStartEvent):
        return _begin_collection(reader, event)
    return _take_value(reader, event)


def _begin_key(reader: _Reader, lines: dict[str, int], event: Any) -> str | None:
    if not isinstance(event, yaml.ScalarEvent):
        return f"a key at {reader.where} is no name; write it as 'name: value'"
    reader.open[-1].key = event.value
    if event.value in lines:
        return (
            f"the key {reader.where} stands here and in line {lines[event.value]}; keep one of them"
        )
    lines[event.value] = event.start_mark.line + 1
    reader.count(1)
    return None


def _begin_collection(reader: _Reader, event: Any) -> str | None:
    if len(reader.open) == MAX_DEPTH:
        return f"{reader.where} is in {MAX_DEPTH} levels of mappings and lists; no more are allowed"
    reader.nodes += 1
    lines: dict[str, int] | None = {} if isinstance(event, yaml.MappingStartEvent) else None
    reader.open.append(_Open(event.anchor, lines))
    return None


def _take_value(reader: _Reader, event: Any) -> str | None:
    """A single value, or an alias."""
    nodes = 1
    if isinstance(event, yaml.AliasEvent):
        if any(one.anchor == event.anchor for one in reader.open):
            return f"the alias {shown(event.anchor)} at {reader.where} stands in its own anchor"
        nodes = reader.anchors.get(event.anchor, 1)  # the loader refuses one without an anchor
    elif not event.style and len(event.value) > MAX_PLAIN_CHARS:
        return (
            f"the value of {reader.where} has more than {MAX_PLAIN_CHARS} characters without "
            "quotes; at most so many are allowed"
        )
    elif event.anchor is not None:
        reader.anchors[event.anchor] = nodes
    reader.count(nodes)
    reader.end_value()
    return None
