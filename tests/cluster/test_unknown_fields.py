"""Fields that no body of ours has: another name of one, taken, refused, or as the operator says."""

from __future__ import annotations

import json

import pytest

from swell.cluster.openai.chat import ChatCompletionRequest
from swell.cluster.openai.decode import decode, read
from swell.cluster.params import BadRequest
from tests.cluster.test_request_fields import HELLO, MINIMAL


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
def test_another_servers_name_means_our_field(kind, least, name, target):
    value = True if target.startswith("include") else 1
    request = decode(json.dumps({**least, name: value}).encode(), kind)
    assert getattr(request, target) == value
    decode(json.dumps({**least, name: None, target: value}).encode(), kind)
    with pytest.raises(BadRequest) as refusal:
        decode(json.dumps({**least, name: value, target: value}).encode(), kind)
    assert name in refusal.value.message and target in refusal.value.message


@pytest.mark.parametrize(
    ("kind", "least", "name"),
    [(k, least, name) for k, least in MINIMAL for name in sorted(k.ECOSYSTEM.taken)],
)
def test_what_changes_no_answer_is_taken_whatever_its_value(kind, least, name):
    for value in (None, "x", 5, {"a": [1]}):
        decode(json.dumps({**least, name: value}).encode(), kind)


@pytest.mark.parametrize(("kind", "least"), MINIMAL)
def test_a_request_without_a_model_means_the_one_that_is_served(kind, least):
    least = {name: value for name, value in least.items() if name != "model"}
    assert decode(json.dumps(least).encode(), kind).model is None


@pytest.mark.parametrize(("kind", "least"), MINIMAL)
def test_an_unknown_name_is_refused_or_ignored_as_the_operator_says(kind, least):
    asked = json.dumps({**least, "mine": 1}).encode()
    with pytest.raises(BadRequest) as refusal:
        read(asked, kind)
    assert (refusal.value.param, refusal.value.code) == ("mine", "unknown_field")
    decoded = read(asked, kind, "ignore")
    assert decoded.findings.warnings == ["mine"]
    assert decoded.request == decode(json.dumps(least).encode(), kind)


def test_what_asks_for_what_is_not_here_is_refused_also_where_unknown_names_are_ignored():
    body = {"messages": HELLO, "use_beam_search": True, "mine": 1}
    with pytest.raises(BadRequest) as refusal:
        read(json.dumps(body).encode(), ChatCompletionRequest, "ignore")
    assert refusal.value.param == "use_beam_search"


def test_ignored_names_are_told_with_their_path():
    body = {"messages": HELLO, "stream": True, "stream_options": {"mine": 1}, "tools": []}
    decoded = read(json.dumps(body).encode(), ChatCompletionRequest, "ignore")
    assert decoded.findings.warnings == ["stream_options.mine"]
