"""Expectations of peers' tests that Swell does not meet, with the reason.
`docs/lab/compatibility.md` has the same table, and `test_differences.py` compares both."""

from __future__ import annotations

from typing import Any

import pytest

DIFFERENCES: dict[str, str] = {
    "vllm test_completion.py::test_batch_completions[use_beam_search]": (
        "no beam search: it holds as many sequences as beams for one answer, and is best done by a "
        "client with `n` and `logprobs`"
    ),
    "vllm test_chat.py::test_chat_completion_stream_options[min_characters]": (
        "`min_tokens` is the floor; an engine counts tokens, not characters"
    ),
    "vllm test_chat.py::test_invocations": (
        "`/invocations` is SageMaker's name for the routes that exist; a proxy renames"
    ),
    "vllm test_chat_echo.py::test_top_logprobs[-1]": (
        "20 log probabilities a token at most, as OpenAI's; the whole vocabulary is megabytes"
    ),
    "vllm test_completion_with_prompt_embeds.py": "no prompts of embeddings",
    "vllm test_vision.py": "text alone: image, audio and video parts are refused by name",
    "vllm test_tokenization.py::test_tokenizer_info_basic": (
        "the tokenizer is a public file; its settings are not served"
    ),
    "vllm test_lora_adapters.py": (
        "`lora_path` is an absolute path, and `lora.enabled` has to be set"
    ),
    "vllm test_batched_chat_completions.py": "several conversations are several requests",
    "sglang test_matched_stop.py::test_finish_stop_regex_str": (
        "a stop is a text or a token; to end an answer by its form, give the form as `regex`"
    ),
    "sglang test_matched_stop.py::matched_stop": "the field is vLLM's `stop_reason`",
    "sglang test_openai_server_hidden_states.py": "hidden states leave no worker",
    "sglang test_structural_tag.py": (
        "no structural tags: tools with `strict`, or a grammar, have the same effect"
    ),
    "sglang test_openai_embedding.py": "no embeddings, no reranking",
    "sglang test_protocol.py::test_chat_completion_json_format[schema beside type]": (
        "`schema` is a field of `response_format.json_schema`, as OpenAI has it"
    ),
}


def differs(key: str) -> Any:
    return pytest.mark.xfail(strict=True, reason=DIFFERENCES[key])
