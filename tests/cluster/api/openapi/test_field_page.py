"""`docs/reference/fields.md` agrees with the code, and each of its rows is tested."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from swell.cluster.api.bodies.generation_body import STRUCTURED_OUTPUT_ALIASES
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.schema.decode import decode
from tests.cluster.api.bodies.field_lists import ROUTES, SERVERS
from tests.cluster.api.openapi.field_page import KINDS, PAGE, PATHS, does, names, page

LEAST: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
}
ODD: list[Any] = ["something", 12345, {"a": [1]}, [1.5]]
"""Values of several types. No field accepts all of them."""


def rows() -> list[tuple[str, str, str, str]]:
    """Returns the rows of the page: (route, field, servers, what Swell does)."""
    found = []
    for route in ROUTES:
        _, _, behind = PAGE.read_text().partition(f"## `{PATHS[route]}`\n")
        table, _, _ = behind.partition("\n## ")
        cells = re.findall(r"^\| `([^`]+)` \| ([^|]*) \| ([^|]*) \|$", table, re.MULTILINE)
        found += [(route, *row) for row in cells]
    return found


ROWS = rows()


def test_the_page_is_made_from_the_code() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.cluster.api.openapi.field_page"


def test_every_field_of_every_server_has_its_row() -> None:
    for route in ROUTES:
        listed = {field: servers for r, field, servers, _ in ROWS if r == route}
        assert set(listed) == set(names(route))
        for server, fields in SERVERS.items():
            assert {name for name, of in listed.items() if server in of} == fields[route]
            assert len(fields[route]) > 15


def send(route: str, **fields: Any) -> Any:
    return decode(json.dumps({**LEAST[route], **fields}).encode(), KINDS[route])


def outcome(route: str, **fields: Any) -> str | None:
    """Sends the fields and returns the field that the refusal names, or None if all were
    accepted."""
    try:
        send(route, **fields)
    except BadRequest as error:
        return str(error.param)
    return None


@pytest.mark.parametrize(("route", "name", "_servers", "says"), ROWS)
def test_a_row_agrees_with_the_decoder(route: str, name: str, _servers: str, says: str) -> None:
    required = name in LEAST[route]
    assert (outcome(route, **{name: None}) is None) != required
    odd = [outcome(route, **{name: value}) for value in ODD]
    if says == "accepted":
        assert odd == [None] * len(ODD) or _typed(route, name)
    elif says.startswith("refused"):
        assert odd == [name] * len(ODD) or _typed(route, name)
        assert all(one is None or one.startswith(name) for one in odd)
        assert any(odd)
        for value in re.findall("`([^`]+)`", says):
            assert outcome(route, **{name: json.loads(value)}) is None
    elif says == "served":
        assert name in KINDS[route].__struct_fields__
        assert any(odd) or name in ("model", "user")
    else:
        _check_meaning(route, name, re.findall("`([^`]+)`", says)[0])


def _typed(route: str, name: str) -> bool:
    """Returns whether the field has a type of its own and so refuses some values."""
    fields = {field.name: field for field in msgspec.structs.fields(KINDS[route])}
    return name in fields and fields[name].type is not Any


def _check_meaning(route: str, name: str, target: str) -> None:
    own, _, form = target.partition(".")
    if form:
        value: Any = {"json_object": True, "choice": ["a"]}.get(form, "a")
        assert getattr(send(route, **{name: value}).forms()[name], form) == value
        assert STRUCTURED_OUTPUT_ALIASES[name] == form
        return
    value = {"include_stop_str_in_output": True, "cache_salt": "a"}.get(own, 1)
    request = send(route, **{name: value})
    assert getattr(request, own) == value or request.answer_max_tokens() == value


def test_an_unknown_field_has_no_row() -> None:
    with pytest.raises(KeyError):
        does("chat", "mine")
    assert outcome("chat", mine=1) == "mine"
