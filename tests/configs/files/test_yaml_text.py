"""YAML is refused where a reader would lose some of it, or take unbounded work."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.cli.doctor.serve_file import read_source
from swell.configs.files.yaml_text import (
    MAX_DEPTH,
    MAX_NODES,
    MAX_PLAIN_CHARS,
    MAX_YAML_BYTES,
    read_yaml,
    read_yaml_file,
)
from swell.configs.schema import Config, ConfigError, load, parse_override
from tests.test_layers import ROOT

MODEL = "model: {path: m}\n"
SERVE_FILE = """
applications:
- import_path: swell.cluster.app:build
  args:
    config: m
    %s
"""


def nested(levels: int, begin: str = "[", end: str = "]") -> str:
    return begin * levels + end * levels


def laughs(first: str, holds: str) -> str:
    """Returns a "billion laughs" text: each line holds the previous one ten times."""
    lines = [f"a0: &a0 {first}"]
    for n in range(1, 10):
        lines.append(f"a{n}: &a{n} {holds % ', '.join([f'*a{n - 1}'] * 10)}")
    return "\n".join(lines)


BAD: dict[str, tuple[str, tuple[str, ...]]] = {
    # name: (the text, a part of the error)
    "a key twice": ("a: 1\nb: 2\na: 3", ("'a'", "line 3", "line 1")),
    "a key twice, deep": (
        "model:\n  path: m\n  seed: 1\n  path: n\n",
        ("'model.path'", "line 4", "line 2"),
    ),
    "a section twice": ("model: {path: m}\nserve: {}\nmodel: {path: n}", ("'model'", "line 3")),
    "a key twice in a line": ("model: {path: m, 'path': n}", ("'model.path'", "line 1")),
    "a key twice, escaped": ('{"path": 1, "p\\u0061th": 2}', ("'path'",)),
    "a key twice in a list": ("a:\n- b\n- {c: 1, c: 2}", ("'a[1].c'", "line 3")),
    "a key twice in an anchor": ("a: &x {b: 1, b: 2}", ("'a.b'",)),
    "an empty key twice": ("{'': 1, '': 2}", ("line 1",)),
    "two merges": ("a: &a {b: 1}\nc:\n  <<: *a\n  <<: *a", ("'c.<<'", "line 4", "line 3")),
    "deep lists": (nested(10_000), ("nesting depth", "line 1")),
    "deep mappings": (nested(10_000, "{a: ", "}"), (f"nested in {MAX_DEPTH}",)),
    "a deep path": ("a: " + nested(MAX_DEPTH), ("'a[0][0]",)),
    "laughs": (laughs("[x, x]", "[%s]"), (f"more than {MAX_NODES}", "aliases")),
    "merged laughs": (
        laughs("{x: 1}", "{<<: [%s]}"),
        (f"more than {MAX_NODES}", "aliases"),
    ),
    "an alias in its anchor": ("a: &a [*a]", ("'a'", "'a[0]'")),
    "an alias in its mapping": ("&a {b: {c: *a}}", ("'a'", "'b.c'")),
    "an alias without an anchor": ("a: *b", ("undefined alias",)),
    "many values": ("a: [" + "1," * MAX_NODES + "]", (f"more than {MAX_NODES}",)),
    "many keys": ("\n".join(f"k{n}: 1" for n in range(MAX_NODES)), (f"more than {MAX_NODES}",)),
    "too long": ("# " + "x" * MAX_YAML_BYTES, (f"{MAX_YAML_BYTES} bytes",)),
    "a long number": ("a: 1" + "0" * 100_000, ("'a'", f"{MAX_PLAIN_CHARS} characters")),
    "a long number of minutes": ("a: 1" + ":1" * 50_000, ("'a'", f"{MAX_PLAIN_CHARS} characters")),
    "a date that is none": ("a: 2024-13-45", ("month",)),
    "a tag": ("a: !!python/name:os.system", ("'a'", "tag")),
    "a tag of a number": ("a: !!int ''", ("'a'", "tag")),
    "a tag of a truth": ("a: !!bool x", ("'a'", "tag")),
    "a tag of a key": ("!!bool x: 1", ("tag",)),
    "a key that is a list": ("? [a]\n: 1", ("not a name",)),
    "a key that is a mapping": ("a:\n  ? {b: 1}\n  : 1", ("'a'", "not a name")),
    "two documents": ("a: 1\n---\na: 2", ("document",)),
    "no end of a text": ('a: "' + "x" * 1000, ("quoted scalar",)),
    "control characters": ("a: \x01", ("control characters",)),
}


def from_file(folder: Path, text: str) -> Any:
    path = folder / "a.yaml"
    path.write_text(text)
    return load(str(path))


def from_set(folder: Path, text: str) -> Any:
    return parse_override(f"model.path={text}")


def from_serve_file(folder: Path, text: str) -> Any:
    """Reads a file as `swell doctor` does: a file that is not a Serve file is read as a
    configuration."""
    path = folder / "a.yaml"
    path.write_text(text)
    source, _ = read_source(str(path))
    return load(source)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("read", [from_file, from_set, from_serve_file], ids=lambda f: f.__name__)
def test_a_bad_text_is_refused_in_one_line(
    read: Callable[[Path, str], Any], name: str, tmp_path: Path
) -> None:
    text, parts = BAD[name]
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    assert [part for part in parts if part not in message] == []


def test_repeated_keys_in_a_file_of_ray_serve_are_refused(tmp_path: Path) -> None:
    inner = SERVE_FILE % "serve.port: 1\n    serve.port: 2"
    path = tmp_path / "a.yaml"
    path.write_text(inner)
    with pytest.raises(ConfigError, match=r"line 7: the key 'applications\[0\]\.args\.serve\.port"):
        load(*read_source(str(path)))
    path.write_text("spec:\n  serveConfigV2: |\n" + inner.replace("\n", "\n    "))
    with pytest.raises(ConfigError, match=r"serveConfigV2.*line 7.*and in line 6"):
        read_source(str(path))


@pytest.mark.parametrize("written", ["12:30", "1:2:3", "190:20:30.15", "010", "0777", "-017", "08"])
def test_a_number_is_decimal_or_a_text(written: str) -> None:
    """YAML 1.1 would read these in base 60 or 8."""
    assert read_yaml(f"a: {written}".encode(), "it") == {"a": written}
    with pytest.raises(ConfigError, match=rf"serve\.port='{written}': Expected `int`"):
        load({"model": {"path": "m"}}, dict([parse_override(f"serve.port={written}")]))
    named = load({"model": {"path": "m"}}, dict([parse_override(f"model.name={written}")]))
    assert named.model.name == written


@given(st.integers() | st.floats(allow_nan=False))
def test_other_numbers_are_read_as_yaml_writes_them(value: float) -> None:
    assert read_yaml(yaml.safe_dump({"a": value}).encode(), "it") == {"a": value}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model: {path: 5}", "model.path=5: Expected `str`"),
        ("model: {pth: m}", "unknown key 'model.pth'"),
        ("modle: {path: m}", "unknown key 'modle'"),
        ("serve: {port: 1}", "the required key 'model' is missing"),
        ("1: a", "the key 1 is not a text"),
        ("model: {path: m, 1: 2}", "the key 1 of 'model' is not a text"),
        ("model: {path: m}\nlora: {adapters: {7: x}}", "the key 7 of 'lora.adapters'"),
        ("model: {path: m}\nserve: {on: true}", "the key True of 'serve' is not a text"),
        ("model: {path: m}\nserve: {port: 010}", "serve.port='010': Expected `int`"),
    ],
)
def test_an_error_names_the_file(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    assert str(caught.value).startswith(f"configuration {str(path)!r}: {reason}")


def test_an_error_of_an_override_does_not_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model: {path: m}")
    with pytest.raises(ConfigError) as caught:
        load(str(path), {"serve.port": "x"})
    assert str(caught.value).startswith("serve.port='x': Expected `int`")


def test_texts_within_the_limits_are_read() -> None:
    texts = {
        "a: &a {b: 1}\nc: {<<: *a, b: 2}": {"a": {"b": 1}, "c": {"b": 2}},
        "a: &a [1, 2]\nb: [*a, *a]": {"a": [1, 2], "b": [[1, 2], [1, 2]]},
        "a: {b: 1}\nc: {b: 1}": {"a": {"b": 1}, "c": {"b": 1}},
        "- {a: 1}\n- {a: 2}": [{"a": 1}, {"a": 2}],
        f"'{'x' * (MAX_PLAIN_CHARS + 1)}'": "x" * (MAX_PLAIN_CHARS + 1),
        "a: '*b'": {"a": "*b"},
        "": None,
        "# nothing": None,
    }
    for text, value in texts.items():
        assert read_yaml(text.encode(), "it") == value
    assert read_yaml(nested(MAX_DEPTH).encode(), "it")
    assert len(read_yaml(("[" + "1," * (MAX_NODES - 1) + "]").encode(), "it")) == MAX_NODES - 1
    with pytest.raises(ConfigError):
        read_yaml(("[" + "1," * MAX_NODES + "]").encode(), "it")


TEXTS = st.text("ab:&*{}[],-? \n'\"<!", max_size=40)


@given(TEXTS)
def test_a_text_is_refused_or_read_exactly(text: str) -> None:
    """A text is refused or read completely: each key of the text is in the result, and each value
    is YAML's."""
    problem, value = "", None
    try:
        value = read_yaml(text.encode(), "it")
    except ConfigError as error:
        problem = str(error)
    assert "\n" not in problem
    if not problem:
        assert value == yaml.safe_load(text)
        assert len(_keys(text)) <= _num_keys(value) or "*" in text or "<<" in text


def _keys(text: str) -> list[str]:
    found: list[str] = []

    def walk(node: Any) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                found.append(key.value)
                walk(value)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                walk(item)

    walk(yaml.compose(text, yaml.SafeLoader))
    return found


def _num_keys(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(_num_keys, value.values()))
    return sum(map(_num_keys, value)) if isinstance(value, list) else 0


def test_every_yaml_of_ours_is_within_the_limits() -> None:
    paths = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if "k8s" not in path.parts]
    assert len(paths) > 3
    for path in paths:
        read_yaml_file(path)


# ------------------------------------------------------------------------------ bounds of values


def bounds_of(kind: Any, path: str = "") -> list[tuple[str, Any]]:
    """Returns each field of the schema with its type, without the types of sections."""
    found = []
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        parts = getattr(field.type, "types", (field.type,))
        for part in parts:
            if isinstance(part, msgspec.inspect.StructType):
                found += bounds_of(part.cls, f"{path}{field.name}.")
            else:
                found.append((f"{path}{field.name}", part))
    return found


def is_bounded(kind: Any) -> bool:
    match kind:
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            low = kind.ge if kind.ge is not None else kind.gt
            return low is not None and kind.le is not None and math.isfinite(kind.le)
        case msgspec.inspect.StrType():
            return kind.max_length is not None and kind.pattern is not None
        case msgspec.inspect.ListType():
            return kind.max_length is not None and is_bounded(kind.item_type)
        case msgspec.inspect.DictType():
            parts = (kind.key_type, kind.value_type)
            return kind.max_length is not None and all(map(is_bounded, parts))
        case (
            msgspec.inspect.BoolType() | msgspec.inspect.NoneType() | msgspec.inspect.LiteralType()
        ):
            return True
    return False


OF_SEVERAL_LINES = ("model.pair_template",)


def test_each_key_has_a_bound() -> None:
    fields = bounds_of(Config)
    assert len(fields) > 60
    assert [name for name, kind in fields if not is_bounded(kind)] == []


@pytest.mark.parametrize(
    "value",
    [
        2**70,
        -(2**70),
        10**400,
        math.inf,
        -math.inf,
        math.nan,
        1e308,
        "\0",
        "\x7f",
        "x\n",
        "x" * 5000,
    ],
    ids=lambda value: repr(value)[:20],
)
def test_every_value_of_a_key_is_bounded(value: Any) -> None:
    """No key accepts an unbounded value; this covers every key of the schema, also those added
    later."""
    for name, _ in bounds_of(Config):
        if name in OF_SEVERAL_LINES and value == "x\n":
            continue
        with pytest.raises(ConfigError) as caught:
            load({"model": {"path": "m"}}, {name: value})
        assert str(caught.value).startswith(name) and "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["n" * 300, "a/" + "b" * 300, "~" + "c" * 300, "d/" * 2000])
def test_an_impossible_file_name_does_not_crash_loading(name: str) -> None:
    files = dict.fromkeys(("api_keys_file", "admin_keys_file", "chat_template"), name)
    loaded = load({"model": {"path": name}, "serve": files})
    assert loaded.model.path == name and loaded.serve.chat_template == name


def test_an_impossible_configuration_file_name_is_refused() -> None:
    for source in ("\0.yaml", "x" * 300 + ".yaml", "\udcff.yaml"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(source)


def test_deep_mappings_are_refused() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = {"a": deep}
    for source in (
        deep,
        {"model": deep},
        {"model": {"path": deep}},
        {"model": {"path": "m"}, "x": deep},
    ):
        with pytest.raises(ConfigError):
            load(source)


@pytest.mark.parametrize(
    "text", ["model: [", "model: {a: b\nc: d", "a: 'b", "a: *b", "a: \t- @", "\x00"]
)
def test_a_syntax_error_names_the_file_and_shows_no_content(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    message = str(caught.value)
    assert str(path) in message and "<" not in message and "\n" not in message
