"""Conversations as the chat template renders them, with transformers as the oracle."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.parsers import make_parser
from swell.cluster.text.parsers.deltas import collect
from swell.cluster.text.parsers.detection import detect_tools
from swell.cluster.text.prompt.chat_template import ChatTemplate, TemplateOptions, read_template
from swell.cluster.text.schema.chat_messages import ChatMessage
from swell.cluster.text.schema.decode import decode
from swell.cluster.text.tokens.tokenizer import load_tokenizer
from swell.configs.files.bounded_files import MAX_CONFIG_BYTES
from swell.configs.schema import ConfigError
from tests.cluster.text import tokenizers_for_tests as made
from tests.support.paths import NANO

USER = ChatMessage(role="user", content="hello")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALLED = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"place": "Bern"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
]


def chat(**fields: Any) -> ChatCompletionRequest:
    return decode(json.dumps({"model": "m", **fields}).encode(), ChatCompletionRequest)


def nano() -> ChatTemplate:
    return ChatTemplate(load_tokenizer(str(NANO)), "nano")


def test_tools_and_calls_reach_the_template_as_in_transformers() -> None:
    body = chat(messages=CALLED, tools=[TOOL])
    plain = json.loads(json.dumps(CALLED))
    plain[1]["content"] = ""
    plain[1]["tool_calls"][0]["function"]["arguments"] = {"place": "Bern"}
    expected = load_tokenizer(str(NANO)).apply_chat_template(
        plain, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    got = nano().render(body.messages, TemplateOptions(tools=body.tools or []))
    assert got == expected
    assert "sun" in got
    assert '"of a place"' in got


def test_calls_that_the_demo_template_writes_are_parsed() -> None:
    """Calls in the history and calls in an answer have the same form."""
    template = nano()
    body = chat(messages=CALLED[:2])
    text = template.render(body.messages, TemplateOptions(add_generation_prompt=False))
    refusal = text.rpartition("<|assistant|>")[2].removesuffix("<|end|>")
    parser = make_parser(detect_tools(template.text), None)
    (call,) = collect([*parser.push(refusal), *parser.flush()]).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"place": "Bern"})


def test_without_tools_the_demo_template_is_the_training_template_of_nano() -> None:
    got = nano().render([ChatMessage(role="system", content="s"), USER], TemplateOptions())
    assert got == "<|bos|><|system|>s<|end|><|user|>hello<|end|><|assistant|>"


def test_the_last_message_is_continued() -> None:
    messages = [USER, ChatMessage(role="assistant", content="I am")]
    options = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    assert nano().render(messages, options).endswith("<|assistant|>I am")


def test_a_template_of_the_request_or_of_the_server_replaces_the_models() -> None:
    tokenizer = made.chat_tokenizer()
    own = ChatTemplate(tokenizer, "m", "own {{ messages[0]['content'] }} {{ mood }}")
    assert own.render([USER], TemplateOptions(variables={"mood": "calm"})) == "own hello calm"
    assert own.render([USER], TemplateOptions(template="{{ messages|length }}")) == "1"


@pytest.mark.parametrize("name", ["tokenize", "tools", "chat_template", "messages"])
def test_variables_may_not_use_reserved_names(name: str) -> None:
    with pytest.raises(BadRequest, match=name) as caught:
        nano().render([USER], TemplateOptions(variables={name: 1}))
    assert caught.value.param == "chat_template_kwargs"


def test_the_error_of_a_template_names_its_source() -> None:
    with pytest.raises(BadRequest, match="this request's chat template rejects") as caught:
        nano().render([USER], TemplateOptions(template="{% if %}"))
    assert caught.value.param == "chat_template"


def test_the_file_of_a_template_is_read_within_bounds(tmp_path: Path) -> None:
    """A fifo would block its reader, and a device can be read without end."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "latin").write_bytes(b"\xe9")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    why = {
        "fifo": "not a regular file",
        "huge": str(MAX_CONFIG_BYTES),
        "latin": "utf-8",
        "no": "No",
    }
    for name, reason in why.items():
        path = str(tmp_path / name)
        with pytest.raises(ConfigError, match=f"serve.chat_template='{path}' .*{reason}"):
            read_template(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_template("/dev/zero")
    (tmp_path / "good").write_bytes("é{{ messages }}".encode())
    assert read_template(str(tmp_path / "good")) == "é{{ messages }}"


PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content[0].type == 'image' %} {% endif %}"
    "{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}\n{% endfor %}"
)
"""A template that reads contents only as lists of parts."""
EITHER = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}\n{% endfor %}"
)


def test_a_template_that_reads_only_parts_gets_parts() -> None:
    messages = [
        ChatMessage(role="system", content="be kind"),
        ChatMessage(role="user", content="what is {{ 7 }}?"),
        ChatMessage(role="assistant", content=""),
        USER,
    ]
    tokenizer = made.chat_tokenizer()
    oracle = tokenizer.apply_chat_template(
        [{"role": m.role, "content": [{"type": "text", "text": m.text}]} for m in messages],
        chat_template=PARTS,
        tokenize=False,
    )
    assert "what is {{ 7 }}?" in oracle
    assert ChatTemplate(tokenizer, "m", PARTS).render(messages, TemplateOptions()) == oracle
    asked = TemplateOptions(template=PARTS)
    assert ChatTemplate(tokenizer, "m").render(messages, asked) == oracle


def test_a_template_may_be_in_the_file_of_a_processor(tmp_path: Path) -> None:
    """Models that read images have it there, in older folders."""
    shutil.copytree(NANO, folder := tmp_path / "model")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    moved = ChatTemplate(load_tokenizer(str(folder)), "m")
    assert moved.render([USER], TemplateOptions()) == nano().render([USER], TemplateOptions())


def test_a_template_that_reads_both_gets_strings() -> None:
    text = ChatTemplate(made.chat_tokenizer(), "m", EITHER).render([USER], TemplateOptions())
    assert text.rstrip() == "user:hello"


def test_control_tokens_in_parts_are_text() -> None:
    """Only texts of the client are changed to find its control tokens, not the types of parts."""
    tokenizer = made.chat_tokenizer()
    template = ChatTemplate(tokenizer, "m", PARTS)
    control = tokenizer.all_special_tokens[0]
    messages = [ChatMessage(role="user", content=f"a {control} b text")]
    text = template.render(messages, TemplateOptions())
    found = template.own_segments(text, messages, TemplateOptions())
    assert found is not None
    assert not any(one.token for one in found[1])
