"""Fields that none of our bodies has: an alias of a field, accepted, refused, or handled as the
configuration says."""

from __future__ import annotations

import contextlib
import json
import tracemalloc

import pytest

from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.tokenize import TokenizeRequest
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.schema.decode import decode, read
from tests.cluster.api.bodies.test_request_fields import HELLO, MINIMAL


def test_zero_is_not_false():
    for name, value in (("use_beam_search", 0), ("include_reasoning", 1), ("mirostat", False)):
        with pytest.raises(BadRequest) as refusal:
            decode(json.dumps({"messages": HELLO, name: value}).encode(), ChatCompletionRequest)
        assert refusal.value.param == name
    decode(json.dumps({"messages": HELLO, "length_penalty": 1}).encode(), ChatCompletionRequest)


@pytest.mark.parametrize(
    ("kind", "least", "name", "target"),
    [(k, least, *pair) for k, least in MINIMAL for pair in k.ECOSYSTEM.means.items()],
)
def test_another_servers_name_maps_to_our_field(kind, least, name, target):
    value = {"include_stop_str_in_output": True, "cache_salt": "a"}.get(target, 1)
    request = decode(json.dumps({**least, name: value}).encode(), kind)
    assert getattr(request, target) == value
    decode(json.dumps({**least, name: None, target: value}).encode(), kind)
    with pytest.raises(BadRequest) as refusal:
        decode(json.dumps({**least, name: value, target: value}).encode(), kind)
    assert name in refusal.value.message and target in refusal.value.message


@pytest.mark.parametrize(
    ("kind", "least", "name"),
    [(k, least, name) for k, least in MINIMAL for name in sorted(k.ECOSYSTEM.accepted)],
)
def test_fields_that_change_no_answer_are_accepted_with_any_value(kind, least, name):
    for value in (None, "x", 5, {"a": [1]}):
        decode(json.dumps({**least, name: value}).encode(), kind)


@pytest.mark.parametrize(("kind", "least"), MINIMAL)
def test_a_request_without_a_model_means_the_one_that_is_served(kind, least):
    least = {name: value for name, value in least.items() if name != "model"}
    assert decode(json.dumps(least).encode(), kind).model is None


@pytest.mark.parametrize(("kind", "least"), MINIMAL)
def test_an_unknown_name_is_refused_or_ignored_as_configured(kind, least):
    payload = json.dumps({**least, "mine": 1}).encode()
    with pytest.raises(BadRequest) as refusal:
        read(payload, kind)
    assert (refusal.value.param, refusal.value.code) == ("mine", "unknown_field")
    request, stripped = read(payload, kind, "ignore")
    assert stripped.warnings == ["mine"]
    assert request == decode(json.dumps(least).encode(), kind)


def test_unsupported_features_are_refused_also_where_unknown_names_are_ignored():
    body = {"messages": HELLO, "use_beam_search": True, "mine": 1}
    with pytest.raises(BadRequest) as refusal:
        read(json.dumps(body).encode(), ChatCompletionRequest, "ignore")
    assert refusal.value.param == "use_beam_search"


def test_ignored_names_are_reported_with_their_path():
    body = {"messages": HELLO, "stream": True, "stream_options": {"mine": 1}, "tools": []}
    _, stripped = read(json.dumps(body).encode(), ChatCompletionRequest, "ignore")
    assert stripped.warnings == ["stream_options.mine"]


@pytest.mark.parametrize("kind", [ChatCompletionRequest, TokenizeRequest])
@pytest.mark.parametrize(
    "value",
    [b"1e999", b'"\xff"', *(b"[" * depth + b"]" * depth for depth in range(960, 1010, 3))],
    ids=lambda value: ascii(value[:8]) + str(len(value)),
)
def test_invalid_json_is_refused_in_ignored_fields_of_tools_too(kind, value):
    """Tools are decoded a second time, exactly as sent."""
    tool = b'{"type": "function", "function": {"name": "f", "mine": %b}}' % value
    body = b'{"messages": %b, "tools": [%b]}' % (json.dumps(HELLO).encode(), tool)
    with contextlib.suppress(BadRequest):
        decode(body, kind)


def test_long_names_are_not_kept():
    """Refusing many long field names does not retain their memory."""
    tracemalloc.start()
    try:
        for index in range(8):
            name = f"{index}{'x' * 500_000}"
            with pytest.raises(BadRequest):
                decode(
                    json.dumps({"messages": HELLO, "rid": 1, name: 1}).encode(),
                    ChatCompletionRequest,
                )
            held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 1_000_000


@pytest.mark.parametrize(
    ("fields", "param", "error"),
    [
        ({"routed_dp_rank": "x"}, "routed_dp_rank", "routed_dp_rank='x': expected"),
        ({"routed_dp_rank": -1}, "routed_dp_rank", "routed_dp_rank=-1 must be at least 0"),
        ({"n_predict": {}}, "n_predict", "n_predict={}: expected integer"),
        ({"max_new_tokens": 1, "max_completion_tokens": 2}, "max_new_tokens", "max_new_tokens=1"),
        ({"max_new_tokens": 1, "n_predict": 1}, "n_predict", "n_predict and max_new_tokens are"),
    ],
)
def test_a_refusal_names_the_field_that_was_sent(fields, param, error):
    with pytest.raises(BadRequest) as refusal:
        decode(json.dumps({"messages": HELLO, **fields}).encode(), ChatCompletionRequest)
    assert refusal.value.param == param
    assert refusal.value.message.startswith(error)
