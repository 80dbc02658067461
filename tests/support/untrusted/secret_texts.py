"""Finds the classes that hold secrets in the source code, and lists all texts into which a value
may be converted."""

from __future__ import annotations

import ast
import base64
import dataclasses
import io
import logging
import re
import traceback
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect
from rich.pretty import pretty_repr
from zmq.utils import z85

from swell.configs.runtime.log import KeyValueFormatter, StructuredLogger
from tests.test_layers import FILES, ROOT

SECRET_TYPES = frozenset({"SecretBytes", "SecretText", "TableKey"})
_WORD = re.compile(r"\w+")


class Holder(NamedTuple):
    """A class with a field or constructor parameter that holds a secret, directly or inside another
    such class."""

    file: str
    name: str
    types: frozenset[str]
    """The words in the types of its fields and constructor parameters."""

    @property
    def kind(self) -> type:
        module = import_module("swell." + self.file.removesuffix(".py").replace("/", "."))
        found = getattr(module, self.name)
        of_ray = getattr(found, "__ray_metadata__", None)
        return found if of_ray is None else of_ray.modified_class


def annotated(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields name and type of each field of a class, or of each parameter of a function. Annotated
    attributes in methods count as fields."""
    match node:
        case ast.ClassDef():
            for part in ast.walk(node):
                if isinstance(part, ast.AnnAssign):
                    target = part.target
                    name = target.attr if isinstance(target, ast.Attribute) else target.id  # type: ignore[union-attr]
                    yield name, ast.unparse(part.annotation)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            arguments = node.args
            for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                if one.annotation is not None:
                    yield one.arg, ast.unparse(one.annotation)


def annotated_nodes(file: str) -> Iterator[tuple[ast.AST, list[tuple[str, str]]]]:
    """Yields each class and function of a file with its annotated names."""
    for node in ast.walk(ast.parse(_source(file), file)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, [*annotated(node)]


def _source(file: str) -> str:
    return (ROOT / file).read_text()


@cache
def _classes(file: str) -> list[Holder]:
    """Returns the classes of a file with the words in their types."""
    classes = []
    for node, parts in annotated_nodes(file):
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                    parts += annotated(inner)
            words = frozenset(word for _, kind in parts for word in _WORD.findall(kind))
            classes.append(Holder(file, node.name, words))
    return classes


@cache
def holders() -> list[Holder]:
    """Returns all holders. Repeats the search until no class is added. Parses only files that
    contain the name of a holder, because parsing all of them takes seconds of each test process."""
    sources, names = {file: _source(file) for file in FILES}, set(SECRET_TYPES)
    while True:
        named = re.compile(rf"\b(?:{'|'.join(names)})\b")
        files = [file for file, source in sources.items() if named.search(source)]
        found = [one for file in files for one in _classes(file) if one.types & names]
        if names.issuperset(one.name for one in found):
            return found
        names.update(one.name for one in found)


# ----------------------------------------------------------------------- instances with a secret


def sample(kind: Any, secret: bytes, depth: int = 0) -> Any:
    """Returns a value of a `msgspec.inspect` type, with the secret wherever the type marks one."""
    match kind:
        case inspect.Metadata():
            if (kind.extra or {}).get("secret"):
                is_text = isinstance(kind.type, inspect.StrType)
                return secret.decode("ascii") if is_text else secret
            return sample(kind.type, secret, depth)
        case inspect.UnionType():
            parts = sorted(kind.types, key=lambda one: isinstance(one, inspect.NoneType))
            return sample(parts[0], secret, depth)
        case inspect.StructType():
            return None if depth > 6 else sample_struct(kind.cls, secret, depth + 1)
        case inspect.ListType():
            return [sample(kind.item_type, secret, depth)]
        case inspect.TupleType():
            return tuple(sample(one, secret, depth) for one in kind.item_types)
        case inspect.VarTupleType():
            return (sample(kind.item_type, secret, depth),)
        case inspect.DictType():
            return {}
        case inspect.IntType() | inspect.FloatType() | inspect.BoolType():
            return 1
        case inspect.StrType():
            return "x"
        case inspect.BytesType():
            return b"x"
    return None


def sample_struct(kind: type, secret: bytes, depth: int = 0) -> Any:
    fields = inspect.type_info(kind).fields  # type: ignore[attr-defined]
    return kind(**{field.name: sample(field.type, secret, depth) for field in fields})


def sample_dataclass(kind: Any, secret: bytes) -> Any:
    """Returns an instance with the secret. Fields may have types that cannot be built, so only
    fields with the name of a known holder are filled."""
    known = {one.name: one for one in holders()}
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):
        words = _WORD.findall(str(field.type))
        held = [known[word].kind for word in words if word in known]
        structs = [one for one in held if issubclass(one, msgspec.Struct)]
        value: Any = sample_struct(structs[0], secret) if structs else None
        object.__setattr__(made, field.name, value)
    return made


# ----------------------------------------------------------------------- texts


def encodings(secret: bytes) -> list[str]:
    """Returns all forms that a secret may have in a text. The length of the secret must be a
    multiple of 4."""
    plain = [secret.decode("latin-1"), repr(secret)[2:-1], repr(list(secret))[1:-1]]
    plain += [secret.hex(), secret.hex(":")]
    plain += [secret.hex(" "), base64.b64encode(secret).decode().rstrip("=")]
    plain += [base64.urlsafe_b64encode(secret).decode().rstrip("=")]
    plain += [base64.b32encode(secret).decode().rstrip("="), z85.encode(secret).decode()]
    return [*plain, *(text.upper() for text in plain), *(text.lower() for text in plain)]


def shows(text: str, secret: bytes) -> bool:
    return any(one in text for one in encodings(secret))


def texts_of(value: Any) -> Iterator[tuple[str, str]]:
    """Yields (way of printing, text) for each way in which `value` may be printed."""
    yield "repr", repr(value)
    yield "str", str(value)
    yield "f-string", f"{value} {value!r} {value!s:>9}"
    yield "percent", "%s %r %a" % (value, value, value)  # noqa: UP031
    yield "in a list", repr([value, (value,), {"a": value}])
    yield "rich", pretty_repr(value)
    yield "log line", logged(value)
    yield "traceback", traceback_of(value)


def logged(value: Any) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(KeyValueFormatter())
    logger = logging.getLogger("swell.test_secrets")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        log = StructuredLogger("test_secrets", always=value)
        log.warning("a line", field=value)
        log.warning(f"a line {value}")
        log.exception("an error", ValueError(value), field=[value])
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue().count("always=") == 3
    return stream.getvalue()


def traceback_of(value: Any) -> str:
    try:
        try:
            raise ValueError(value)
        except ValueError as error:
            raise RuntimeError("with", value) from error
    except RuntimeError as error:
        return "".join(traceback.format_exception(error))
