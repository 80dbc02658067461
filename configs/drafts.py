"""Speculative decoding: tokens that are guessed and computed ahead. See
`docs/operate/speculative-decoding.md`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from swell.configs.section import ConfigError, FilledText, Section

MAX_DRAFTS = 32
"""Most drafts of a row in one step, and most tokens of a match."""


OF_MODELS = ("model", "eagle", "eagle3")
"""Methods that need `drafts.model`."""
BY_WORKERS = (*OF_MODELS, "mtp")
"""Methods by which the workers guess, with weights of their own."""


class DraftModelConfig(Section, frozen=True):
    """A small model of the same vocabulary, beside the one that answers, or a head of that."""

    path: FilledText
    """A local folder with config.json, or a hub id."""
    load_format: Literal["auto", "dummy"] = "auto"
    """As `model.load_format`."""
    backend: Literal["auto", "native", "transformers"] = "auto"
    """As `model.backend`; heads have one of their own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of its weights and its KV; `auto`: the checkpoint's own type."""


class DraftsConfig(Section, frozen=True):
    method: Literal["none", "ngram", "model", "eagle", "eagle3", "mtp"] = "none"
    """`ngram`: a row's next tokens are guessed to be those that followed its last ones where these
    stood before, in its prompt or its answer (prompt lookup). `model`: a small model guesses them.
    `eagle`, `eagle3`: a head does, which reads hidden states of the model. `mtp`: the layer for
    multi-token prediction that comes with the model. The answers are the same."""
    model: DraftModelConfig | None = None
    """The small model of `method: model`, or the head of `eagle` and `eagle3`; for `mtp` a folder
    that has the layer, if the model's own has not. The worker that returns the tokens holds it
    whole, and its KV beside the other model's."""
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)] = 7
    """Most drafts of a row in one step: with the token before them eight, for which the products
    of the CPU's kernels take little more than for one."""
    min_match: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)] = 3
    """Last tokens that must have stood before. Fewer give more drafts, of which more are wrong."""
    max_match: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)] = 8
    """Last tokens that are compared: of several places the one where most of them match is taken,
    and of these the newest."""
    max_step_tokens: Annotated[int, Meta(ge=2, le=4096)] = 48
    """Tokens of a step up to which its rows have drafts. With more tokens the device is busy
    anyway, and a wrong draft costs as much as a right one gains: on CPU that begins at some tens,
    on a GPU at some hundreds."""

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step in which rows have drafts; 0: none ever has."""
        return 0 if self.method == "none" else self.max_step_tokens


def check_drafts(config: DraftsConfig) -> None:
    """Check the rules between keys."""
    if config.method in OF_MODELS and config.model is None:
        raise ConfigError(
            f"drafts.method={config.method} needs drafts.model, what guesses; write its folder "
            "there, as drafts.model: {path: models/small}",
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
