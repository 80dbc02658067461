"""Fields that clients of other servers send, and their handling here: data, in one place.

These are the names in the bodies of OpenAI, vLLM, SGLang, llama.cpp and TGI that no body of ours
has. A name that is not in a table is unknown to all servers (`serve.unknown_fields`).

    neutral   accepted if its value changes nothing (null never does), otherwise refused by name
    accepted  accepted with any value: it does not change the answer
    means     another name of one of our fields
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Values = tuple[Any, ...]


class Ecosystem(NamedTuple):
    """The fields of other servers that are known for one kind of body."""

    neutral: Mapping[str, Values] = {}
    accepted: frozenset[str] = frozenset()
    means: Mapping[str, str] = {}


_NULL: Values = ()
_OFF: Values = (False,)
_ON: Values = (True,)
_EMPTY: Values = ({},)
_NONE_LISTED: Values = ([],)

_SAMPLING: Mapping[str, Values] = {
    # Searches and penalties that are not supported.
    "use_beam_search": _OFF,
    "length_penalty": (1.0,),
    "early_stopping": _OFF,
    "logits_processors": _NONE_LISTED,
    "custom_logit_processor": _NULL,
    "custom_params": _EMPTY,
    "vllm_xargs": _EMPTY,
    "watermarking": _OFF,
    "watermark": _OFF,
    "typical_p": (1.0,),
    "tfs_z": (1.0,),
    "mirostat": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    # Forms of an answer, and its end.
    "guided_whitespace_pattern": _NULL,
    "structural_tag": _NULL,
    "stop_regex": _NULL,
    # Contents of a response.
    "spaces_between_special_tokens": _ON,
    "logprob_token_ids": _NULL,
    "return_token_offsets": _OFF,
    "return_hidden_states": _OFF,
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "return_cached_tokens_details": _OFF,
    # Inputs other than text, and weights other than the model's.
    "mm_processor_kwargs": _EMPTY,
    "images_config": _EMPTY,
    "lora_path": (),
    "adapter_id": _NULL,
    # Prefixes that are stored or computed elsewhere.
    "kv_transfer_params": _EMPTY,
    "ec_transfer_params": _EMPTY,
    "session_params": _EMPTY,
    "ngram_corpus_id": _NULL,
    "bootstrap_host": _NULL,
    "bootstrap_port": _NULL,
    "bootstrap_room": _NULL,
    "disagg_prefill_dp_rank": _NULL,
    "id_slot": (-1,),
}

_TAKEN = frozenset(
    {
        "request_id",  # ours is the header x-request-id
        "rid",
        "custom_labels",
        "guided_decoding_backend",  # the backend cannot be chosen
        "return_mm_kwargs",
        "cache_prompt",
        "keep_alive",
    }
)

_MEANS = {
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "routed_dp_rank": "data_parallel_rank",
    "no_stop_trim": "include_stop_str_in_output",
    "extra_key": "cache_salt",
}

_BUDGET: Mapping[str, Values] = {"thinking_token_budget": (-1,)}

COMPLETIONS = Ecosystem({**_SAMPLING, **_BUDGET}, _TAKEN, _MEANS)

CHAT = Ecosystem(
    {
        **_SAMPLING,
        "separate_reasoning": _ON,
        "stream_reasoning": _ON,
        "media_io_kwargs": _EMPTY,
        "return_prompt_text": _OFF,
        "return_prompt_token_ids": _OFF,
        "return_meta_info": _OFF,
        "task": _NULL,
        "max_dynamic_patch": _NULL,
        "min_dynamic_patch": _NULL,
        "use_audio_in_video": _OFF,
        "input_ids": _NULL,
        "moderation": _NULL,
        "transforms": _NONE_LISTED,
        "plugins": _NONE_LISTED,
    },
    _TAKEN | {"prompt_cache_options"},
    _MEANS,
)

RESPONSES = Ecosystem(
    {
        **_SAMPLING,
        **_BUDGET,
        "repetition_detection": _NULL,
        "skip_special_tokens": _ON,
        "include_stop_str_in_output": _OFF,
        "enable_response_messages": _OFF,
        "previous_input_messages": _NONE_LISTED,
        "previous_response": _NULL,
    },
    _TAKEN | {"session_id"},
    {name: _MEANS[name] for name in ("routed_dp_rank", "extra_key")},
)

MESSAGES = Ecosystem(accepted=frozenset({"workspace_id", "betas"}))

TOKENIZE = Ecosystem(
    {"mm_processor_kwargs": _EMPTY, "media_io_kwargs": _EMPTY, "return_token_offsets": _OFF}
)

DETOKENIZE = Ecosystem({"skip_special_tokens": _OFF})

EMBEDDING = Ecosystem(
    {
        "messages": _NULL,
        "late_chunking": _OFF,
        "embedding_types": (["float"],),
        "output_dtype": ("float",),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "mm_processor_kwargs": _EMPTY,
        "chat_template": _NULL,
        "instruction": _NULL,
        "max_tokens_per_doc": _NULL,
        "max_chunks_per_doc": _NULL,
        "rank_fields": _NONE_LISTED,
    },
    frozenset({"request_id", "rid", "task"}),
    {"embedding_type": "encoding_format", "output_dimension": "dimensions"},
)

SCORING = Ecosystem(
    {**EMBEDDING.neutral, "input_type": _NULL, "embedding_type": ("float",)},
    EMBEDDING.accepted,
    {"softmax": "use_activation", "activation": "use_activation"},
)

IGNORED_FIELDS = (
    "annotations",
    "cache_control",
    "citations",
    "created_at",
    "encrypted_content",
    "extra_content",
    "finish_reason",
    "id",
    "index",
    "logprobs",
    "metadata",
    "model",
    "object",
    "parsed",
    "parsed_arguments",
    "provider_specific_fields",
    "reasoning_details",
    "reasoning_signature",
    "response_metadata",
    "returns",
    "signature",
    "stop_reason",
    "stop_sequence",
    "strict",
    "thinking_blocks",
    "timestamp",
    "token_ids",
    "type",
    "usage",
    "other",
)
"""Labels of `swell_ignored_fields_total`: names that clients are known to send in a history, and
`other` for every other name, so that clients cannot create labels."""
