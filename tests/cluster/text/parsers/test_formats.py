"""Answers as real models write them, and the exact parts that the parser makes of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.text.parsers import (
    PARSERS,
    REASONING,
    make_parser,
    tool_format,
)
from swell.cluster.text.parsers.constrained import StructuredOrCallsParser
from swell.cluster.text.parsers.deltas import (
    AnswerDelta,
    Arguments,
    Content,
    Message,
    Reasoning,
    ToolCall,
    WholeCall,
    collect,
)
from swell.cluster.text.parsers.detection import detect_reasoning, detect_tools
from swell.cluster.text.parsers.formats.hermes import HermesParser
from tests.cluster.text.parsers.sample_outputs import (
    CALLS,
    MARKERS,
    Names,
    dumped,
    markers,
    parser,
    read,
)
from tests.cluster.text.parsers.test_parser_invariants import held_strings

LLAMA, HERMES, MISTRAL = ("llama3", None), ("hermes", None), ("mistral", None)


def call(index: int, name: str, arguments: str, call_id: str | None = None) -> list[AnswerDelta]:
    return [ToolCall(index, call_id or f"id{index}", name), Arguments(index, arguments)]


EXACT: list[tuple[Names, str, list[AnswerDelta]]] = [
    (HERMES, "Just text.\n", [Content("Just text.\n")]),
    (
        # Qwen 2.5 with parallel calls.
        HERMES,
        'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        [
            Content("Let me look."),
            *call(0, "weather", '{"city": "Köln"}'),
            *call(1, "time", "{}"),
        ],
    ),
    (
        # Hermes 2 Pro writes the keys in the other order.
        HERMES,
        '<tool_call>\n{"arguments": {"symbol": "TSLA"}, "name": "price"}\n</tool_call>\n',
        call(0, "price", '{"symbol": "TSLA"}'),
    ),
    (
        # Arguments as a JSON string, and a small model that omits a brace or two.
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"q\\": \\"\\u00e9\\ud83d\\ude00\\"}"}'
        '</tool_call><tool_call>\n{"name": "g", "arguments": {"a": [1}\n</tool_call>'
        '<tool_call>\n{"name": "h", "arguments": {"b": 2\n</tool_call> Done.',
        [
            *call(0, "f", '{"q": "é😀"}'),
            *call(1, "g", '{"a": [1}\n'),
            *call(2, "h", '{"b": 2\n'),
            Content(" Done."),
        ],
    ),
    (
        # Malformed: arguments that are not an object, no name, truncated.
        HERMES,
        ' <tool_call>\n{"name": "f", "arguments": 3}\n</tool_call>\n<tool_call>{"arguments": {}}'
        '</tool_call><tool_call>\n{"name": "f", "argum',
        [
            Content(
                ' <tool_call>\n{"name": "f", "arguments": 3}\n</tool_call>\n'
                '<tool_call>{"arguments": {}}</tool_call><tool_call>\n{"name": "f", "argum'
            )
        ],
    ),
    (
        # Truncated inside the arguments, which are kept.
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": "b\\',
        call(0, "f", '{"a": "b\\'),
    ),
    (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_c',
        [*call(0, "f", "{}"), Content("\n</tool_c")],
    ),
    (HERMES, "a\n\n<tool_call>\n<", [Content("a\n\n<tool_call>\n<")]),
    (
        # Qwen3 reasons first. Markers in its reasoning are plain text.
        ("hermes", "think"),
        "<think>\nI need <tool_call>.\n</think>\n\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        [Reasoning("I need <tool_call>."), *call(0, "f", '{"a": 1}')],
    ),
    ((None, "think"), "<think>\n\n</think>\n\nFour.", [Content("Four.")]),
    ((None, "think"), "The <think> tag.</think>", [Content("The <think> tag.</think>")]),
    ((None, "think"), "<think>\nto be cont\n", [Reasoning("to be cont\n")]),
    (
        # DeepSeek-R1: the prompt ends with "<think>\n".
        (None, "think-open"),
        "So 2+2.\n\nIt is < 5.\n</think>\n\nIt is **4**.</think>",
        [Reasoning("So 2+2.\n\nIt is < 5."), Content("It is **4**.</think>")],
    ),
    ((None, "think-open"), "<think>\n x</think>y", [Reasoning(" x"), Content("y")]),
    ((None, "think-open"), "</think>y", [Content("y")]),
    (LLAMA, '{"name": "f", "parameters": {"a": "1"}}', call(0, "f", '{"a": "1"}')),
    (
        LLAMA,
        '{"type": "function", "name": "f", "parameters": {"a": [1, 2]}}; '
        '{"name": "g", "parameters": {}}\n{"name": "h", "arguments": {}}',
        [*call(0, "f", '{"a": [1, 2]}'), *call(1, "g", "{}"), *call(2, "h", "{}")],
    ),
    (
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {}};',
        call(0, "f", "{}"),
    ),
    (LLAMA, '{"name": "Bob", "age": 3}', [Content('{"name": "Bob", "age": 3}')]),
    (LLAMA, ';{"name": "f", "parameters": {}}', [Content(";"), *call(0, "f", "{}")]),
    (LLAMA, "<|python_tag|>print(1)", [Content("<|python_tag|>print(1)")]),
    (LLAMA, 'I call {"name": "f"}', [Content('I call {"name": "f"}')]),
    (
        LLAMA,
        '{"name": "f", "parameters": {}}; then {',
        [*call(0, "f", "{}"), Content("; then {")],
    ),
    (
        # Mistral 7B v0.3 and Nemo.
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]',
        [*call(0, "f", '{"a": "]"}'), *call(1, "g", "{}")],
    ),
    (
        # Mistral Small 3.2 and Ministral 3.
        MISTRAL,
        'Sure.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]aB3dE6gH9[ARGS]{}',
        [Content("Sure."), *call(0, "f", '{"a": 1}'), *call(1, "g", "{}", "aB3dE6gH9")],
    ),
    (MISTRAL, '[TOOL_CALLS]f{"a": 1}', call(0, "f", '{"a": 1}')),
    (MISTRAL, "[TOOL_CALLS] []", [Content("[TOOL_CALLS] []")]),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": 3}]',
        [*call(0, "f", "{}"), Content(', {"name": 3}]')],
    ),
    (
        MISTRAL,
        "[TOOL_CALLS]f[CALL_ID]short[ARGS]{}",
        [Content("[TOOL_CALLS]f[CALL_ID]short[ARGS]{}")],
    ),
]


@pytest.mark.parametrize(("names", "text", "parts"), EXACT)
def test_answers_of_models_are_parsed(names: Names, text: str, parts: list[AnswerDelta]) -> None:
    assert read(names, [text]) == parts


HELD: list[tuple[Names, str, str]] = [
    (HERMES, "a\n\n<tool_cal", "\n<tool_cal"),
    (
        HERMES,
        'a<tool_call>\n{"x": 1, "name": "f", "argu',
        '<tool_call>\n{"x": 1, "name": "f", "argu',
    ),
    (HERMES, 'a<tool_call>\n{"name": 3', ""),
    (HERMES, "a</tool_c", ""),
    (LLAMA, '{"name": "f", "n', ""),
    (LLAMA, '{"na', '{"na'),
    (LLAMA, '{"answer": [1, 2', ""),
    (LLAMA, '{"type": {"a": [1', '{"type": {"a": [1'),
    (MISTRAL, "a[TOOL_CALLS]f[ARGS", "[TOOL_CALLS]f[ARGS"),
    (MISTRAL, "a[TOOL_CALLS]f[ARGX", ""),
    ((None, "think"), " <thi", " <thi"),
    ((None, "think"), "a <thi", ""),
    ((None, "think"), "<think>a\n\n</t", "\n\n</t"),
]


@pytest.mark.parametrize(("names", "text", "held"), HELD)
def test_only_possible_calls_and_tags_are_held_back(names: Names, text: str, held: str) -> None:
    """Released and held text together are the whole text without `<think>`."""
    one = parser(names)
    parts = [part for char in text for part in one.push(char)]
    shown = "".join(part.text for part in parts if isinstance(part, Content | Reasoning))
    assert shown + held == text.removeprefix("<think>")


# ------------------------------------------------------------------------- rendered by templates

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
_TEXT = st.lists(
    st.sampled_from(["<tool", "call>", "[TOOL", "CALLS]", "<|python_", "\n", "é", " ", "a", '"'])
    | st.characters(blacklist_categories=["Cs"]),
    max_size=12,
).map("".join)
_TRICKS = st.sampled_from([marker for found in MARKERS.values() for marker in found])
_ARGUMENTS = st.dictionaries(st.text(max_size=4) | _TRICKS, _JSON | _TRICKS, max_size=4)
_CALLS = st.lists(st.tuples(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), _ARGUMENTS), max_size=3)


JSON_FORMATS = ["hermes", "llama3", "mistral", "mistral v11", "phi4"]
JSON_FORMATS += ["kimi_k2", "deepseek_v3", "deepseek_v31"]


def deepseek(calls: list[str], between: str) -> str:
    marked = [f"<｜tool▁call▁begin｜>{one}<｜tool▁call▁end｜>" for one in calls]
    return f"<｜tool▁calls▁begin｜>{between.join(marked)}<｜tool▁calls▁end｜>"


def rendered(name: str, content: str, calls: list[tuple[str, str]]) -> str:
    """Returns an answer in this format as the models' chat templates write it."""
    if not calls:
        return content
    key = "parameters" if name == "llama3" else "arguments"
    objects = [f'{{"name": "{one}", "{key}": {text}}}' for one, text in calls]
    match name:
        case "hermes":
            marked = [f"<tool_call>\n{text}\n</tool_call>" for text in objects]
            return "\n".join([content, *marked] if content else marked)
        case "llama3":
            return f"{content}<|python_tag|>" + "; ".join(objects).replace(
                "arguments", "parameters"
            )
        case "phi4":
            return f"{content}functools[" + ", ".join(objects) + "]"
        case "mistral":
            return f"{content}[TOOL_CALLS] [" + ", ".join(objects) + "]"
        case "kimi_k2":
            marked = [
                f"<|tool_call_begin|>functions.{one}:{index}<|tool_call_argument_begin|>{text}"
                f"<|tool_call_end|>"
                for index, (one, text) in enumerate(calls)
            ]
            section = "".join(marked)
            return f"{content}<|tool_calls_section_begin|>{section}<|tool_calls_section_end|>"
        case "deepseek_v3":
            marked = [f"function<｜tool▁sep｜>{one}\n```json\n{text}\n```" for one, text in calls]
            return content + deepseek(marked, "\n")
        case "deepseek_v31":
            return content + deepseek([f"{one}<｜tool▁sep｜>{text}" for one, text in calls], "")
    return content + "".join(f"[TOOL_CALLS]{one}[ARGS]{text}" for one, text in calls)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(JSON_FORMATS), _TEXT, _CALLS, st.booleans())
def test_calls_that_a_template_renders_are_parsed(
    name: str, content: str, wanted_calls: list[tuple[str, dict[str, Any]]], compact: bool
) -> None:
    if not content.strip() or content.lstrip()[0] == "{":
        content = ""
    calls = [
        (f"f{one}", dumped(value).replace(": ", ":") if compact else dumped(value))
        for one, value in wanted_calls
    ]
    message = collect(read((name.split()[0], None), [*rendered(name, content, calls)]))
    assert message == Message(
        content or None,
        None,
        [
            WholeCall(f"functions.{one[0]}:{index}" if name == "kimi_k2" else f"id{index}", *one)
            for index, one in enumerate(calls)
        ],
    )


# --------------------------------------------------------------------------------- the tables


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"tool parser 'xlam' is unknown.*hermes, .*mistral, "):
        make_parser("xlam", None)
    with pytest.raises(ValueError, match=r"reasoning parser 'r1' is unknown.*think, think-open"):
        make_parser(None, "r1")


@pytest.mark.parametrize("name", [name for name in JSON_FORMATS if name in PARSERS])
def test_call_ids_are_unique_and_follow_their_format(name: str) -> None:
    form = "[0-9A-Za-z]{9}" if name == "mistral" else "call_[0-9a-f]{24}"
    ids = {tool_format(name).random_id() for _ in range(100)}
    assert len(ids) == 100 and all(re.fullmatch(form, one) for one in ids)
    if name == "kimi_k2":
        return  # the model writes the ids
    parser = make_parser(name, None)
    parts = parser.push(CALLS[name][0]) + parser.flush()
    assert re.fullmatch(form, collect(parts).tool_calls[0].id)


KEPT = ("llama3", "mistral", "harmony", "functiongemma", "gemma4")


def test_special_tokens_are_kept_where_a_marker_is_one() -> None:
    for tools in (None, *PARSERS):
        for reasoning in (None, *REASONING):
            parser = make_parser(tools, reasoning)
            one = {"harmony"} & {tools, reasoning}
            names = ("harmony", "harmony") if one else (tools, reasoning)
            kept = tools in KEPT or reasoning in ("mistral", "gemma4", "harmony")
            assert parser.keeps_special_tokens == kept, (tools, reasoning)
            assert set(parser.markers) == set(markers(names))


QWEN3_END = (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
R1_END = "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages[0].content }}", None, None),
        (
            '<tool_call>\\n{\\"name\\": <function-name>}{% x %}</think>' + QWEN3_END,
            "hermes",
            "think",
        ),
        ("{{ content.split('</think>')[-1] }}" + R1_END, None, "think-open"),
        ("{{ '<think>' + reasoning + '</think>' }}", None, "think"),
        ("<tool_call>\\n<function=f>\\n<parameter=a>", "qwen3_coder", None),
        ("{{ '\\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>", "glm", None),
        ("<|tool_calls_section_begin|>{%- for call in calls %}", "kimi_k2", None),
        ("'<｜tool▁calls▁begin｜>' + type + name + '\\n```json\\n'", "deepseek_v3", None),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name", "deepseek_v31", None),
        ('{%- set dsml_token = "｜DSML｜" -%}', "deepseek_v32", None),
        ("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}", "minimax_m2", None),
        ("{{- '<|start|>assistant<|channel|>final<|message|>' }}", None, "harmony"),
        ("Use exact format: [func_name1(param1=value1), func_name2(...)]", "pythonic", None),
        ("{{- '<|header_start|>' }}{{- '\"parameters\": ' }}", "llama3", None),
        ("<start_function_call>call:name{key:<escape>value<escape>}", "functiongemma", None),
        ("'<|tool_call>call:' '<|channel>thought\\n<channel|>'", "gemma4", "gemma4"),
        ("all function calls in a list formatted as functools[{...}]", "phi4", None),
        ("add_generation_prompt {{ '<think>' if thinking else '</think>' }}", None, "think"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral", None),
        ("{{- '<|python_tag|>' + name }}", "llama3", None),
        ("{{- '<|start_header_id|>' }}{{- '\"parameters\": ' }}", "llama3", None),
    ],
)
def test_formats_are_guessed_from_templates(
    template: str, tools: str | None, reasoning: str | None
) -> None:
    assert detect_tools(template) == tools
    assert detect_reasoning(template) == reasoning


def test_space_before_a_form_is_read_once() -> None:
    """The space is held, but is not scanned again with each new piece."""
    parser = StructuredOrCallsParser(HermesParser())
    for _ in range(1000):
        assert parser.push(" ") == []
    assert max(map(len, held_strings(parser))) <= len("<tool_call>")
    assert parser.push("a") == [Content(" " * 1000 + "a")]
    calls = StructuredOrCallsParser(HermesParser())
    parts = [part for char in " " * 9 + CALLS["hermes"][0] for part in calls.push(char)]
    assert isinstance(parts[0], ToolCall)
