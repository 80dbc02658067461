"""Names of the fields of request bodies. OpenAI's come from the installed client. Those of vLLM and
SGLang were copied from the protocol files of their servers in November 2026."""

from __future__ import annotations

from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

ROUTES = ("chat", "completions", "responses")

OPENAI: dict[str, set[str]] = {
    "chat": {*chat.CompletionCreateParamsBase.__annotations__, "stream"},
    "completions": {*completions.CompletionCreateParamsBase.__annotations__, "stream"},
    "responses": {*responses.ResponseCreateParamsBase.__annotations__, "stream"},
}

_VLLM_BOTH = """
add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo
frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params length_penalty
logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens model n presence_penalty
priority prompt_logprobs repetition_detection repetition_penalty request_id response_format
return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
stop_token_ids stream stream_interval stream_options structured_outputs temperature
thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side use_beam_search user
vllm_xargs watermarking
best_of early_stopping guided_choice guided_decoding_backend guided_grammar guided_json
guided_json_object guided_regex guided_whitespace_pattern logits_processors structural_tag
"""
"""The last two lines are fields of earlier vLLM versions, which clients still send."""

_VLLM_RESPONSES = """
background cache_salt enable_response_messages ignore_eos include include_stop_str_in_output input
instructions logit_bias max_output_tokens max_tool_calls metadata mm_processor_kwargs model
parallel_tool_calls previous_input_messages previous_response previous_response_id priority prompt
prompt_cache_key reasoning repetition_penalty request_id seed service_tier skip_special_tokens
stop store stream structured_outputs temperature text tool_choice tools top_k top_logprobs top_p
truncation user vllm_xargs
"""

VLLM: dict[str, set[str]] = {
    "chat": set(
        (
            _VLLM_BOTH
            + """
add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
include_reasoning max_completion_tokens media_io_kwargs messages mm_processor_kwargs
parallel_tool_calls reasoning_effort return_prompt_text tool_choice tools top_logprobs
"""
        ).split()
    ),
    "completions": set((_VLLM_BOTH + " prompt prompt_embeds suffix").split()),
    "responses": set(_VLLM_RESPONSES.split()),
}

_SGLANG_BOTH = """
bootstrap_host bootstrap_port bootstrap_room cache_salt custom_logit_processor custom_params
data_parallel_rank disagg_prefill_dp_rank ebnf extra_key frequency_penalty ignore_eos images_config
logit_bias logprobs lora_path max_tokens min_p min_tokens model n ngram_corpus_id no_stop_trim
presence_penalty priority regex repetition_penalty response_format return_cached_tokens_details
return_hidden_states return_routed_experts return_token_ids rid routed_dp_rank
routed_experts_start_len seed session_id session_params skip_special_tokens stop stop_regex
stop_token_ids stream stream_options temperature top_k top_p user
"""

_SGLANG_RESPONSES = """
background cache_salt chat_template_kwargs extra_key frequency_penalty include input instructions
max_output_tokens max_tool_calls metadata min_p model ngram_corpus_id parallel_tool_calls
presence_penalty previous_response_id priority reasoning repetition_penalty request_id
service_tier session_id stop store stream temperature text tool_choice tools top_k top_logprobs
top_p truncation user
"""

SGLANG: dict[str, set[str]] = {
    "chat": set(
        (
            _SGLANG_BOTH
            + """
chat_template_kwargs continue_final_message input_ids max_completion_tokens max_dynamic_patch
messages min_dynamic_patch parallel_tool_calls reasoning reasoning_effort return_meta_info
return_prompt_token_ids separate_reasoning stream_reasoning task tool_choice tools top_logprobs
use_audio_in_video
"""
        ).split()
    ),
    "completions": set(
        (_SGLANG_BOTH + " best_of custom_labels echo json_schema prompt suffix").split()
    ),
    "responses": set(_SGLANG_RESPONSES.split()),
}

SERVERS: dict[str, dict[str, set[str]]] = {"OpenAI": OPENAI, "vLLM": VLLM, "SGLang": SGLANG}
