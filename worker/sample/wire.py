"""The words of the sampler: how tokens are drawn, and what is told of a token beside its id.

What a request may ask of its tokens stands here alone. The scheduler and the engine hand
`SamplerParams` down to the worker and `Extra` up to the asker, and look into neither.
"""

from __future__ import annotations

import msgspec


class Grammar(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """A language that the answer must be a sentence of."""

    lark: str
    """In the dialect of Lark that `llguidance` reads; it holds JSON schemas as `%json {...}`."""


GRAMMAR_LIMITS = {
    # Regex nodes that may be made before the first token, and in one step: 20 and 14 ms.
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    # Items of the parser in one step: 2.5 ms.
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    # 1 to 2 KB each, for every row that has the grammar.
    "max_lexer_states": 20_000,
    "max_grammar_size": 500_000,
}
"""What one grammar may cost, as `llguidance.LLParserLimits` counts it. Who checks a grammar and who
follows it hold the same limits."""


class SamplerParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """How the next token of one request is drawn: what the sampler keeps per slot."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens that holds this much probability."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the largest probability."""
    seed: int = 0
    """64-bit. The noise of an output token is a function of seed and position alone."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it stands in the output."""
    presence_penalty: float = 0.0
    """Taken once from the logit of each token that stands in the output."""
    logit_bias: dict[int, float] = {}
    """Token id -> what is added to its logit."""
    bad_words: list[list[int]] = []
    """Token sequences that are never completed."""
    allowed_token_ids: list[int] = []
    """No other token is drawn; empty: all may be."""
    logprobs: int | None = None
    """Tell each drawn token's log probability, and those of this many most likely ones."""
    prompt_logprobs: int | None = None
    """The same of every prompt token behind the first."""
    grammar: Grammar | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """Of one drawn token: natural logarithms of probabilities under the model's own logits."""

    token_ids: list[int]
    """The drawn token, then the most likely ones, best first."""
    logprobs: list[float]
    rank: int
    """Of the drawn token; 1 is the most likely."""


class PromptLogprobs(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """Of consecutive prompt tokens, each given all before it."""

    start: int
    """Position of the first; the prompt's own first token, 0, has no probability."""
    token_ids: list[list[int]]
    """For each position as in `TokenLogprobs`: the prompt's token, then the most likely."""
    logprobs: list[list[float]]
    ranks: list[int]


Extra = TokenLogprobs | PromptLogprobs
"""What a step tells of a request beside its token."""
