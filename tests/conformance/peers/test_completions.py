"""`/v1/completions`: after vLLM's test_completion.py and its neighbours, and SGLang's
test_openai_server.py."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.conformance.in_process_server import MODEL
from tests.conformance.peers.conftest import Post
from tests.conformance.peers.differences import differs
from tests.conformance.peers.requests import COMPLETIONS, events, ok, refused

pytestmark = pytest.mark.slow

ZEROS = [0, 0, 0, 0, 0]


def test_single_completion(client: openai.OpenAI) -> None:
    """vLLM test_completion.py::test_single_completion"""
    answer = client.completions.create(
        model=MODEL,
        prompt="Hello, my name is",
        max_tokens=5,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    (choice,) = answer.choices
    assert answer.id and choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (17, 5)
    assert answer.usage.total_tokens == 22


def test_prompt_of_token_ids(client: openai.OpenAI) -> None:
    """vLLM test_completion.py::test_single_completion: its second half reads an absent field"""
    answer = client.completions.create(model=MODEL, prompt=ZEROS, max_tokens=5, temperature=0)
    assert answer.choices[0].text
    assert answer.choices[0].prompt_logprobs is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_side(post: Post, side: str) -> None:
    """vLLM test_completion.py::test_completion_truncation_side_controls_prompt_truncation"""
    prompt = list(range(65, 73))
    body = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True}
    answer = ok(post(COMPLETIONS, **body, truncate_prompt_tokens=4, truncation_side=side))
    kept = prompt[-4:] if side == "left" else prompt[:4]
    assert answer["choices"][0]["prompt_token_ids"] == kept
    assert answer["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize(("requested", "least", "most"), [(0, 1, 1), (1, 1, 2), (5, 5, 6)])
def test_logprobs(post: Post, requested: int, least: int, most: int) -> None:
    """vLLM test_completion.py::test_zero_logprobs, test_some_logprobs"""
    answer = ok(post(COMPLETIONS, prompt=ZEROS, max_tokens=5, logprobs=requested, ignore_eos=True))
    found = answer["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == len(found["tokens"]) == len(found["text_offset"]) == 5
    assert all(least <= len(top) <= most for top in found["top_logprobs"])


def test_no_logprobs(post: Post) -> None:
    """vLLM test_completion.py::test_no_logprobs"""
    answer = ok(post(COMPLETIONS, prompt=ZEROS, max_tokens=5, logprobs=None))
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_logprobs(post: Post, stream: bool) -> None:
    """vLLM test_completion.py::test_too_many_completion_logprobs"""
    error = refused(post(COMPLETIONS, prompt=ZEROS, logprobs=21, stream=stream))
    assert error["param"] == "logprobs"
    assert ok(post(COMPLETIONS, prompt=ZEROS, max_tokens=1))


@pytest.mark.parametrize("requested", [0, 1, None])
def test_prompt_logprobs(post: Post, requested: int | None) -> None:
    """vLLM test_completion.py::test_prompt_logprobs_completion"""
    more = {} if requested is None else {"prompt_logprobs": requested}
    answer = ok(post(COMPLETIONS, prompt=["A robot", "My name"], max_tokens=2, **more))
    for choice in answer["choices"]:
        if requested is None:
            assert choice["prompt_logprobs"] is None
        else:
            assert len(choice["prompt_logprobs"]) == 7 and choice["prompt_logprobs"][0] is None


def test_streaming(client: openai.OpenAI) -> None:
    """vLLM test_completion.py::test_completion_streaming"""
    options: dict[str, Any] = {"model": MODEL, "prompt": "What is it?", "temperature": 0}
    options |= {"max_tokens": 5, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**options).choices[0].text
    chunks = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    assert "".join(choice.text for choice in chunks) == whole
    assert [choice.finish_reason for choice in chunks if choice.finish_reason] == ["length"]
    assert chunks[-1].finish_reason == "length" and chunks[-1].text


def test_parallel_sampling(post: Post) -> None:
    """vLLM test_completion.py::test_parallel_no_streaming"""
    body = {"prompt": "What", "n": 3, "max_tokens": 50, "seed": 42, "temperature": 1.0}
    answer = ok(post(COMPLETIONS, **body, logprobs=0))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    assert all(choice["finish_reason"] for choice in answer["choices"])


def test_parallel_sampling_streamed(post: Post) -> None:
    """vLLM test_completion.py::test_parallel_streaming"""
    body = {"prompt": "What", "n": 3, "max_tokens": 50, "seed": 42, "temperature": 1.0}
    whole = [choice["text"] for choice in ok(post(COMPLETIONS, **body))["choices"]]
    texts, ends = [""] * 3, [0] * 3
    for chunk in events(post(COMPLETIONS, **body, stream=True)):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert texts == whole and ends == [1, 1, 1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"include_usage": False},
        {"include_usage": False, "continuous_usage_stats": False},
        {"include_usage": True, "continuous_usage_stats": False},
        {"include_usage": True, "continuous_usage_stats": True},
    ],
)
def test_stream_options(post: Post, options: dict[str, bool]) -> None:
    """vLLM test_completion.py::test_completion_stream_options"""
    body = {"prompt": "What is it?", "max_tokens": 5, "ignore_eos": True, "stream": True}
    chunks = events(post(COMPLETIONS, **body, stream_options=options))
    if not options.get("include_usage"):
        assert all(chunk.get("usage") is None for chunk in chunks)
        return
    *chunks, last = chunks
    assert last["choices"] == []
    for chunk in chunks if options["continuous_usage_stats"] else []:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if not options["continuous_usage_stats"]:
        assert all(chunk["usage"] is None for chunk in chunks)
    assert last["usage"]["completion_tokens"] == 5 and last["usage"]["total_tokens"] == 16


@pytest.mark.parametrize("name", ["include_usage", "continuous_usage_stats"])
@pytest.mark.parametrize("value", [True, None])
def test_stream_options_need_a_stream(post: Post, name: str, value: bool | None) -> None:
    """vLLM test_completion.py::test_completion_stream_options: its last four requests"""
    refused(post(COMPLETIONS, prompt="hi", stream_options={name: value}))


@pytest.mark.parametrize("prompt", ["Hello, my name is", ZEROS])
@pytest.mark.parametrize("n", [1, 2])
def test_batches(post: Post, prompt: Any, n: int) -> None:
    """vLLM test_completion.py::test_batch_completions"""
    body = {"prompt": [prompt, prompt], "max_tokens": 5, "n": n, "stream": True}
    texts = [""] * (2 * n)
    for chunk in events(post(COMPLETIONS, **body)):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    whole = ok(post(COMPLETIONS, **body | {"stream": False}))
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert texts[:n] == texts[n:]


@differs("vllm test_completion.py::test_batch_completions[use_beam_search]")
def test_beam_search(post: Post) -> None:
    """vLLM test_completion.py::test_batch_completions"""
    ok(post(COMPLETIONS, prompt="hi", n=2, use_beam_search=True))


@pytest.mark.parametrize("requested", [0, 1])
@pytest.mark.parametrize("prompt", ["Hello, my name is", ZEROS])
def test_echo_with_logprobs(post: Post, prompt: Any, requested: int) -> None:
    """vLLM test_completion.py::test_echo_logprob_completion"""
    body = {"prompt": prompt, "max_tokens": 5, "echo": True, "logprobs": requested}
    (choice,) = ok(post(COMPLETIONS, **body, ignore_eos=True))["choices"]
    found = choice["logprobs"]
    assert choice["text"].startswith(prompt if isinstance(prompt, str) else "\0" * 5)
    assert len(found["text_offset"]) == len(found["tokens"]) == len(prompt) + 5
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert all(max(requested, 1) <= len(top) <= requested + 1 for top in found["top_logprobs"][1:])


@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_stand_while_a_stop_holds_text_back(post: Post, stream: bool) -> None:
    """vLLM test_completion_text_offset.py"""
    body = {"prompt": "<|user|>upper: abcde<|end|><|assistant|>", "max_tokens": 5, "logprobs": 0}
    answer = post(COMPLETIONS, **body, stop=["\n\n\n\n"], stream=stream)
    parts = events(answer) if stream else [ok(answer)]
    found = [part["choices"][0]["logprobs"] for part in parts]
    assert [one for part in found if part for one in part["tokens"]] == list("ABCDE")
    assert [at for part in found if part for at in part["text_offset"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("logprobs", [None, 5])
@pytest.mark.parametrize("echo", [False, True])
def test_all_together(
    post: Post, echo: bool, logprobs: int | None, many: bool, n: int, ids: bool, stream: bool
) -> None:
    """SGLang test_openai_server.py::test_completion, test_completion_stream"""
    text = "The capital of France is"
    prompt: Any = list(text.encode()) if ids else text
    body = {"prompt": [prompt] * 2 if many else prompt, "n": n, "echo": echo}
    body |= {"logprobs": logprobs, "max_tokens": 4, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = post(COMPLETIONS, **body)
    parts = events(answer) if stream else [ok(answer)]
    count = n * (1 + many)
    texts = [""] * count
    for choice in [choice for part in parts for choice in part["choices"]]:
        texts[choice["index"]] += choice["text"]
        if logprobs and not stream:
            assert all(len(top) > 0 for top in choice["logprobs"]["top_logprobs"][1:])
    assert len(set(texts)) == 1 and texts[0].startswith(text) == echo
    usage = parts[-1]["usage"]
    assert usage["prompt_tokens"] == len(text) * (1 + many)
    assert usage["completion_tokens"] == 4 * count


def test_token_ids_are_returned(post: Post) -> None:
    """vLLM test_return_token_ids.py::test_basic_completion_with_emoji"""
    prompt = "emojis: 🚀"
    body = {"prompt": prompt, "max_tokens": 10, "ignore_eos": True}
    (choice,) = ok(post(COMPLETIONS, **body, return_token_ids=True))["choices"]
    assert bytes(choice["prompt_token_ids"]).decode() == prompt
    assert len(choice["token_ids"]) == 10
    (choice,) = ok(post(COMPLETIONS, **body, return_token_ids=False))["choices"]
    assert choice["token_ids"] is None and choice["prompt_token_ids"] is None


def test_token_ids_agree_with_logprobs(post: Post) -> None:
    """vLLM test_return_token_ids.py::test_comparison_with_prompt_logprobs_and_logprobs"""
    body = {"prompt": "Hello!", "max_tokens": 6, "ignore_eos": True, "logprobs": 1}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = ok(post(COMPLETIONS, **body, echo=True, prompt_logprobs=1))["choices"]
    ids = [int(text.removeprefix("token_id:")) for text in choice["logprobs"]["tokens"]]
    assert ids == choice["prompt_token_ids"] + choice["token_ids"]
    chunks = [chunk["choices"][0] for chunk in events(post(COMPLETIONS, **body, stream=True))]
    assert chunks[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    streamed = [one for chunk in chunks for one in chunk["token_ids"] or ()]
    names = [one for chunk in chunks for one in (chunk["logprobs"] or {}).get("tokens", ())]
    assert streamed == choice["token_ids"]
    assert names == [f"token_id:{one}" for one in streamed]


def test_tokens_in_tokens_out(post: Post) -> None:
    """vLLM test_token_in_token_out.py::test_token_in_token_out_and_logprobs"""
    ids = list(b"Hello, world!")
    body = {"prompt": ids, "max_tokens": 5, "echo": True, "return_token_ids": True}
    (choice,) = ok(post(COMPLETIONS, **body))["choices"]
    assert choice["prompt_token_ids"] == ids and 0 < len(choice["token_ids"]) <= 5


@differs("vllm test_completion_with_prompt_embeds.py")
def test_prompt_embeddings(post: Post) -> None:
    """vLLM test_completion_with_prompt_embeds.py"""
    ok(post(COMPLETIONS, prompt=None, prompt_embeds="AAAA"))


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_prompt(post: Post, stream: bool) -> None:
    """vLLM test_completion.py, as lm-eval sends it: `echo` with `max_tokens: 0`"""
    body = {"prompt": "Hello", "echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
    answer = post(COMPLETIONS, **body)
    parts = events(answer) if stream else [ok(answer)]
    assert "".join(part["choices"][0]["text"] for part in parts) == "Hello"


def test_ignore_eos(post: Post) -> None:
    """SGLang test_openai_server_ignore_eos.py::test_ignore_eos"""
    body = {"prompt": "<|user|>upper: abc<|end|><|assistant|>", "max_tokens": 20}
    plain, forced = (ok(post(COMPLETIONS, **body, ignore_eos=one)) for one in (False, True))
    assert plain["choices"][0]["finish_reason"] == "stop"
    assert plain["usage"]["completion_tokens"] < forced["usage"]["completion_tokens"] == 20
    assert forced["choices"][0]["finish_reason"] == "length"


def test_penalties(post: Post) -> None:
    """SGLang test_openai_server.py::test_penalty"""
    for name in ("frequency_penalty", "presence_penalty"):
        assert ok(post(COMPLETIONS, prompt="hi", max_tokens=8, **{name: 1.0}))


def test_cached_tokens(post: Post) -> None:
    """SGLang test_cache_report.py::test_cache_report_openai"""
    prompt = "a prompt that nothing else has sent " * 4
    counts = [
        ok(post(COMPLETIONS, prompt=prompt, max_tokens=1))["usage"]["prompt_tokens_details"]
        for _ in range(2)
    ]
    assert counts[0]["cached_tokens"] == 0 < counts[1]["cached_tokens"] < len(prompt)
