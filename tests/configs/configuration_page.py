"""Writes `docs/reference/configuration.md` from the docstrings of `configs/`.

python -m tests.configs.configuration_page
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import NODEFAULT
from msgspec import inspect as kinds

from swell.configs.schema import Config
from swell.configs.section import MAX_INTEGER
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "configuration.md"
HEAD = """# Configuration keys

This page is for people who configure a cluster: every key of the YAML file, its values, its default
and its meaning. It is written from the docstrings of `configs/` by
`python -m tests.configs.configuration_page`, and `tests/configs/test_configuration_page.py` checks
it. An unknown key is refused, and so is a value outside its bounds. `swell serve CONFIG --set
section.key=value` changes one key.
"""


def page() -> str:
    return HEAD + "".join(
        f"\n## `{name}`\n\n| key | values | default | meaning |\n|---|---|---|---|\n"
        + "".join(f"{row}\n" for row in rows(section))
        for name, section in sections()
    )


def sections() -> Iterator[tuple[str, type]]:
    """Yields the name and the type of each section, and of the sections inside it."""
    for section in msgspec.structs.fields(Config):
        yield section.name, section.type
        for field in msgspec.structs.fields(section.type):
            inner = kinds.type_info(field.type)
            parts = inner.types if isinstance(inner, kinds.UnionType) else (inner,)
            for part in parts:
                if isinstance(part, kinds.StructType):
                    yield f"{section.name}.{field.name}", part.cls


def rows(section: type) -> list[str]:
    meanings = docstrings(section)
    info = kinds.type_info(section)
    assert isinstance(info, kinds.StructType)
    return [
        f"| `{field.name}` | {values(field.type)} | {default(field)}"
        f" | {meanings.get(field.name, '')} |"
        for field in info.fields
    ]


def docstrings(section: type) -> dict[str, str]:
    """Returns the docstring of each field that has one, as a cell of a table."""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if not kind.__module__.startswith("swell.configs."):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in pairwise(tree.body):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = cell(text)
    return found


def cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def values(kind: kinds.Type) -> str:
    """Describes the allowed values of a key."""
    match kind:
        case kinds.UnionType(types=types):
            return " or ".join(values(one) for one in types if not isinstance(one, kinds.NoneType))
        case kinds.LiteralType(values=names):
            return ", ".join(f"`{name}`" for name in names)
        case kinds.BoolType():
            return "`true`, `false`"
        case kinds.IntType():
            return f"integer{bounds(kind)}"
        case kinds.FloatType():
            return f"number{bounds(kind)}"
        case kinds.StrType():
            return "text"
        case kinds.ListType(item_type=item):
            return f"list: {values(item)}"
        case kinds.StructType():
            return "its keys are below"
        case kinds.DictType(key_type=key, value_type=value):
            return f"mapping: {values(key)} to {values(value)}"
    raise NotImplementedError(kind)


def bounds(kind: kinds.IntType | kinds.FloatType) -> str:
    signs = (("&ge;", kind.ge), (">", kind.gt), ("&le;", kind.le), ("<", kind.lt))
    found = [
        f"{sign} {int(number) if number == int(number) else number}"
        for sign, number in signs
        if number not in (None, MAX_INTEGER)
    ]
    return " " + ", ".join(found) if found else ""


def default(field: kinds.Field) -> str:
    if field.default is not NODEFAULT:
        return shown(field.default)
    return "required" if field.default_factory is NODEFAULT else shown(field.default_factory())


def shown(value: Any) -> str:
    return "none" if value is None else f"`{json.dumps(msgspec.to_builtins(value))}`"


if __name__ == "__main__":
    PAGE.write_text(page())
