"""Proposers that know the answers: always right, always wrong, or randomly either."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence

import msgspec

from swell.engine.core import EngineCore
from swell.engine.request import Request
from swell.engine.row_drafts import Proposer
from swell.engine.scheduling.drafter import ProposingDrafter
from swell.engine.wire import EngineCoreRequest

Answers = Callable[[EngineCoreRequest], Sequence[int]]
"""Returns the outputs of a request, from the first."""


class Right(Proposer):
    def __init__(self, request: Request, answers: Answers, vocab: int) -> None:
        self._prompt_tokens = request.prompt_tokens
        self._answer = answers(request.core)
        self._vocab = vocab

    def propose(self, tokens: array[int], count: int) -> list[int]:
        done = len(tokens) - self._prompt_tokens
        return list(self._answer[done : done + count])


class Wrong(Right):
    def propose(self, tokens: array[int], count: int) -> list[int]:
        return [(token + 1) % self._vocab for token in super().propose(tokens, count)]


class Mixed(Right):
    def propose(self, tokens: array[int], count: int) -> list[int]:
        chance = random.Random(len(tokens))
        right = super().propose(tokens, count)
        some = [t if chance.random() < 0.7 else chance.randrange(self._vocab) for t in right]
        return some[: chance.randint(0, count)]


class EagerDrafter(ProposingDrafter):
    """A drafter that proposes as many drafts as a row can have, however many were rejected."""

    def on_result(self, request: Request, accepted: int) -> None:
        super().on_result(request, accepted)
        if request.drafts is not None:
            request.drafts.length, request.drafts.resume_at = self._config.max_tokens, 0


KINDS: dict[str, type[Right]] = {"right": Right, "wrong": Wrong, "mixed": Mixed}


def plant(core: EngineCore, kind: str, answers: Answers) -> EagerDrafter:
    """Gives the rows of an engine that is configured for drafts proposals of this kind."""
    make, vocab, length = KINDS[kind], core.limits.vocab_size, core.limits.max_model_len
    assert core.config.drafts.step_tokens
    drafter = EagerDrafter(
        core.config.drafts, length, lambda request: make(request, answers, vocab)
    )
    core.scheduler.drafter = drafter
    return drafter


class Teacher:
    """Records the outputs of earlier requests, keyed by everything except the request id. The
    outputs of a request that runs for the first time are unknown, so it gets no drafts."""

    def __init__(self) -> None:
        self._answers: dict[bytes, list[int]] = {}

    def __call__(self, core: EngineCoreRequest) -> Sequence[int]:
        return self._answers.get(self._key(core), [])

    def watch(self, core: EngineCore) -> None:
        """Learns from all requests that this engine runs."""
        requests = core.scheduler.requests
        update = core.scheduler.update

        def updating(*args: object) -> object:
            seen = list(requests.values())
            outputs = update(*args)  # type: ignore[arg-type]
            for request in seen:
                tokens = request.token_ids[request.prompt_tokens :].tolist()
                known = self._answers.setdefault(self._key(request.core), [])
                if len(tokens) > len(known):
                    known[:] = tokens
            return outputs

        core.scheduler.update = updating  # type: ignore[method-assign,assignment]

    @staticmethod
    def _key(core: EngineCoreRequest) -> bytes:
        plain = msgspec.structs.replace(
            core, request_id="", attempt=1, output_token_ids=[], external_req_id=None
        )
        return msgspec.msgpack.encode(plain)
