"""Requests for the model nano that use every feature of a completion, singly and combined.

A token of nano is a byte; 260 ends a turn.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from swell.cluster.text.params.sampling_params import (
    RepetitionDetection,
    SamplingParams,
    StructuredOutputs,
)

STEADY = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
"""Settings that draw the same examples in every run; the engines are kept between examples."""

COUNT, UPPER = "count from 3 to 12", "upper: abcdefgh"
FRBF = "repeat 5 times: frbf"
GREET = "greet in German: Orozecud"  # "Grüß dich, Orozecud! 🍀" has characters of several bytes
PERSON = "json name, age, city: Ezasupo is 8 years old and lives in Adin."
PROMPTS = (COUNT, UPPER, GREET, PERSON, FRBF, "add: 29+81")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
FORMS = {
    "json": StructuredOutputs(json=SCHEMA),
    "regex": StructuredOutputs(regex="([A-Z][a-z]{2,4} ){3}!"),
    "choice": StructuredOutputs(choice=["Grüße aus Bern", "Grüße aus Basel", "nichts von allem"]),
    "grammar": StructuredOutputs(grammar='start: pair+\npair: /[0-9]{2}/ ", " | "é" pair'),
}


class RequestSpec(msgspec.Struct, frozen=True):
    """A request: its prompt, as one turn of a chat, and its parameters."""

    prompt: str
    params: SamplingParams

    @property
    def key(self) -> bytes:
        return msgspec.json.encode(self)


def request_spec(prompt: str, **params: Any) -> RequestSpec:
    return RequestSpec(
        prompt, SamplingParams(**{"seed": 11, "temperature": 0.0, "max_tokens": 24} | params)
    )


def drawn(prompt: str, **params: Any) -> RequestSpec:
    return request_spec(prompt, **{"temperature": 4.0} | params)


FEATURES: dict[str, RequestSpec] = {
    "greedy": request_spec(GREET, max_tokens=40),
    "temperature and seed": drawn(COUNT),
    "top_k": drawn(COUNT, top_k=4),
    "top_p": drawn(COUNT, top_p=0.7),
    "min_p": drawn(COUNT, min_p=0.1),
    "top_k, top_p and min_p": drawn(GREET, temperature=6.0, top_k=12, top_p=0.8, min_p=0.1),
    "presence_penalty": drawn(COUNT, presence_penalty=2.0),
    "frequency_penalty": request_spec(COUNT, frequency_penalty=1.5),
    "repetition_penalty": drawn(COUNT, repetition_penalty=1.5),
    "all penalties": drawn(
        GREET, presence_penalty=1.0, frequency_penalty=-0.5, repetition_penalty=1.3
    ),
    "logit_bias": request_spec(COUNT, logit_bias={ord("4"): -100.0, ord("8"): 7.5}),
    "bad_words": request_spec(COUNT, bad_words=[", 5", "3, 4, 6, "]),
    "allowed_token_ids": drawn(GREET, allowed_token_ids=[*b"rGu\xc3\xbc\x9f, ", 260]),
    "min_tokens": request_spec(UPPER, min_tokens=18),
    "min_tokens over stop strings": request_spec(COUNT, min_tokens=9, stop=["5", "7"]),
    "min_tokens over stop tokens": request_spec(COUNT, min_tokens=9, stop_token_ids=[ord(" ")]),
    "max_tokens": request_spec(COUNT, max_tokens=1),
    "stop": request_spec(COUNT, stop=["5, 6", ", 6, 8"]),
    "a stop within characters": request_spec(GREET, stop=["üß di"]),
    "a stop that almost comes": request_spec(UPPER, stop=["GHI", "FGHX"], logprobs=0),
    "a stop that is shown": request_spec(COUNT, stop=["5, 6"], include_stop_str_in_output=True),
    "stop_token_ids": request_spec(COUNT, stop_token_ids=[ord("6"), ord("7")]),
    "a stop token that is shown": request_spec(
        COUNT, stop_token_ids=[ord("6")], include_stop_str_in_output=True
    ),
    "ignore_eos": request_spec(UPPER, ignore_eos=True),
    "repetition_detection": request_spec(
        FRBF, repetition_detection=RepetitionDetection(max_pattern_size=9, min_count=3)
    ),
    "repetition_detection, min_tokens and logprobs": request_spec(
        FRBF,
        repetition_detection=RepetitionDetection(max_pattern_size=6, min_count=2),
        min_tokens=14,
        logprobs=1,
    ),
    "special tokens": request_spec(UPPER, ignore_eos=True, skip_special_tokens=False),
    "logprobs": request_spec(GREET, logprobs=3),
    "logprobs of drawn tokens": drawn(
        COUNT, seed=14, logprobs=0, stop=["2"], frequency_penalty=0.5
    ),
    "prompt_logprobs": request_spec(UPPER, prompt_logprobs=2),
    "prompt_logprobs and logprobs": drawn(COUNT, seed=14, prompt_logprobs=0, logprobs=2),
    "n": drawn(COUNT, n=3, max_tokens=16),
    "n with logprobs": drawn(GREET, n=2, logprobs=1, prompt_logprobs=1, max_tokens=12),
    "best_of": drawn(COUNT, seed=19, n=2, best_of=4, max_tokens=12),
    **{
        f"structured {kind}": drawn(GREET, seed=14, structured_outputs=form)
        for kind, form in FORMS.items()
    },
    "structured, greedy": request_spec(GREET, structured_outputs=FORMS["json"], logprobs=1),
}
"""Features, singly and combined; each one changes the answer of its request."""

_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 1.0, 2.5, 5.0]),
    "top_k": st.sampled_from([1, 5, 40]),
    "top_p": st.sampled_from([0.3, 0.8, 0.95]),
    "min_p": st.sampled_from([0.02, 0.2]),
    "seed": st.integers(-5, 2**40),
    "max_tokens": st.integers(4, 16),
    "min_tokens": st.integers(0, 4),
    "stop": st.lists(st.sampled_from(["4", ", 5", "CDE", "ü", "e", ": "]), max_size=3),
    "stop_token_ids": st.lists(st.sampled_from([ord("5"), ord("F"), 0xC3, 300]), max_size=2),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "repetition_detection": st.builds(
        RepetitionDetection,
        min_pattern_size=st.integers(0, 3),
        max_pattern_size=st.integers(3, 8),
        min_count=st.integers(2, 3),
    ),
    "n": st.just(2),
    "best_of": st.just(3),
    "presence_penalty": st.sampled_from([-1.0, 0.6, 2.0]),
    "frequency_penalty": st.sampled_from([-0.5, 1.0]),
    "repetition_penalty": st.sampled_from([0.8, 1.2, 2.0]),
    "logit_bias": st.dictionaries(
        st.sampled_from([ord("4"), ord("e"), 260]), st.sampled_from([-100.0, -2.0, 3.0, 9.0])
    ),
    "bad_words": st.lists(st.sampled_from(["4, 5", "BC", "Gr", "5", "{"]), max_size=3),
    "allowed_token_ids": st.sampled_from([[*b"0123456789, ", 260], [*b"ABCDEFGH", 259, 260]]),
    "logprobs": st.integers(0, 4),
    "prompt_logprobs": st.integers(0, 2),
    "structured_outputs": st.sampled_from(list(FORMS.values())),
}


def request_specs() -> st.SearchStrategy[RequestSpec]:
    """Returns a strategy for any combination of up to seven features."""

    @st.composite
    def request_spec_of(draw: st.DrawFn) -> RequestSpec:
        some = draw(st.sets(st.sampled_from(sorted(_FIELDS)), min_size=1, max_size=7))
        return request_spec(
            draw(st.sampled_from(PROMPTS)), **{name: draw(_FIELDS[name]) for name in some}
        )

    return request_spec_of()
