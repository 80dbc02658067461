"""The form of a history that each template reads: nothing of it is left out."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.text.prompt.chat_template import ChatTemplate, TemplateOptions
from swell.cluster.text.prompt.history_form import arguments_of
from swell.cluster.text.schema.decode import decode
from tests.cluster.text import tokenizers_for_tests as made
from tests.model_kinds import MODEL_KINDS, model_kind

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALLING = [name for name in MODEL_KINDS if model_kind(name).tools is not None]
FIRST_CALL_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ONE_CALL_OR_NONE = FIRST_CALL_ONLY.replace(
    "{% if m.tool_calls %}",
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('only single tool-calls at once!') }}{% endif %}",
)
CONCATENATED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}"
    "{{ c.function.name + '=' + c.function.arguments + ';' }}{% endfor %}{% endfor %}"
)
"""DeepSeek V3.1 concatenates the arguments."""
INSERTED = CONCATENATED.replace("+", "~")
"""An object does not fail here, but is written as Python does: `{'at': 'east'}`."""
TEXT_OR_CALLS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content %}{{ m.content }}"
    "{% else %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endif %}{% endfor %}"
)
THOUGHT_OR_TEXT = (
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking with tool calls!') }}{% endif %}"
    "{{ m.content or m.thinking }}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
"""The rule of gpt-oss."""
FIRST_SYSTEM_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and loop.first %}[system]{{ m.content }}"
    "{% elif m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
"""The rule of gpt-oss and MiniMax M2."""
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
"""The rule of Qwen 3.5."""


def user(text: str = "hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def called(text: str | None, *arguments: Any, first_id: int = 12345) -> dict[str, Any]:
    calls = [
        {
            "id": f"call{first_id + index}",
            "type": "function",
            "function": {"name": "look", "arguments": one},
        }
        for index, one in enumerate(arguments)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(text: str, id: int = 12345) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{id}", "name": "look", "content": text}


def written(template: ChatTemplate, *messages: Any) -> str:
    body = {"messages": messages, "tools": [TOOL]}
    request = decode(json.dumps(body).encode(), ChatCompletionRequest)
    options = TemplateOptions(tools=request.tools or (), add_generation_prompt=False)
    return template.render(request.messages, options)


def by(source: str) -> ChatTemplate:
    return ChatTemplate(made.chat_tokenizer(), "m", source)


def kind(name: str) -> ChatTemplate:
    return ChatTemplate(model_kind(name).tokenizer, name)


@pytest.mark.parametrize("name", CALLING)
def test_results_are_written_in_the_order_of_their_calls(name: str) -> None:
    """Many templates write results without ids, so their order says whose results they are."""
    before = [user(), called(None, '{"at": "east"}', '{"at": "west"}')]
    results = [result("east is dry"), result("west is wet", 12346)]
    in_order = written(kind(name), *before, *results)
    assert written(kind(name), *before, *reversed(results)) == in_order
    assert in_order.index("east is dry") < in_order.index("west is wet")


@pytest.mark.parametrize("ids", [(12345, 12345), (12346, 1), (12346, 12346)])
def test_results_with_ambiguous_ids_stay_in_their_order(ids: tuple[int, int]) -> None:
    before = [user(), called(None, '{"at": "east"}', '{"at": "west"}')]
    results = [result("RES1", ids[0]), result("RES2", ids[1])]
    text = written(kind("qwen3"), *before, *results)
    assert text.index("RES1") < text.index("RES2")


@pytest.mark.parametrize("arguments", ['{"at": "east"}', json.dumps('{"at": "east"}')])
@pytest.mark.parametrize("name", CALLING)
def test_arguments_in_a_string_are_the_object_in_it(name: str, arguments: str) -> None:
    assert "east" in written(kind(name), user(), called(None, arguments), result("RES"))


def test_arguments_as_text_and_as_object() -> None:
    assert arguments_of('{"a":1}') == ('{"a":1}', {"a": 1})
    assert arguments_of(json.dumps('{"a":1}')) == ('{"a":1}', {"a": 1})
    assert arguments_of('{"ü": 1, "b": "cut') == ('{"ü": 1}', {"ü": 1})
    assert arguments_of(json.dumps('{"a": 1, "b": "cut')) == ('{"a": 1}', {"a": 1})
    for none in ("", "null", '"words"', "[1]", '""'):
        assert arguments_of(none) == ("{}", {})


@pytest.mark.parametrize("source", [FIRST_CALL_ONLY, ONE_CALL_OR_NONE])
def test_a_template_that_reads_one_call_gets_one_per_message(source: str) -> None:
    text = written(
        by(source),
        user(),
        called(None, '{"at": "east"}', '{"at": "west"}'),
        result("wet", 12346),
        result("dry"),
    )
    assert text == (
        '[user]hi[assistant]look{"at": "east"}[tool]dry[assistant]look{"at": "west"}[tool]wet'
    )


@pytest.mark.parametrize("source", [CONCATENATED, INSERTED])
def test_a_template_that_concatenates_arguments_gets_text(source: str) -> None:
    parallel = called("so", '{"at":"east"}', '{"at": "cut')
    text = written(by(source), user(), parallel, result("dry"), result("wet", 12346))
    assert text == '[user]hi[assistant]solook={"at":"east"};look={};[tool]dry[tool]wet'


def test_a_template_that_reads_text_or_calls_gets_two_messages() -> None:
    text = written(by(TEXT_OR_CALLS), user(), called("so", '{"at": "east"}'), result("dry"))
    assert text == '[user]hi[assistant]so[assistant]look{"at": "east"}[tool]dry'


def test_a_template_that_refuses_reasoning_with_text_and_calls_gets_two_messages() -> None:
    message = {**called("so", '{"at": "east"}'), "reasoning_content": "hm"}
    text = written(by(THOUGHT_OR_TEXT), user(), message, result("dry"))
    assert text == '[user]hi[assistant]so[assistant]hm{"at": "east"}[tool]dry'


@pytest.mark.parametrize("source", [FIRST_SYSTEM_ONLY, SYSTEM_FIRST])
def test_a_template_that_reads_one_system_message_gets_one(source: str) -> None:
    system, late = ({"role": role, "content": role[:3]} for role in ("system", "developer"))
    assert written(by(source), system, user(), late, user("yo")) == (
        "[system]sys\n\ndev[user]hi[user]yo"
    )
    assert written(by(source), user(), late) == "[system]dev[user]hi"
    assert written(by(source), system, user()) == "[system]sys[user]hi"


def test_a_template_that_reads_all_system_messages_gets_them_in_their_places() -> None:
    every = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    system, late = ({"role": "system", "content": text} for text in ("one", "two"))
    text = written(by(every), system, user(), late, user("yo"))
    assert text == "[system]one[user]hi[system]two[user]yo"


CALLS_WITHOUT_TEXT = ("llama3", "mistral_v3", "mistral_v7")
"""Templates that leave out the text of a message with calls, as published."""


def random_history(draw: random.Random, *, calls: bool, text_and_calls: bool) -> tuple[Any, Any]:
    """Returns random turns, the last one of a user, and all texts in them."""
    texts: list[str] = []

    def text() -> str:
        texts.append(f"word{len(texts):03d}")
        return texts[-1]

    messages: list[dict[str, Any]] = []
    for turn in range(draw.randint(1, 3)):
        if draw.random() < 0.4:
            messages.append({"role": draw.choice(["system", "developer"]), "content": text()})
        messages.append(user(text()))
        if draw.random() < 0.3:
            messages.append({"role": "system", "content": text()})
        if calls and draw.random() < 0.7:
            count, first_id = draw.randint(1, 3), 10000 + 10 * turn
            said = text() if text_and_calls and draw.random() < 0.5 else None
            arguments = [json.dumps({"at": text()}) for _ in range(count)]
            messages.append(called(said, *arguments, first_id=first_id))
            results = [result(text(), first_id + index) for index in range(count)]
            draw.shuffle(results)
            messages += results
        messages.append({"role": "assistant", "content": text()})
    return [*messages, user(text())], texts


@pytest.mark.parametrize("name", MODEL_KINDS)
def test_nothing_of_a_history_is_left_out(name: str) -> None:
    draw = random.Random(name)
    for _ in range(30):
        messages, texts = random_history(
            draw, calls=name in CALLING, text_and_calls=name not in CALLS_WITHOUT_TEXT
        )
        prompt = written(kind(name), *messages)
        assert [one for one in texts if one not in prompt] == [], messages
