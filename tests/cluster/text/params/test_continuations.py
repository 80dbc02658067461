"""The text of an answer as clients receive it: it continues the prompt, or begins a new text.

Tested with tokenizers that add a space before every text, and with others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from swell.cluster.local import LLM, SamplingParams
from swell.cluster.text.params.sampling_params import StructuredOutputs
from tests.cluster.fake_cluster import FakeCluster, Stream
from tests.model_kinds import model_kind

pytestmark = pytest.mark.slow

NAMES = ["llama2", "mistral_v3", "phi3", "gemma", "llama3", "qwen3"]
PREPENDING = ["llama2", "mistral_v3", "phi3"]
"""Kinds whose tokenizer adds a space before every text."""
CASES = [
    ("The sky", " is blue"),
    ("The ", "sky"),
    ("def f(x):", "\n    if x:\n        return x"),
    ("def f(x):\n   ", " return x"),
    ("def f(x):\n", "    return x"),
    ("Grüße 😀", " 你好, 😀🎉!"),
    ("<|user|> says", " ok"),
]
URL = "/v1/completions"


class ScriptedServer:
    """A server with scripted answers."""

    def __init__(self, cluster: FakeCluster, engine: Any, name: str) -> None:
        self.cluster = cluster
        self._engine = engine
        self.tokenizer = model_kind(name).tokenizer
        added = self.tokenizer.added_tokens_decoder
        self.special = {token_id for token_id, token in added.items() if token.special}

    def ids(self, text: str, *, special: bool = True) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def script_after(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Returns the tokens of prompt and answer, split where the answer begins."""
        head, whole = self.ids(prompt), self.ids(prompt + answer)
        if whole[: len(head)] != head:  # the split changes the tokens
            return head, self._spelled(answer)
        return head, whole[len(head) :]

    def _spelled(self, text: str) -> list[int]:
        """Returns tokens that spell a text when they follow other tokens."""
        for anchor in "|\n=x":
            head = self.ids(anchor, special=False)
            whole = self.ids(anchor + text, special=False)
            if whole[: len(head)] == head:
                return whole[len(head) :]
        raise AssertionError(f"no tokens end in {text!r} alone")

    async def post(self, url: str, script: list[int], **fields: Any) -> dict[str, Any]:
        """Returns a whole answer whose tokens are `script`."""
        self._engine.reply_with(script)
        body = {"model": "fake", "max_tokens": len(script), **fields}
        answer = await self.cluster.client.post(url, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def stream(self, script: list[int], **fields: Any) -> list[dict[str, Any]]:
        """Returns the choices of a stream's events."""
        self._engine.reply_with(script)
        body = {"model": "fake", "max_tokens": len(script), "stream": True}
        url = "/v1/chat/completions" if "messages" in fields else URL
        answer = await self.cluster.client.post(url, json={**body, **fields})
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        return [choice for event in events for choice in json.loads(event)["choices"]]


@contextlib.asynccontextmanager
async def running_server(name: str) -> AsyncIterator[ScriptedServer]:
    one = model_kind(name)
    async with FakeCluster(one.folder(), vocab_size=one.vocab_size).serving() as cluster:
        yield ScriptedServer(cluster, await cluster.join(0), name)


@pytest.mark.parametrize("name", NAMES)
def test_a_completion_continues_its_prompt(name: str) -> None:
    async def run() -> None:
        async with running_server(name) as server:
            for prompt, answer in CASES:
                ids, script = server.script_after(prompt, answer)
                for sent in (prompt, ids):
                    whole = await server.post(URL, script, prompt=sent)
                    assert whole["choices"][0]["text"] == answer
                    parts = await server.stream(script, prompt=sent)
                    assert "".join(part["text"] for part in parts) == answer

    asyncio.run(run())


@pytest.mark.parametrize("name", NAMES)
def test_an_echo_is_the_unchanged_prompt(name: str) -> None:
    async def run() -> None:
        async with running_server(name) as server:
            for prompt, answer in CASES:
                ids, script = server.script_after(prompt, answer)
                for sent in (prompt, ids):
                    shown = (
                        prompt
                        if sent is prompt
                        else server.tokenizer.decode(ids, skip_special_tokens=True)
                    )
                    fields = {"prompt": sent, "echo": True}
                    whole = await server.post(URL, script, **fields)
                    assert whole["choices"][0]["text"] == shown + answer
                    parts = await server.stream(script, **fields)
                    assert "".join(part["text"] for part in parts) == shown + answer
                alone = await server.post(URL, [0], prompt=prompt, echo=True, max_tokens=0)
                assert alone["choices"][0]["text"] == prompt

    asyncio.run(run())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_point_at_the_tokens(name: str, echo: bool) -> None:
    """A token that is a part of a character has the offset of that character. A skipped special
    token has an offset but no text."""

    def check(server: ScriptedServer, text: str, reported: dict[str, Any], ids: list[int]) -> None:
        assert len(reported["tokens"]) == len(reported["text_offset"]) == len(ids)
        chars = 0
        for token, offset, token_id in zip(
            reported["tokens"], reported["text_offset"], ids, strict=True
        ):
            assert offset >= chars
            chars = offset
            if token.startswith("bytes:"):
                named = bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
                before = named.decode(errors="ignore")
                assert text[offset : offset + len(before)] == before
                assert ord(text[offset + len(before)]) > 127
            elif token_id not in server.special or text.startswith(token, offset):
                assert text[offset : offset + len(token)] == token, (text, token, offset)

    async def run() -> None:
        async with running_server(name) as server:
            for prompt, answer in CASES:
                ids, script = server.script_after(prompt, answer)
                for sent in (prompt, ids):
                    fields = {"prompt": sent, "echo": echo, "logprobs": 1}
                    (choice,) = (await server.post(URL, script, **fields))["choices"]
                    all_ids = ids + script if echo else script
                    check(server, choice["text"], choice["logprobs"], all_ids)
                    parts = await server.stream(script, **fields)
                    reported: dict[str, list[Any]] = {"tokens": [], "text_offset": []}
                    for part in parts:
                        for column, values in reported.items():
                            values += (part["logprobs"] or {}).get(column, [])
                    assert reported == {column: choice["logprobs"][column] for column in reported}

    asyncio.run(run())


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_chat_answer_begins_a_text(name: str) -> None:
    async def run() -> None:
        async with running_server(name) as server:
            reply = [{"role": "user", "content": "How is the sky?"}]
            script = server.ids("The sky is 你好 😀", special=False)
            whole = await server.post("/v1/chat/completions", script, messages=reply, logprobs=True)
            (choice,) = whole["choices"]
            assert choice["message"]["content"] == "The sky is 你好 😀"
            reported = [bytes(one["bytes"]) for one in choice["logprobs"]["content"]]
            assert b"".join(reported).decode() == "The sky is 你好 😀"
            parts = await server.stream(script, messages=reply)
            text = "".join(part["delta"].get("content") or "" for part in parts)
            assert text == "The sky is 你好 😀"

    asyncio.run(run())


@pytest.mark.parametrize("name", NAMES)
def test_a_continued_message_keeps_its_space(name: str) -> None:
    async def run() -> None:
        async with running_server(name) as server:
            reply = [
                {"role": "user", "content": "How is the sky?"},
                {"role": "assistant", "content": "The sky"},
            ]
            _, script = server.script_after("The sky", " is blue")
            fields = {"messages": reply, "continue_final_message": True}
            whole = await server.post("/v1/chat/completions", script, **fields)
            assert whole["choices"][0]["message"]["content"] == " is blue"
            parts = await server.stream(script, **fields)
            text = "".join(part["delta"].get("content") or "" for part in parts)
            assert text == " is blue"
            echo = await server.post("/v1/chat/completions", script, **fields, echo=True)
            assert echo["choices"][0]["message"]["content"] == "The sky is blue"
            message = await server.post("/v1/messages", script, messages=reply)
            assert message["content"][0]["text"] == " is blue"

    asyncio.run(run())


@pytest.mark.parametrize("name", PREPENDING)
def test_a_text_begins_after_the_first_special_tokens(name: str) -> None:
    async def run() -> None:
        async with running_server(name) as server:
            script = server.ids("The sky", special=False)
            prompt = [server.tokenizer.bos_token_id]
            for skip in (True, False):
                whole = await server.post(URL, script, prompt=prompt, skip_special_tokens=skip)
                assert whole["choices"][0]["text"] == "The sky"
            echo = await server.post(URL, script, prompt=prompt, echo=True)
            assert echo["choices"][0]["text"] == "The sky"

    asyncio.run(run())


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_string_may_begin_with_the_first_space(name: str) -> None:
    async def run() -> None:
        async with running_server(name) as server:
            _, script = server.script_after("The sky", " is blue")
            for stop, text in ((" is", ""), (" blue", " is")):
                for stream in (False, True):
                    fields = {"prompt": "The sky", "stop": stop}
                    if stream:
                        choices = await server.stream(script, **fields)
                    else:
                        choices = (await server.post(URL, script, **fields))["choices"]
                    assert "".join(choice["text"] for choice in choices) == text
                    assert choices[-1]["stop_reason"] == stop

    asyncio.run(run())


@pytest.mark.parametrize("name", NAMES)
def test_a_structured_answer_reaches_the_client_unchanged(name: str) -> None:
    """This holds after a chat template and after a completion's prompt, whole and streamed."""

    async def run() -> None:
        async with running_server(name) as server:
            reply = [{"role": "user", "content": "How is the sky?"}]
            for regex, answer in ((" [a-z ]+", " is blue"), ("[a-z ]+", "is blue")):
                _, script = server.script_after("The sky", answer)
                form = {"structured_outputs": {"regex": regex}}
                whole = await server.post("/v1/chat/completions", script, messages=reply, **form)
                assert whole["choices"][0]["message"]["content"] == answer
                parts = await server.stream(script, messages=reply, **form)
                text = "".join(part["delta"].get("content") or "" for part in parts)
                assert text == answer
                whole = await server.post(URL, script, prompt="The sky", **form)
                assert whole["choices"][0]["text"] == answer
            schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
            script = server.script_after("|", '{"a": 1}')[1]
            for field in (
                {"response_format": schema},
                {"response_format": {"type": "json_object"}},
            ):
                whole = await server.post("/v1/chat/completions", script, messages=reply, **field)
                assert whole["choices"][0]["message"]["content"] == '{"a": 1}'

    asyncio.run(run())


@pytest.mark.parametrize("name", ["llama2", "llama3"])
@pytest.mark.parametrize("cut", [1, 3, 4, 5])
def test_a_continuation_continues_after_a_migration(name: str, cut: int) -> None:
    """A character may be split between prompt and answer, or between the two engines."""

    async def run() -> None:
        async with running_server(name) as server:
            whole = server.ids("The sky 😃😃 is blue")
            first = next(
                place
                for place in range(2, len(whole))
                if server.tokenizer.decode(whole[:place]).endswith("\ufffd")
            )
            prompt, script = whole[: first + 1], whole[first + 1 :]
            cluster = server.cluster
            await cluster.remove(0)
            cluster._script = script
            engine = await cluster.join(1, steps=cut)
            payload = {"model": "fake", "prompt": prompt, "max_tokens": len(script), "echo": True}
            payload |= {"return_token_ids": True, "ignore_eos": True}
            stream = Stream(cluster, payload)
            await stream.has(cut)
            await cluster.join(2)
            await cluster.kill(engine)
            done = await stream.done
            assert done.ids == script
            assert done.text == "The sky 😃😃 is blue"

    asyncio.run(run())


FORMS = [
    StructuredOutputs(regex=" x{1,3}"),
    StructuredOutputs(regex="x (y|z)"),
    StructuredOutputs(choice=[" yes", " no"]),
    StructuredOutputs(choice=["yes", "no"]),
    StructuredOutputs(json={"enum": [" a", {"b": 1}]}),
]


@pytest.mark.parametrize("name", ["llama2", "mistral_v3", "gemma", "llama3"])
def test_an_answer_under_a_grammar_matches_it_exactly(name: str) -> None:
    texts = {
        0: {" x", " xx", " xxx"},
        1: {"x y", "x z"},
        2: {" yes", " no"},
        3: {"yes", "no"},
    }
    with LLM(str(model_kind(name).folder()), **{"model.max_model_len": 512}) as llm:
        params = [
            SamplingParams(structured_outputs=form, max_tokens=60, temperature=1.0, seed=seed)
            for form in FORMS
            for seed in range(3)
        ]
        reply = [[{"role": "user", "content": "How is the sky?"}]] * len(params)
        outputs = [*llm.chat(reply, params), *llm.generate(["The sky"] * len(params), params)]
        for place, output in enumerate(outputs):
            form = place % len(params) // 3
            text = output.outputs[0].text
            if form in texts:
                assert text in texts[form]
            else:
                assert text[0] in '"{' and json.loads(text) in (" a", {"b": 1})


@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_offline_a_completion_continues_and_a_chat_begins(name: str) -> None:
    one = model_kind(name)
    tokenizer = one.tokenizer
    with LLM(str(one.folder()), **{"model.max_model_len": 512}) as llm:
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
        (answer,) = llm.generate("The sky", params)
        assert answer.prompt == "The sky"
        ids = answer.prompt_token_ids + answer.outputs[0].token_ids
        assert "The sky" + answer.outputs[0].text == tokenizer.decode(ids, skip_special_tokens=True)
        reply = [
            {"role": "user", "content": "How is the sky?"},
            {"role": "assistant", "content": "The sky"},
        ]
        (answer,) = llm.chat(reply, params, continue_final_message=True)
        ids = answer.prompt_token_ids
        assert tokenizer.decode(ids).endswith("The sky")
        both = tokenizer.decode(ids + answer.outputs[0].token_ids, skip_special_tokens=True)
        assert both.endswith("The sky" + answer.outputs[0].text)
        (answer,) = llm.chat(reply[:1], params)
        assert answer.outputs[0].text == tokenizer.decode(
            answer.outputs[0].token_ids, skip_special_tokens=True
        )
