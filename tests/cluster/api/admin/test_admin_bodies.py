"""The admin API accepts a body whole and exactly, or refuses it by name. A refusal changes nothing.
Routes and fields are read from the application, so a new route is tested here too."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from swell.cluster.api.admin.admin_routes import _MAX_BODY_BYTES
from swell.cluster.api.admin.change_requests import MAX_PATH_CHARS
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.schema.strict_json import MAX_DEPTH, check_strict
from swell.configs.schema import Config
from tests.cluster.api.admin.admin_server import (
    GETS,
    POSTS,
    ROUTES,
    AdminRoute,
    AdminServer,
    admin_routes,
    admin_server,
    types_of,
)
from tests.configs.files.test_yaml_text import bounds_of

pytestmark = pytest.mark.slow

FIELDS = [(route, field) for route in POSTS for field in route.fields]
LIMIT = _MAX_BODY_BYTES
DEEP = 10_000
NO_JSON = ("NaN", "Infinity", "-Infinity", "nan", "undefined", "'1'", "01", "+1", "1.", ".5", "0x1")
BEYOND = ("1e400", "-1e400", "9" * 400, "9" * 5000, "1" + "0" * 60_000, "1e" + "9" * 5000)
NEVER = ('""', '"1"', '"x"', "[]", "[1]", '"\\ud800"', '"' + "x" * 60_000 + '"')
WRONG: dict[type, tuple[str, ...]] = {
    # Values that every admin field of this type refuses.
    inspect.IntType: (
        *("true", "false", "{}", "1.0", "1e0", "1.5", "-1", "-0.0", "2147483648"),
        *(str(2**63), str(2**70), str(-(2**70)), "1e300", "5e-324"),
    ),
    inspect.FloatType: ("true", "false", "{}", "-1", "-5e-324", "1e300", str(2**70), "14401"),
    inspect.DictType: ("true", "1", "1.5", "0", "{}"),
    inspect.StrType: (
        *("true", "1", "1.5", "{}", '"m"', '"m/../n"', '"/m/../n"', '"/.."', '"~/m"', '" /m"'),
        *(r'"/a\u0000"', r'"/a\nb"', r'"/\u202e"', '"/' + "x" * MAX_PATH_CHARS + '"'),
    ),
    inspect.LiteralType: ("true", "{}", "0", "3", "-1", "1.0", "1e0", str(2**70), "1e300"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminServer]:
    with admin_server(tmp_path_factory.mktemp("model")) as running:
        yield running


def names(field: inspect.Field) -> str:
    return field.name


by_route = pytest.mark.parametrize("route", POSTS, ids=lambda route: route.path)
by_field = pytest.mark.parametrize(
    ("route", "field"), FIELDS, ids=[f"{route.path} {field.name}" for route, field in FIELDS]
)


def test_the_list_of_admin_routes_is_complete(server: AdminServer) -> None:
    assert admin_routes(server.cluster.ingress.app.routes) == ROUTES
    assert len(POSTS) >= 5 and len(GETS) >= 3 and FIELDS


@by_route
def test_a_valid_body_is_accepted(server: AdminServer, route: AdminRoute) -> None:
    """A valid body is accepted. Otherwise the invalid ones might be refused for another reason."""
    method = route.path.rpartition("/")[2]
    for body in (route.valid(), "\ufeff" + route.valid(), f" {route.valid()}\n"):
        assert server.post(route.path, body).status_code == 202
        assert server.changes() == [method]


@by_field
def test_a_repeated_field_is_refused_by_name(
    server: AdminServer, route: AdminRoute, field: inspect.Field
) -> None:
    name = field.name
    value = route.valid(**{name: "null"}) if not field.required else route.valid()
    sample = json.dumps(json.loads(value)[name])
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in name)
    for other in (name, escaped):
        for second in (sample, "null", "7", "[]"):
            body = f'{{"{name}":{sample},{value[1:-1]},"{other}":{second}}}'
            error = server.refused(server.post(route.path, body))
            assert (error.param, error.code) == (name, "repeated_field")
            assert f"'{name}'" in error.message


@by_field
def test_a_wrong_value_is_refused_with_field_and_value(
    server: AdminServer, route: AdminRoute, field: inspect.Field
) -> None:
    wrong = {value for kind in types_of(field) - {inspect.NoneType} for value in WRONG[kind]}
    null = () if inspect.NoneType in types_of(field) else ("null",)
    for value in [*sorted(wrong), *NEVER, *null]:
        error = server.refused(server.post(route.path, route.valid(**{field.name: value})))
        assert field.name in error.message, value[:40]
        assert (error.param or "").split(".")[0] == field.name, value[:40]
    for value in BEYOND:
        error = server.refused(server.post(route.path, route.valid(**{field.name: value})))
        assert error.param == field.name or error.code == "request_too_large"
    for value in NO_JSON:
        error = server.refused(server.post(route.path, route.valid(**{field.name: value})))
        assert error.code in ("invalid_json", "invalid_type")


@by_field
def test_deep_values_are_refused_by_path(
    server: AdminServer, route: AdminRoute, field: inspect.Field
) -> None:
    for begin, end, inner in (("[", "]", "[0]"), ('{"a":', "}", ".a")):
        for levels in (MAX_DEPTH, 900, 60_000 // len(begin + end)):
            value = (
                begin * levels + "1" + end * levels if end == "}" else begin * levels + end * levels
            )
            error = server.refused(server.post(route.path, route.valid(**{field.name: value})))
            assert error.code == "too_deep" and f" {MAX_DEPTH} " in error.message
            assert error.param == field.name + inner * (MAX_DEPTH - 1)


@by_route
def test_an_unknown_field_is_refused_by_name(server: AdminServer, route: AdminRoute) -> None:
    near = [name for field in route.fields for name in (field.name.upper(), f"{field.name} ")]
    for name in [*near, "x", "", "__proto__", "a.b", "[0]", "\u0000", "\u0435ngines", "x" * 60_000]:
        body = (
            route.valid()[:-1].rstrip(",")
            + ("," if route.valid() != "{}" else "")
            + f"{json.dumps(name)}:1}}"
        )
        error = server.refused(server.post(route.path, body))
        assert error.code == "unknown_field"
        assert repr(name[:20])[1:-1] in error.message


NOT_A_BODY: dict[str, bytes] = {
    "null": b"null",
    "list": b"[]",
    "text": b'"x"',
    "number": b"1",
    "truth": b"true",
    "no JSON": b"engines=1",
    "half": b'{"engines":',
    "two": b"{}{}",
    "behind": b"{} x",
    "comment": b"{} // x",
    "trailing comma": b'{"engines":1,}',
    "UTF-16": '{"engines":1}'.encode("utf-16"),
    "two marks": b"\xef\xbb\xbf" * 2 + b"{}",
    "a mark alone": b"\xef\xbb\xbf",
    "invalid UTF-8": b'{"engines":"\xff"}',
    "invalid UTF-8 in a name": b'{"\xff":1,"\xff":2}',
    "overlong UTF-8": b'{"\xc0\xae":1}',
    "surrogate name": b'{"\\ud800":1,"\\ud800":2}',
    "NUL": b"\0{}",
    "lists": b"[" * DEEP,
    "objects": b'{"a":' * DEEP,
    "closed": b"]" * DEEP + b"}" * DEEP,
    "quotes": b'"' * 60_000,
    "escapes": b'"' + b"\\" * 60_000,
    "many values": b"[" + b"1," * 30_000 + b"1]",
    "many objects": b"[" + b"{}," * 20_000 + b"{}]",
    "many slow numbers": b"[" + b"1e300," * 10_000 + b"1]",
    "many names": b"{" + b",".join(b'"k%d":1' % n for n in range(5000)) + b"}",
}


@by_route
@pytest.mark.parametrize("name", NOT_A_BODY)
def test_an_invalid_body_is_refused(server: AdminServer, route: AdminRoute, name: str) -> None:
    error = server.refused(server.post(route.path, NOT_A_BODY[name]))
    assert error.type == "invalid_request_error" and error.message


@by_route
def test_a_missing_body_is_refused_where_a_field_is_required(
    server: AdminServer, route: AdminRoute
) -> None:
    """An empty body is accepted if all fields have defaults (`sleep`) or if there are no fields
    (`pause`, `resume`)."""
    for body in (b"", b" \n"):
        answer = server.post(route.path, body)
        if any(field.required for field in route.fields):
            assert "empty" in server.refused(answer).message
        else:
            assert answer.status_code == 202 and len(server.changes()) == 1


@by_route
def test_a_long_body_is_refused_before_it_is_read(server: AdminServer, route: AdminRoute) -> None:
    padded = route.valid().encode() + b" " * LIMIT
    parts = (padded[at : at + 1000] for at in range(0, len(padded), 1000))
    packed = {"content_encoding": "gzip"}
    for answer in (
        server.post(route.path, padded),
        server.post(route.path, parts),  # without a Content-Length
        server.post(route.path, gzip.compress(padded), **packed),
        server.post(route.path, gzip.compress(bytes(2**24)), **packed),
    ):
        assert f" {LIMIT} bytes" in server.refused(answer, 413).message
    exact = route.valid().encode().ljust(LIMIT)
    assert server.post(route.path, exact).status_code == 202
    assert len(server.changes()) == 1


@by_route
@pytest.mark.parametrize(
    "kind",
    [
        *("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "*/*"),
        *("application/jsonp", "application/json, text/plain", "text/plain; application/json"),
        *("application/ json", "application/json\t,x", "text/json", "json"),
    ],
)
def test_only_json_is_read(server: AdminServer, route: AdminRoute, kind: str) -> None:
    answer = server.post(route.path, route.valid(), content_type=kind)
    assert "'application/json'" in server.refused(answer, 415).message


@by_route
def test_a_repeated_content_type_is_refused(server: AdminServer, route: AdminRoute) -> None:
    for kinds in (("application/json", "text/plain"), ("text/plain", "application/json")):
        headers = [("content-type", kind) for kind in kinds]
        answer = server.client.post(route.path, content=route.valid(), headers=headers)
        assert "2 times" in server.refused(answer, 415).message
    answer = server.client.post(route.path, content=route.valid())
    server.refused(answer, 415)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_parameters_in_the_query_are_refused_by_name(
    server: AdminServer, route: AdminRoute
) -> None:
    path = route.path.replace("{id}", "x")
    content = route.valid() if route.method == "POST" else None
    headers = {"content-type": "application/json"} if content else {}
    for query in ("engines=1&engines=2", "engines=1", "%65ngines", "a=%ff", "=1", "a" * 5000):
        answer = server.client.request(
            route.method, f"{path}?{query}", content=content, headers=headers
        )
        error = server.refused(answer)
        assert error.code == "unknown_field" and "query parameter" in error.message


IDS = (
    *("-1", "0", str(2**70), "\u0663", "x" * 7000, "a b", "%", "a%2Fb", "..%2fcluster", "%2e%2e"),
    *("%00", "%ff", "%ud800", "%0d%0aset-cookie:x", "a;b", "a//b", "%2F", "%F0%9F%98%80"),
)


@pytest.mark.parametrize("route", [one for one in ROUTES if "{" in one.path], ids=lambda r: r.path)
@pytest.mark.parametrize("id", IDS)
def test_a_path_with_an_unknown_id_is_refused(
    server: AdminServer, route: AdminRoute, id: str
) -> None:
    path = "".join(
        part if "}" not in part else id + part.partition("}")[2] for part in route.path.split("{")
    )
    answer = server.client.request(route.method, path)
    error = server.refused(answer, 404)
    assert "\r" not in error.message and "set-cookie" not in answer.headers


# ------------------------------------------------------------------------- the configuration


UPGRADES = [(route, field) for route, field in FIELDS if inspect.DictType in types_of(field)]


def config_error(server: AdminServer, config: str) -> Any:
    route, field = UPGRADES[0]
    return server.refused(server.post(route.path, route.valid(**{field.name: config})))


def test_exactly_one_route_accepts_a_configuration() -> None:
    assert [(route.path, field.name) for route, field in UPGRADES] == [("/admin/upgrade", "config")]


@pytest.mark.parametrize("section", Config.__struct_fields__)
def test_repeated_keys_of_a_configuration_are_refused(server: AdminServer, section: str) -> None:
    for body, path in (
        (f'{{"model":{{"path":"/m"}},"{section}":{{}},"{section}":{{}}}}', f"config.{section}"),
        (f'{{"{section}":{{"a":1,"a":1}},"model":{{"path":"/m"}}}}', f"config.{section}.a"),
    ):
        error = config_error(server, body)
        assert error.code == "repeated_field"
        assert error.param == (path if section != "model" or "a" in path[-1:] else "config.model")


@pytest.mark.parametrize(
    "value",
    ["1e300", "1e400", str(2**70), '"\\u0000"', '"' + "x" * 5000 + '"', "[[[[]]]]", '{"a":[{}]}'],
)
def test_every_key_of_a_configuration_has_a_bound(server: AdminServer, value: str) -> None:
    for name, _ in bounds_of(Config):
        *sections, key = name.split(".")
        tree: dict[str, Any] = {"model": {"path": "/m"}}
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {"path": "/m"} if section == "model" else {})
        inner[key] = "VALUE"
        written = json.dumps(tree).replace('"VALUE"', value)
        error = config_error(server, written)
        unknown = (name, value) == ("drafts.model", '{"a":[{}]}')  # here a section is allowed
        path = f"config.{name}.a" if unknown else f"config.{name}"
        assert error.param.removesuffix("[0]") == path, value
        assert error.message.startswith("config" if unknown else path)


@pytest.mark.parametrize(
    ("config", "param"),
    [
        ('{"modell":{"path":"/m"}}', "config.modell"),
        ('{"model":{"path":"/m","Path":"/n"}}', "config.model.Path"),
        ('{"model":{}}', "config.model.path"),
        ('{"model":null}', "config.model"),
        ('{"model":[["path","/m"]]}', "config.model"),
        ('{"model":{"path":"/m"},"scheduler":null}', "config.scheduler"),
        ('{"parallel":{"data":2}}', "config.model"),
        ('{"model":"*a"}', "config.model"),
    ],
)
def test_an_invalid_configuration_is_refused_with_its_key(
    server: AdminServer, config: str, param: str
) -> None:
    error = config_error(server, config)
    assert error.param == param and error.code == "invalid_config"
    assert param.rpartition(".")[2] in error.message


def test_rules_between_keys_hold(server: AdminServer) -> None:
    config = '{"model":{"path":"/m"},"cluster":{"min_engines":9,"max_engines":2}}'
    error = config_error(server, config)
    assert error.param == "config" and "cluster.min_engines=9" in error.message


PATHS = {
    "taken": ("/m", "/a/b.c/d-e", "owner/name", "Owner_1/name-2.5", "name", "/..m", "a..b/c"),
    "refused": (
        *("../m", "/m/../../etc", "./m", "~/m", "~root/m", "a/b/c", "m/", ".hidden", "a/.b", "/.."),
        *(
            "http://h/m",
            "s3://b/m",
            "file:///m",
            "a\\b",
            "a b",
            "\u0430/b",
            "-x",
            "owner/..",
            " /m",
        ),
    ),
}


@pytest.mark.parametrize("path", PATHS["refused"])
def test_a_path_that_depends_on_where_it_is_read_is_refused(server: AdminServer, path: str) -> None:
    error = config_error(server, json.dumps({"model": {"path": path}}))
    assert error.param == "config.model.path" and repr(path) in error.message
    assert "absolute path" in error.message


@pytest.mark.parametrize("path", PATHS["taken"])
def test_absolute_paths_and_hub_ids_are_accepted(server: AdminServer, path: str) -> None:
    route, field = UPGRADES[0]
    body = route.valid(**{field.name: json.dumps({"model": {"path": path}})})
    assert server.post(route.path, body).status_code == 202
    assert server.changes() == ["upgrade"]


def test_yaml_only_syntax_is_plain_text(server: AdminServer) -> None:
    """JSON lacks aliases and merge keys: YAML syntax is a plain name or text here."""
    assert config_error(server, '{"model":{"path":"/m"},"<<":"*a"}').param == "config.<<"
    assert config_error(server, '{"model":{"path":"*a"}}').param == "config.model.path"


# ------------------------------------------------------------------------- the reader itself


class Pairs(list):  # type: ignore[type-arg]
    """The fields of an object as pairs, possibly with repeated names."""


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\{[:,]}\u00e9', max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(st.tuples(st.text('ab"\\:', max_size=2), inner), max_size=3).map(Pairs)
    ),
    max_leaves=12,
)


def written(value: Any, escape: bool) -> str:
    match value:
        case Pairs():
            fields = (
                f"{json.dumps(name, ensure_ascii=escape)} : {written(part, escape)}"
                for name, part in value
            )
            return "{ " + " , ".join(fields) + " }"
        case list():
            return "[" + ",".join(written(part, escape) for part in value) + "]"
    return json.dumps(value, ensure_ascii=escape)


def repeats(value: Any) -> bool:
    if isinstance(value, Pairs):
        names = [name for name, _ in value]
        return len(set(names)) < len(names) or any(repeats(part) for _, part in value)
    return isinstance(value, list) and any(map(repeats, value))


@given(VALUES, st.booleans())
def test_exactly_repeated_fields_are_refused(value: Any, escape: bool) -> None:
    body = written(value, escape).encode()
    refused = False
    try:
        check_strict(body)
    except BadRequest as error:
        refused = True
        assert error.code == "repeated_field"  # noqa: PT017
    assert refused == repeats(value)


@given(VALUES, st.integers(0, 200), st.sampled_from('"\\,:{}[]a '))
def test_a_decodable_text_cannot_hide_a_repeated_field(value: Any, at: int, char: str) -> None:
    """This also holds for a damaged text that is still valid JSON."""
    text = written(value, escape=True)
    body = text[: at % (len(text) + 1)] + char + text[at % (len(text) + 1) :]
    try:
        found = json.loads(body, object_pairs_hook=Pairs)
        check_strict(body.encode())
    except (ValueError, BadRequest):
        return
    assert not repeats(found)
