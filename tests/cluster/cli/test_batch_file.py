"""Lines of a batch file become requests or errors; missing lines of an output are found."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from swell.cluster.api.openapi.operations import OPERATIONS
from swell.cluster.cli.batch_file import (
    URLS,
    BatchError,
    InputLine,
    OutputLine,
    check_input,
    read_input,
    read_output,
)
from swell.configs.section import ConfigError

MAX_BYTES = 1000
GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def lines_of(*texts: bytes) -> list[InputLine]:
    return list(read_input(io.BytesIO(b"\n".join(texts)), MAX_BYTES))


def line(**changes: Any) -> bytes:
    fields = {**GOOD, **changes}
    return json.dumps({key: value for key, value in fields.items() if value != "absent"}).encode()


def test_a_request_is_read_as_it_is() -> None:
    raw = b'{"custom_id":"a","method":"POST","url":"/v1/score","body":{"x": 1.50,  "y":"\\u00e4"}}'
    for text in (raw, b"  " + raw + b"\r"):
        (got,) = lines_of(b"", text, b"  ")
        assert (got.number, got.custom_id, got.url, got.error) == (2, "a", "/v1/score", None)
        assert got.body == b'{"x": 1.50,  "y":"\\u00e4"}'


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("raw", "code", "param", "custom_id"),
    [
        (b"{bad", "invalid_json_line", None, None),
        (b"[]", "invalid_json_line", None, None),
        (b'"a"', "invalid_json_line", None, None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None, None),
        (b'{"custom_id": "a", "body": ' + b"[" * 900, "invalid_json_line", None, None),
        (line(custom_id="absent"), "missing_required_parameter", "custom_id", None),
        (line(custom_id=3), "missing_required_parameter", "custom_id", None),
        (line(custom_id=""), "missing_required_parameter", "custom_id", None),
        (line(body="absent"), "missing_required_parameter", "body", "a"),
        (line(method="GET"), "invalid_method", "method", "a"),
        (line(method="absent"), "invalid_method", "method", "a"),
        (line(url="/v1/chats"), "invalid_url", "url", "a"),
        (line(url=["/v1/completions"]), "invalid_url", "url", "a"),
        (line(url="/v1/responses"), "invalid_url", "url", "a"),
        (line(body={"prompt": "x", "stream": True}), "invalid_request", "body.stream", "a"),
        (line(body={"prompt": "x" * MAX_BYTES}), "line_too_long", None, None),
    ],
)
def test_a_bad_line_is_an_error_and_the_next_one_a_request(
    raw: bytes, code: str, param: str | None, custom_id: str | None
) -> None:
    first, second = lines_of(raw, line(custom_id="b"))
    assert first.error is not None
    assert (first.error.code, first.error.param, first.custom_id) == (code, param, custom_id)
    assert first.error.line == 1
    assert first.error.message.startswith("line 1: ")
    assert len(first.error.message) < 400
    assert (second.number, second.custom_id, second.error) == (2, "b", None)


def test_a_body_that_nests_too_deeply_is_an_error() -> None:
    text = b'{"custom_id": "a", "body": ' + DEEP
    (got,) = read_input(io.BytesIO(text), len(text))
    assert got.error is not None and got.error.code == "invalid_json_line"


def test_the_longest_line_is_read() -> None:
    longest = line(body={"prompt": "x" * (MAX_BYTES - len(line(body={"prompt": ""})))})
    assert len(longest) == MAX_BYTES
    for texts in ((longest, line(custom_id="b")), (longest,)):
        assert [one.error for one in lines_of(*texts)] == [None] * len(texts)


def test_other_bodies_are_left_to_the_route() -> None:
    for body in ([1], None, "x", {"stream": "yes"}, {"stream": False}, {"stream": 1}):
        assert [one.error for one in lines_of(line(body=body))] == [None]


def test_the_routes_exist() -> None:
    assert set(URLS) <= {one.path for one in OPERATIONS if one.method == "post"}


def test_a_repeated_custom_id_is_refused_by_its_line() -> None:
    texts = [line(), line(custom_id="b"), b"{bad", b"{bad", line(method="GET")]
    with pytest.raises(ConfigError, match=r"line 5 of .* custom_id='a' of line 1"):
        check_input(lines_of(*texts))
    assert len(check_input(lines_of(*texts[:4]))) == 4


def output(*lines: InputLine, status: int | None = 200) -> bytes:
    return b"".join(
        json.dumps(
            {
                "id": one.id,
                "custom_id": one.custom_id,
                "response": status and {"status_code": status, "request_id": "r", "body": {}},
                "error": None,
            }
        ).encode()
        + b"\n"
        for one in lines
    )


def test_the_complete_lines_of_an_output_are_found() -> None:
    lines = lines_of(line(), b"{bad", b"{bad", line(custom_id="b"))
    ids = check_input(lines)
    whole = output(lines[0]) + output(lines[2], status=None) + output(lines[3], status=400)
    for torn in (b"", b"{", output(lines[1])[:-1]):
        got = read_output(io.BytesIO(whole + torn), ids, "OUT")
        assert got.ids == {lines[0].id, lines[2].id, lines[3].id}
        assert (got.failed, got.size_bytes) == (2, len(whole))


@pytest.mark.parametrize("changed", [line(body={"prompt": "y"}), line(custom_id="c"), b""])
def test_the_output_of_another_input_is_refused(changed: bytes) -> None:
    before = lines_of(line(), line(custom_id="b"))
    now = check_input(lines_of(changed, line(custom_id="b")))
    with pytest.raises(ConfigError, match=r"line 2 of OUT \(custom_id='a'\) answers no line"):
        read_output(io.BytesIO(output(before[1], before[0])), now, "OUT")


def test_another_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="line 1 of OUT is not a line"):
        read_output(io.BytesIO(line() + b"\n"), set(), "OUT")


def test_an_output_line_without_a_response_has_failed() -> None:
    assert OutputLine("i", "a", error=BatchError("invalid_url", "m", 1)).failed
