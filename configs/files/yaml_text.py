"""Reads YAML that people write for Swell, with limits; duplicate keys are refused.

A YAML reader keeps the last of several equal keys, and an alias counts as much as its anchor: ten
lines of ten aliases each can expand to ten billion nodes. Therefore the text is first parsed event
by event, which costs no more than its length, and is loaded only if it is within the limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from swell.configs.error_text import shown
from swell.configs.section import ConfigError

MAX_YAML_BYTES = 256 * 1024
MAX_DEPTH = 16
"""Maximum nesting of mappings and lists; a configuration has three levels."""
MAX_NODES = 10_000
"""Maximum number of keys, values, mappings and lists. An alias counts as many as its anchor
holds."""
MAX_PLAIN_CHARS = 1024
"""Maximum length of an unquoted value, which may be a number: parsing a long number is slow."""

_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE):  # type: ignore[misc]
    """Reads numbers as PyYAML does, except those of YAML 1.1 in base 8 (`010`) and 60 (`12:30`),
    which YAML 1.2 does not have: these are texts."""

    yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in forms if not tag.endswith((":int", ":float"))]
        for first, forms in _BASE.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    [*"-+0123456789"],
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"([-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    [*"-+.0123456789"],
)


def read_yaml_file(path: Path) -> Any:
    """Reads a YAML file. Raises OSError and ConfigError."""
    with path.open("rb") as file:
        return read_yaml(file.read(MAX_YAML_BYTES + 1), f"configuration {str(path)!r}")


def read_yaml(text: bytes, what: str) -> Any:
    """Parses a YAML text. Raises ConfigError, whose message calls the text `what`."""
    if len(text) > MAX_YAML_BYTES:
        raise ConfigError(f"{what} has more than {MAX_YAML_BYTES} bytes, the limit; shorten it")
    try:
        problem = next(_problems(text), None)
        if problem is None:
            return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date or number
        reason = " ".join(str(error).split()).replace('in "<byte string>", ', "in ")
        raise ConfigError(f"{what} is not YAML: {reason}") from None
    raise ConfigError(f"{what}, line {problem.line}: {problem.text}")


class _Problem(NamedTuple):
    line: int
    text: str


@dataclass
class _Open:
    """A mapping or a list whose end event has not come yet."""

    anchor: str | None
    lines: dict[str, int] | None
    """For a mapping: key -> line number. None for a list."""
    key: str | None = None
    """The key of the mapping whose value comes next."""
    items: int = 0
    """Number of completed elements, for a list."""
    nodes: int = 1


@dataclass
class _Reader:
    """The state of the parser between two events."""

    open: list[_Open] = field(default_factory=list)
    anchors: dict[str, int] = field(default_factory=dict)
    """Anchor -> number of nodes that an alias to it stands for."""
    nodes: int = 0

    @property
    def where(self) -> str:
        """The key or list index of the current position, such as `'serve.port'`."""
        path = ""
        for one in self.open:
            if one.lines is None:
                path += f"[{one.items}]"
            elif one.key is not None:
                path += f".{one.key}" if path else one.key
        return shown(path) if path else "the top level"

    def count(self, nodes: int) -> None:
        """Adds to the number of nodes, of the text and of the innermost open collection."""
        self.nodes += nodes
        if self.open:
            self.open[-1].nodes += nodes

    def end_value(self) -> None:
        """Marks the current value of a mapping or a list as complete."""
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
    """Yields all problems of the text. Syntax errors are raised as exceptions."""
    reader = _Reader()
    for event in yaml.parse(text, _Loader):
        found = _follow(reader, event)
        if found is None and reader.nodes > MAX_NODES:
            found = (
                f"up to here there are more than {MAX_NODES} keys and values (aliases count as "
                "what they refer to), which is the limit; shorten the text"
            )
        if found is not None:
            yield _Problem(event.start_mark.line + 1, found)


def _follow(reader: _Reader, event: Any) -> str | None:
    """Updates the state with an event. Returns what is wrong with the event, or None."""
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
        return f"a key at {reader.where} is not a name; write it as 'name: value'"
    reader.open[-1].key = event.value
    if event.value in lines:
        return (
            f"the key {reader.where} occurs here and in line {lines[event.value]}; keep one of them"
        )
    lines[event.value] = event.start_mark.line + 1
    reader.count(1)
    return None


def _begin_collection(reader: _Reader, event: Any) -> str | None:
    if len(reader.open) == MAX_DEPTH:
        return f"{reader.where} is nested in {MAX_DEPTH} mappings and lists, which is the limit"
    reader.nodes += 1
    lines: dict[str, int] | None = {} if isinstance(event, yaml.MappingStartEvent) else None
    reader.open.append(_Open(event.anchor, lines))
    return None


def _take_value(reader: _Reader, event: Any) -> str | None:
    """Handles a scalar value or an alias."""
    nodes = 1
    if isinstance(event, yaml.AliasEvent):
        if any(one.anchor == event.anchor for one in reader.open):
            return f"the alias {shown(event.anchor)} at {reader.where} is inside its own anchor"
        nodes = reader.anchors.get(event.anchor, 1)  # the loader refuses an alias without an anchor
    elif not event.style and len(event.value) > MAX_PLAIN_CHARS:
        return (
            f"the value of {reader.where} has more than {MAX_PLAIN_CHARS} characters without "
            "quotes, which is the limit; put it in quotes"
        )
    elif event.anchor is not None:
        reader.anchors[event.anchor] = nodes
    reader.count(nodes)
    reader.end_value()
    return None
