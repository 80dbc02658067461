"""The messages of the sampler: its parameters, and its results other than token ids.

Only these structs know the sampling features. The scheduler and the engine pass `SamplerParams`
down to the worker and `Extra` up to the client, without reading them. New fields are only ever
appended, and no default of a parameter ever changes: trailing parameters with default values are
omitted from the messages.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec


class Grammar(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A grammar that the whole answer must match."""

    lark: str
    """The grammar in the dialect of Lark that `llguidance` reads; JSON schemas are written as
    `%json {...}`."""


GRAMMAR_LIMITS = {
    # The most regex nodes that may be made before the first token, and in one step: 20 and 14 ms.
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    # The most parser items in one step: 2.5 ms.
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    # 1 to 2 KB each, for every row that has the grammar.
    "max_lexer_states": 20_000,
    "max_grammar_size": 500_000,
}
"""The limits of one grammar, as counted by `llguidance.LLParserLimits`; both the check of a request
and the worker use them."""


class Activation(enum.IntEnum):
    """The function that is applied to the values of a vector."""

    NONE = 0
    NORMALIZE = 1
    """Divides the values by their Euclidean norm."""
    SIGMOID = 2
    SOFTMAX = 3


class PoolingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Parameters of a request that pools: one vector is computed from all of its tokens, and
    nothing is sampled."""

    activation: Activation = Activation.NONE
    dimensions: int = 0
    """Keep this many values, the first ones, before the activation; 0: all."""
    segment_start: int = 0
    """Position of the first token of the second text of a pair; 0: there is only one text."""


class SamplerParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """How tokens of one request are sampled."""

    temperature: float = 0.0
    """0 selects the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this much total probability."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the largest probability."""
    seed: int = 0
    """64 bits. The noise of an output token is a function only of seed and position."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each of its occurrences in the output."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that occurs in the output."""
    logit_bias: dict[int, float] = {}
    """Token id -> amount added to its logit."""
    bad_words: list[list[int]] = []
    """Token sequences that are never completed."""
    allowed_token_ids: list[int] = []
    """Only these tokens are sampled; empty: all."""
    logprobs: int | None = None
    """Return each sampled token's log probability, and those of this many most likely tokens."""
    prompt_logprobs: int | None = None
    """The same for every prompt token after the first."""
    grammar: Grammar | None = None
    pooling: PoolingParams | None = None
    routed_experts: bool = False
    """Return the experts that computed each token. Requires `model.routed_experts`."""


class TokenLogprobs(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """The log probabilities of one sampled token: natural logarithms, or the values that
    `model.logprobs_mode` selects."""

    token_ids: list[int]
    """The sampled token, then the most likely ones, best first."""
    logprobs: list[float]
    rank: int
    """The rank of the sampled token; 1 is the most likely."""


class PromptLogprobs(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """The log probabilities of consecutive prompt tokens, each given all tokens before it."""

    start: int
    """Position of the first token. The token at position 0 does not have a probability."""
    token_ids: list[list[int]]
    """For each position, the same as in `TokenLogprobs`: the prompt's token, then the most likely
    ones."""
    logprobs: list[list[float]]
    ranks: list[int]


class PooledValues(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """The vector of a request."""

    values: bytes
    """The values as float32, little-endian."""


class RoutedExperts(msgspec.Struct, frozen=True, tag=3, array_like=True, gc=False):
    """The experts that computed consecutive tokens, in each layer with experts."""

    start: int
    """Position of the first token."""
    layers: list[int]
    """The layers that have experts."""
    top_k: int
    """The number of experts of a token in a layer, best first."""
    wide: bool
    """Whether an expert's number has two bytes, little-endian, instead of one."""
    data: bytes
    """[tokens, layers, top_k]"""

    @property
    def token_bytes(self) -> int:
        return len(self.layers) * self.top_k * (2 if self.wide else 1)


Extra = TokenLogprobs | PromptLogprobs | PooledValues | RoutedExperts
"""A result of a step for one request, other than its token."""


class PromptEmbeds(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt given as embeddings, [tokens, width], instead of token ids."""

    dtype: Literal["F32", "F16", "BF16"]
    """The type's name in safetensors."""
    width: int
    """The size of one embedding: the model's hidden size."""
    data: bytes
    """The numbers, row by row, little-endian."""
    first: int = 0
    """How many tokens of the prompt come before the first embedding here: they are computed
    already."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one embedding."""
        return self.width * (4 if self.dtype == "F32" else 2)

    @property
    def num_tokens(self) -> int:
        return len(self.data) // self.row_bytes

    def after(self, computed: int) -> PromptEmbeds | None:
        """Returns the embeddings that are not computed yet; None: all are."""
        if computed >= self.num_tokens:
            return None
        data = self.data[computed * self.row_bytes :] if computed else self.data
        return PromptEmbeds(self.dtype, self.width, data, computed)
