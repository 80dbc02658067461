"""A refusal names fields as the request's API does. The rest of the message, including every value,
stays unchanged."""

from __future__ import annotations

import random

import pytest

from swell.cluster.api.responses.convert import name_of
from swell.cluster.text.errors import BadRequest, Field
from swell.cluster.text.params.field_path import join_path, rename_roots, split_path
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.params.validate_params import validate

OTHER_NAMES = rename_roots({"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty"})


def test_a_message_that_begins_with_its_field_names_it() -> None:
    error = BadRequest("max_tokens='max_tokens' must be an integer", "max_tokens", "code")
    sent = error.renamed(OTHER_NAMES)
    assert str(sent) == sent.message == "n_predict='max_tokens' must be an integer"
    assert (sent.param, sent.code) == ("n_predict", "code")


def test_a_longer_name_is_another_field() -> None:
    error = BadRequest("max_tokens_total=3 is wrong", "max_tokens")
    assert error.renamed(OTHER_NAMES).message == "max_tokens_total=3 is wrong"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"max_tokens": 3, "min_tokens": 5},
            "min_tokens=5 is above n_predict=3",
        ),
        (
            {"repetition_penalty": 500.0},
            "repeat_penalty=500.0 is out of range: 0.01 <= repeat_penalty <= 100",
        ),
    ],
)
def test_every_field_of_a_message_has_its_other_name(params: dict, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        validate(SamplingParams(**params), vocab_size=10)
    assert caught.value.renamed(OTHER_NAMES).message == message


def test_names_are_changed_more_than_once() -> None:
    error = BadRequest([Field("messages[0].content"), " beside ", Field("max_tokens")], "messages")
    here = error.renamed(OTHER_NAMES).renamed(name_of)
    assert (here.message, here.param) == ("input beside n_predict", "input")


def test_an_error_of_a_part_has_the_path_of_the_whole() -> None:
    error = BadRequest("content=5 is wrong", "content", "code").within("input[3]")
    assert error.message == "input[3]: content=5 is wrong"
    assert (error.param, error.code) == ("input[3].content", "code")
    assert BadRequest("empty").within("input[3]").param == "input[3]"


def test_a_path_consists_of_its_keys() -> None:
    generator = random.Random(0)
    for _ in range(300):
        path = generator.choice(["a", "tools"]) + "".join(
            generator.choice(["[0]", "[17]", "[...]", ".name", ".x y"]) for _ in range(4)
        )
        assert join_path(split_path(path)) == path
    assert split_path("tools[2].function.name") == ["tools", 2, "function", "name"]
