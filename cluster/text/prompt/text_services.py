"""The objects that an ingress creates from its model's files: created once, shared by all
requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from swell.cluster.text.prompt.chat_template import read_template
from swell.cluster.text.prompt.input_processor import InputProcessor
from swell.cluster.text.prompt.model_formats import ModelFormats
from swell.cluster.text.prompt.pooling_processor import PoolingProcessor, load_pooling
from swell.cluster.text.prompt.prompt_embeds import load_embeds_width
from swell.cluster.text.prompt.prompt_processor import PromptProcessor
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.cluster.text.tokens.generation_config import read_generation_config
from swell.cluster.text.tokens.tokenizer import load_eos_token_ids, load_tokenizer, written_at
from swell.configs.files.adapter_files import adapters_of
from swell.configs.lora import Adapter
from swell.configs.schema import Config


class TextServices(NamedTuple):
    """The objects of one model that read prompts and write answers."""

    prompts: PromptProcessor
    detokenizer: Detokenizer
    processor: InputProcessor
    sampling_defaults: Mapping[str, Any]
    """The model's defaults for fields of `SamplingParams` that a request leaves out."""
    pooling: PoolingProcessor | None = None
    """The processor of pooling requests, for a pooling model."""
    adapters: Mapping[str, Adapter] = {}
    """The adapters of the configuration, by name."""
    created_s: int = 0
    """When the model's files were written, in seconds since 1970."""

    @classmethod
    def load(cls, config: Config) -> TextServices:
        """Loads the files. Blocks for seconds. Raises ConfigError."""
        path, serve = config.model.path, config.serve
        tokenizer, pooling = load_tokenizer(path), load_pooling(config.model)
        prompts = PromptProcessor(
            tokenizer,
            config.model.max_model_len or 1,
            1,
            config.model.served_name,
            read_template(serve.chat_template),
            min_answer_tokens=1 if pooling is None else 0,
            special_tokens_in_text=config.model.special_tokens_in_text,
        )
        defaults = read_generation_config(config.model)
        detokenizer = Detokenizer(tokenizer)
        processor = InputProcessor(
            prompts,
            detokenizer,
            load_eos_token_ids(path, tokenizer),
            formats=ModelFormats(tokenizer, prompts.template.text, serve),
            default_max_tokens=defaults.max_new_tokens,
            max_children=serve.max_children,
            policy=config.scheduler.policy,
            allow_chat_template=serve.request_chat_template,
            embeds_width=load_embeds_width(config.model),
            routed_experts=config.model.routed_experts,
            logprobs_mode=config.model.logprobs_mode,
            schema_keywords=serve.schema_keywords,
        )
        pooled = None
        if pooling is not None:
            policy = config.scheduler.policy
            pooled = PoolingProcessor(
                prompts, pooling, serve.max_children, policy, serve.truncate_prompts
            )
        return cls(
            prompts,
            detokenizer,
            processor,
            defaults.sampling,
            pooled,
            adapters_of(config.lora),
            written_at(path, "config.json"),
        )
