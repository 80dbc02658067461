"""The defaults in a model's `generation_config.json`, for fields that a request omits.

As in vLLM, these are temperature, top_p, top_k, min_p and repetition_penalty, and `max_new_tokens`
if neither the request nor the endpoint limits the answer. `do_sample` is not read: a model that
needs greedy answers has `temperature: 0`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.params.field_path import rename_roots
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.params.validate_params import check_ranges
from swell.cluster.text.tokens.tokenizer import read_json
from swell.configs.schema import ConfigError, ModelConfig

FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of one model; empty if its file has none, or is not used."""

    sampling: dict[str, Any] = {}
    """Defaults of fields of `SamplingParams`."""
    max_new_tokens: int | None = None
    """Maximum number of tokens of an answer if the request sets no limit."""

    def sampling_params(self) -> SamplingParams:
        """Returns the parameters of an offline call that sets none."""
        if self.max_new_tokens is None:
            return SamplingParams(**self.sampling)
        return SamplingParams(**self.sampling, max_tokens=self.max_new_tokens)


def read_generation_config(model: ModelConfig) -> GenerationDefaults:
    """Reads the defaults. Raises ConfigError for a value that a request could not have either:
    sampling with other values than the model needs would be silently wrong."""
    if model.generation_config == "none":
        return GenerationDefaults()
    given = read_json(model.path, FILE)
    defaults = GenerationDefaults(
        sampling={name: given[name] for name in _SAMPLING if given.get(name) is not None},
        max_new_tokens=given.get("max_new_tokens"),
    )
    try:
        check_ranges(defaults.sampling_params())
    except BadRequest as error:
        reason = error.renamed(rename_roots({"max_tokens": "max_new_tokens"}))
        raise ConfigError(
            f"{model.path}/{FILE}: {reason}; correct the file, or set model.generation_config=none "
            "to ignore its defaults"
        ) from None
    return defaults
