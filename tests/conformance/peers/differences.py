"""Expectations of peers' tests that Swell does not meet, with the reason.
`docs/lab/compatibility.md` has the same table, and `test_differences.py` compares both."""

from __future__ import annotations

from typing import Any

import pytest

DIFFERENCES: dict[str, str] = {
    "vllm test_completion.py::test_batch_completions[use_beam_search]": (
        "no beam search: it needs as many sequences as beams for one output; clients can "
        "implement it with `n` and `logprobs`"
    ),
    "vllm test_chat.py::test_chat_completion_stream_options[min_characters]": (
        "`min_tokens` is the lower limit: an engine counts tokens, not characters"
    ),
    "vllm test_chat.py::test_invocations": (
        "`/invocations` is SageMaker's name for existing routes; a proxy can rename it"
    ),
    "vllm test_chat_echo.py::test_top_logprobs[-1]": (
        "at most 20 log probabilities per token, as in OpenAI's API; the whole vocabulary is "
        "megabytes"
    ),
    "vllm test_completion_with_prompt_embeds.py": (
        "`prompt_embeds` is a safetensors file, not a pickled tensor, and `model.prompt_embeds` "
        "must be set"
    ),
    "vllm test_vision.py": "text only: image, audio and video parts are refused by name",
    "vllm test_tokenization.py::test_tokenizer_info_basic": (
        "the tokenizer is a public file; its settings are not served"
    ),
    "vllm test_lora_adapters.py": (
        "`lora_path` must be an absolute path, and `lora.enabled` must be set"
    ),
    "vllm test_batched_chat_completions.py": "several conversations are several requests",
    "sglang test_matched_stop.py::test_finish_stop_regex_str": (
        "a stop is a text or a token; to stop by a pattern, constrain the output with `regex`"
    ),
    "sglang test_matched_stop.py::matched_stop": "the field has vLLM's name, `stop_reason`",
    "sglang test_openai_server_hidden_states.py": "hidden states are not returned",
    "sglang test_structural_tag.py": (
        "no structural tags: tools with `strict`, or a grammar, have the same effect"
    ),
    "sglang test_openai_embedding.py": (
        "nano is a causal language model; only pooling models embed and rank"
    ),
    "sglang test_protocol.py::test_chat_completion_json_format[schema beside type]": (
        "`schema` is a field of `response_format.json_schema`, as in OpenAI's API"
    ),
}


def differs(key: str) -> Any:
    return pytest.mark.xfail(strict=True, reason=DIFFERENCES[key])
