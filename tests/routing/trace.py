"""Traces of conversations: the messages of users and their times, generated from a seed.

Users arrive by a Poisson process. Each begins with one of a few system prompts, sends a message,
waits for the whole answer, pauses, and sends the next one; a prompt is the whole conversation so
far.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from swell.engine.kv.block_hash import extend_block_hashes, pack_tokens


@dataclass(frozen=True)
class TraceConfig:
    """The distribution of the conversations of a trace. Lengths are means."""

    users_per_s: float = 2.0
    duration_s: float = 120.0
    """The time in which users arrive."""
    system_prompts: int = 4
    system_tokens: int = 512
    turns: float = 6.0
    user_tokens: float = 100.0
    answer_tokens: float = 150.0
    think_s: float = 10.0


@dataclass(frozen=True)
class Turn:
    """One request."""

    prompt_tokens: int
    """The number of tokens of the conversation that are the turn's prompt."""
    answer_tokens: int
    think_s: float
    """Seconds since the end of the previous answer."""


@dataclass(frozen=True)
class Conversation:
    """One user's tokens, and their division into turns."""

    number: int
    start_s: float
    token_ids: list[int]
    turns: list[Turn]
    block_hashes: list[bytes]
    """The hashes of the conversation's full blocks; those of a prompt come first."""


def generate(shape: TraceConfig, seed: int, block_tokens: int) -> list[Conversation]:
    """Returns the conversations of a trace, in the order of their starts."""
    rng = random.Random(seed)
    systems = [_tokens(rng, shape.system_tokens) for _ in range(shape.system_prompts)]
    conversations: list[Conversation] = []
    now_s = rng.expovariate(shape.users_per_s)
    while now_s < shape.duration_s:
        token_ids, turns = _draw_conversation(rng, shape, rng.choice(systems))
        block_hashes: list[bytes] = []
        extend_block_hashes(block_hashes, pack_tokens(token_ids), block_tokens)
        conversations.append(
            Conversation(len(conversations), now_s, token_ids, turns, block_hashes)
        )
        now_s += rng.expovariate(shape.users_per_s)
    return conversations


def _draw_conversation(
    rng: random.Random, shape: TraceConfig, system: list[int]
) -> tuple[list[int], list[Turn]]:
    """Returns the tokens of one conversation, and their division into turns."""
    token_ids, turns = list(system), []
    for index in range(_count(rng, shape.turns)):
        token_ids += _tokens(rng, _count(rng, shape.user_tokens))
        think_s = rng.expovariate(1 / shape.think_s) if index else 0.0
        turns.append(Turn(len(token_ids), _count(rng, shape.answer_tokens), think_s))
        token_ids += _tokens(rng, turns[-1].answer_tokens)
    return token_ids, turns


def _count(rng: random.Random, mean: float) -> int:
    """Returns a count of at least one, exponentially distributed."""
    return 1 + int(rng.expovariate(1 / mean))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(1 << 16), k=count)
