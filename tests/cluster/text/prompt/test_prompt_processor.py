"""Prompts become the ids that transformers gives, or are refused before any work."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.prompt.chat_template import TemplateOptions
from swell.cluster.text.prompt.generation_request import split_prompts
from swell.cluster.text.prompt.prompt_processor import PromptProcessor
from swell.cluster.text.prompt.truncation import TEMPLATE_TEXT
from swell.cluster.text.schema.chat_messages import ChatMessage, ContentPart
from swell.cluster.text.tokens.tokenizer import load_eos_token_ids, load_tokenizer
from swell.configs.schema import ConfigError
from tests.cluster.text import tokenizers_for_tests as made

MAX_LEN = 64
TOKENIZER = made.chat_tokenizer()
VOCAB = len(TOKENIZER) + 5


def processor(tokenizer: Any = TOKENIZER) -> PromptProcessor:
    return PromptProcessor(tokenizer, MAX_LEN, VOCAB, "m")


PROMPTS = processor()


def refusal(call: Any, *args: Any, **kwargs: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        call(*args, **kwargs)
    return caught.value


def test_the_four_forms_of_a_prompt() -> None:
    ids = TOKENIZER.encode("the fox")
    other = TOKENIZER.encode("a dog")
    assert PROMPTS.completion_prompts(split_prompts("the fox")) == [ids]
    assert PROMPTS.completion_prompts(["the fox", "a dog"]) == [ids, other]
    assert PROMPTS.completion_prompts(split_prompts(ids)) == [ids]
    assert PROMPTS.completion_prompts([ids, other]) == [ids, other]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        (["a", ""], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([[]], "prompt"),
        ([1, "a"], "prompt"),
        ([[1], "a"], "prompt"),
        (["a"] * 1025, "prompt"),
        ([1, VOCAB], "prompt[1]"),
        ([[1], [2, -1]], "prompt[1][1]"),
        ([1] * MAX_LEN, "prompt"),
        ("a\ud800", "prompt"),
    ],
)
def test_invalid_prompts_are_refused(prompt: Any, param: str) -> None:
    error = refusal(lambda: PROMPTS.completion_prompts(split_prompts(prompt)))
    assert error.param == param
    assert error.message.startswith(("prompt", "This model's"))


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1, max_size=20))
def test_token_ids_equal_those_of_transformers(text: str) -> None:
    expected = TOKENIZER.encode(text)
    if 0 < len(expected) < MAX_LEN:
        assert PROMPTS.encode(text) == expected


def test_special_tokens_are_added_where_the_tokenizer_adds_them() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made.llama2(), bos_token="<s>")
    prompts = processor(tokenizer)
    assert prompts.encode("the") == tokenizer.encode("the")
    assert prompts.encode("the")[0] == 1
    assert prompts.encode("the", TEMPLATE_TEXT)[0] != 1


def test_a_text_of_ten_megabytes_is_refused_without_tokenizing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = processor()
    monkeypatch.setattr(prompts, "_backend", None)
    monkeypatch.setattr(prompts, "tokenizer", None)
    error = refusal(prompts.encode, "x" * 10_000_000)
    assert error.code == "context_length_exceeded"
    assert "10000000 bytes" in error.message
    assert f"maximum context length is {MAX_LEN} tokens" in error.message


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(made.EXACT)), st.text(min_size=1, max_size=60))
def test_the_limit_in_bytes_refuses_no_prompt_that_fits(name: str, text: str) -> None:
    """Tested with tokenizers that keep every character. WordPiece and word-level tokenizers drop or
    merge unknown ones."""
    if name in ("wordpiece", "words", "metaspace"):
        return
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made.EXACT[name]())
    prompts = PromptProcessor(tokenizer, 1, VOCAB, "m")
    assert len(text.encode()) <= prompts.max_prompt_bytes * len(tokenizer.encode(text))


def test_a_too_long_prompt_has_openais_message() -> None:
    error = refusal(PROMPTS.encode, "9 " * 70)
    assert error.code == "context_length_exceeded"
    assert f"maximum context length is {MAX_LEN} tokens" in error.message
    assert "tokens" in error.message


def test_max_tokens_is_resolved_or_refused() -> None:
    assert PROMPTS.resolve_max_tokens(60, None) == 4
    assert PROMPTS.resolve_max_tokens(60, 4) == 4
    assert PROMPTS.resolve_max_tokens(60, 1) == 1
    error = refusal(PROMPTS.resolve_max_tokens, 60, 5)
    assert error.code == "context_length_exceeded"
    assert "65 tokens (60 in the prompt, max_tokens=5" in error.message
    assert refusal(PROMPTS.resolve_max_tokens, MAX_LEN, None).code == "context_length_exceeded"
    assert len(refusal(PROMPTS.resolve_max_tokens, 60, 10**5000).message) < 300
    error = refusal(PROMPTS.resolve_max_tokens, 60, None, min_tokens=5)
    assert error.param == "min_tokens"


CHAT = [
    ChatMessage(role="developer", content="be kind"),
    ChatMessage(role="user", content=[ContentPart(type="text", text="hello")]),
    ChatMessage(role="assistant", content=None),
    ChatMessage(role="user", content="bye"),
]


def test_a_chat_prompt_equals_the_one_of_transformers() -> None:
    plain = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "bye"},
    ]
    long = PromptProcessor(TOKENIZER, 512, VOCAB, "m")
    for prompt in (True, False):
        expected = TOKENIZER.apply_chat_template(plain, add_generation_prompt=prompt)["input_ids"]
        options = TemplateOptions(add_generation_prompt=prompt)
        assert long.chat_prompt(CHAT, options) == expected
    assert long.chat_messages([*plain[:1]])[0].text == "be kind"


def test_a_chat_template_writes_its_own_special_tokens() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made.llama2(), bos_token="<s>")
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    ids = processor(tokenizer).chat_prompt([ChatMessage(role="user", content="the")])
    assert ids.count(tokenizer.bos_token_id) == 1


def test_a_template_that_supports_developer_receives_it() -> None:
    tokenizer = made.chat_tokenizer("{% if messages[0]['role'] == 'developer' %}yes{% endif %}")
    assert processor(tokenizer).template.render(CHAT, TemplateOptions()) == "yes"


@pytest.mark.parametrize(
    ("template", "code", "refusal_text"),
    [
        (None, "no_chat_template", "/v1/completions"),
        ("{{ raise_exception('roles must alternate') }}", "chat_template_error", "alternate"),
        ("{{ messages[0]['content'] + 1 }}", "chat_template_error", "rejects"),
        ("{{ nothing.here }}", "chat_template_error", "rejects"),
        ("{% if %}", "chat_template_error", "rejects"),
        ("{{ '' }}", None, "empty"),
        ("{{ 'x ' * 1000 }}", "context_length_exceeded", "maximum context length"),
    ],
)
def test_a_failing_template_is_a_refusal(
    template: Any, code: str | None, refusal_text: str
) -> None:
    error = refusal(processor(made.chat_tokenizer(template)).chat_prompt, CHAT)
    assert error.code == code
    assert error.param == "messages"
    assert refusal_text in error.message


@pytest.mark.parametrize("raw", [[{"role": "x"}], [{"content": "a"}], [5], [], ["a"], [object()]])
def test_python_callers_messages_are_checked(raw: Any) -> None:
    assert refusal(PROMPTS.chat_messages, raw).param is not None


def test_threads_may_tokenize_at_once() -> None:
    texts = [f"the {index} quick fox" for index in range(200)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(PROMPTS.encode, texts)) == [TOKENIZER.encode(t) for t in texts]


def test_decode_inverts_tokenize() -> None:
    text = "it's <|im_end|> 我 , done"
    assert PROMPTS.decode(PROMPTS.encode(text)) == text
    assert refusal(PROMPTS.decode, [VOCAB]).param == "tokens[0]"


def test_truncation_of_a_tokenizer_file_does_not_cut_prompts() -> None:
    tokenizer = made.chat_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    try:
        assert len(processor(tokenizer).encode("the quick brown fox jumps")) > 2
    finally:
        tokenizer.backend_tokenizer.no_truncation()


def test_a_tokenizer_is_cached_and_all_end_tokens_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    TOKENIZER.save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    assert load_tokenizer(str(folder)) is tokenizer
    assert tokenizer.encode("the fox") == TOKENIZER.encode("the fox")
    own = [tokenizer.eos_token_id]
    assert load_eos_token_ids(str(folder), tokenizer) == own
    nested = {"text_config": {"eos_token_id": 6}, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(nested))
    assert load_eos_token_ids(str(folder), tokenizer) == sorted([6, *own])
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7, **nested}))
    assert load_eos_token_ids(str(folder), tokenizer) == sorted([7, *own])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert load_eos_token_ids(str(folder), tokenizer) == sorted([1, 2, *own])


@pytest.mark.parametrize("value", ["1", [1, "2"], -1, 2.0, True, {"id": 1}])
def test_invalid_end_token_ids(tmp_path: Path, value: object) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(ConfigError, match=rf"{name}: eos_token_id=.*integer.*without quotes"):
            load_eos_token_ids(str(tmp_path), TOKENIZER)


def test_a_folder_without_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer.*tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path) + "/")
