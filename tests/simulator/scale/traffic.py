"""Conversations at a constant rate. Prompts have 1.2 to 2.3 thousand tokens, and most of them begin
with a prefix that was sent before."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

from swell.cluster.client.async_llm import AsyncLLM
from swell.cluster.client.requests.merged_outputs import MergedOutputs
from swell.cluster.client.requests.outputs import RequestOutputKind
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from tests.simulator.control_plane import SimIngress
from tests.simulator.kernel.kernel import WORLD, Kernel

ANSWER_TOKENS = 16
_SYSTEM_PROMPTS, _SYSTEM_TOKENS = 8, 1024
_TURN_TOKENS = (150, 250)
_MAX_TURNS = 5
_FOLLOW_UPS = 0.7
"""The share of requests that continue a conversation, if one is idle."""
_VOCAB = 1 << 16


@dataclass
class _Conversation:
    tokens: list[int]
    turns: int = 0


@dataclass
class Traffic:
    """The traffic of one ingress."""

    kernel: Kernel
    ingress: SimIngress
    rate: float
    """Requests per second."""
    first_token_s: list[float] = field(default_factory=list)
    """Seconds to the first token of each request that began after `counts_since`, by the world's
    clock."""
    counts_since: float = float("inf")
    sent: int = 0
    failed: list[str] = field(default_factory=list)

    def start(self, until_s: float) -> None:
        self._until_s = until_s
        self._random: Random = self.kernel.random(f"traffic:{self.ingress.index}")
        shared = self.kernel.random("system prompts")
        self._systems = [
            shared.choices(range(_VOCAB), k=_SYSTEM_TOKENS) for _ in range(_SYSTEM_PROMPTS)
        ]
        self._idle: list[_Conversation] = []
        self.kernel.at(self.kernel.now + self._random.random() / self.rate, WORLD, self._next)

    def _next(self) -> None:
        kernel, random = self.kernel, self._random
        if kernel.now >= self._until_s:
            return
        kernel.at(kernel.now + random.expovariate(self.rate), WORLD, self._next)
        if self._idle and random.random() < _FOLLOW_UPS:
            conversation = self._idle.pop(random.randrange(len(self._idle)))
        else:
            conversation = _Conversation(list(random.choice(self._systems)))
        conversation.tokens += random.choices(range(_VOCAB), k=random.randint(*_TURN_TOKENS))
        conversation.turns += 1
        self.sent += 1
        llm = self.ingress.llm
        assert llm is not None
        name, prompt = f"{self.ingress.index}-{self.sent}", list(conversation.tokens)
        create_task = self.ingress.process.loop.create_task
        kernel.soon(
            self.ingress.process,
            lambda: create_task(self._follow(llm, name, prompt, conversation), name=name),
        )

    async def _follow(
        self, llm: AsyncLLM, name: str, prompt: list[int], conversation: _Conversation
    ) -> None:
        begun_s = self.kernel.now
        kind, params = RequestOutputKind.DELTA, SamplingParams(max_tokens=ANSWER_TOKENS)
        request = EngineCoreRequest(name, prompt, SamplerParams(seed=1), ANSWER_TOKENS)
        try:
            llm.check_admission()
            state = llm.submit(request, params, kind)
            is_first = True
            async for batch in MergedOutputs([state], params, kind):
                for _, output in batch:
                    conversation.tokens += output.outputs[0].token_ids
                if is_first and begun_s >= self.counts_since:
                    self.first_token_s.append(self.kernel.now - begun_s)
                is_first = False
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.failed.append(f"{name}: {type(error).__name__}: {error}")
        if conversation.turns < _MAX_TURNS:
            self._idle.append(conversation)
