"""The section `drafts`: speculative decoding, which proposes draft tokens and verifies them in one
step (`docs/tune/speculative-decoding.md`)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from swell.configs.section import ConfigError, FilledText, Section

MAX_DRAFTS = 32
"""Maximum number of draft tokens of a row in one step, and of tokens in an n-gram match."""


OF_MODELS = ("model", "eagle", "eagle3")
"""Methods that need `drafts.model`."""
BY_WORKERS = (*OF_MODELS, "mtp")
"""Methods for which the workers propose drafts, with additional weights."""


class DraftModelConfig(Section, frozen=True):
    """A small draft model with the same vocabulary as the target model, or a draft head for it."""

    path: FilledText
    """A local folder with config.json, a GGUF file, or a hub id."""
    load_format: Literal["auto", "dummy"] = "auto"
    """Same as `model.load_format`."""
    backend: Literal["auto", "native", "transformers"] = "auto"
    """Same as `model.backend`; draft heads have an implementation of their own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of its weights and its KV; `auto`: the checkpoint's own type."""


class DraftsConfig(Section, frozen=True):
    method: Literal["none", "ngram", "model", "eagle", "eagle3", "mtp"] = "none"
    """How drafts are proposed. `ngram`: the last tokens of a row are searched in its prompt and
    answer, and the tokens that followed them there are proposed (prompt lookup). `model`: a small
    draft model. `eagle`, `eagle3`: a draft head that reads hidden states of the target model.
    `mtp`: the multi-token prediction layer that comes with the model. The answers are the same with
    each method."""
    model: DraftModelConfig | None = None
    """The draft model of `method: model`, or the head of `eagle` and `eagle3`; for `mtp` a folder
    that has the layer, if the model's own folder has not. The worker that returns the tokens holds
    it unsplit, and keeps its KV besides that of the target model."""
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)] = 7
    """Maximum number of draft tokens of a row in one step. With the last sampled token these are
    eight tokens, for which the CPU kernels' matrix products take little longer than for one."""
    min_match: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)] = 3
    """Minimum number of last tokens that must match (`ngram`). A smaller number gives more drafts,
    but more of them are wrong."""
    max_match: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)] = 8
    """Maximum number of last tokens that are compared (`ngram`): the place where most of them match
    is used, and of several such places the newest."""
    max_step_tokens: Annotated[int, Meta(ge=2, le=4096)] = 48
    """Rows get drafts only in steps of up to this many tokens. In larger steps the device is busy
    anyway, and a wrong draft costs as much as a right one saves: on a CPU this begins at some tens
    of tokens, on a GPU at some hundreds."""

    @property
    def step_tokens(self) -> int:
        """The largest step, in tokens, in which rows have drafts; 0 if drafts are off."""
        return 0 if self.method == "none" else self.max_step_tokens


def check_drafts(config: DraftsConfig) -> None:
    """Checks the rules between keys. Raises `ConfigError`."""
    if config.method in OF_MODELS and config.model is None:
        raise ConfigError(
            f"drafts.method={config.method} needs drafts.model, the model that proposes "
            "tokens; write its folder there, as drafts.model: {path: models/small}",
            "drafts.model",
        )
    if config.method not in BY_WORKERS and config.model is not None:
        raise ConfigError(
            f"drafts.model={config.model.path!r} is not used with drafts.method={config.method}; "
            f"set drafts.method to one of {', '.join(BY_WORKERS)}, or leave drafts.model out",
            "drafts.model",
        )
    if config.min_match > config.max_match:
        raise ConfigError(
            f"drafts.min_match={config.min_match} is above drafts.max_match={config.max_match}; "
            "lower the first or raise the second"
        )
