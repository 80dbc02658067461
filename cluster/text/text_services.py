"""What an ingress needs of its model's files: made once, shared by all requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from swell.cluster.text.chat_template import read_template
from swell.cluster.text.detokenizer import Detokenizer
from swell.cluster.text.generation_config import read_generation_config
from swell.cluster.text.input_processor import InputProcessor
from swell.cluster.text.model_formats import ModelFormats
from swell.cluster.text.prompts import PromptProcessor
from swell.cluster.text.tokenizer import load_eos_token_ids, load_tokenizer
from swell.configs.schema import Config


class TextServices(NamedTuple):
    """What one model needs to read prompts and to write answers."""

    prompts: PromptProcessor
    detokenizer: Detokenizer
    processor: InputProcessor
    sampling_defaults: Mapping[str, Any]
    """The model's, for fields of `SamplingParams` that a request leaves out."""

    @classmethod
    def load(cls, config: Config) -> TextServices:
        """Blocks for seconds. Raises ConfigError."""
        path, serve = config.model.path, config.serve
        tokenizer = load_tokenizer(path)
        prompts = PromptProcessor(
            tokenizer,
            config.model.max_model_len or 1,
            1,
            config.model.served_name,
            read_template(serve.chat_template),
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
        )
        return cls(prompts, detokenizer, processor, defaults.sampling)
