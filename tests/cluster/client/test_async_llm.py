"""One ingress's engines without sockets. The test decides when messages arrive."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import msgspec
import pytest

from swell.cluster.client.async_llm import AsyncLLM
from swell.cluster.client.engine_connection import EngineId, EngineListener
from swell.cluster.client.metrics import PrometheusStats
from swell.cluster.client.requests.merged_outputs import MergedOutputs
from swell.cluster.client.requests.outputs import RequestOutputKind
from swell.cluster.client.routing.router import NoEngine
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.configs.schema import load
from swell.coordinator.roster import Member, Roster
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.wire import ClusterView
from swell.engine.wire import EngineCoreOutputs, EngineCoreRequest, UtilityCall, UtilityOutput
from swell.worker.sampler_wire import SamplerParams
from tests.cluster.text import tokenizers_for_tests
from tests.support.deadlines import HANG_S

TIMEOUT_S = 0.02


class BlockedLinks:
    """A connection to an engine whose answer arrives while the event loop is blocked beyond the
    deadline."""

    def __init__(
        self, _client_index: int, listener: EngineListener, metrics: Any, **_periods: float
    ) -> None:
        self._listener = listener
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._answer: EngineCoreOutputs
        member = Member(0, ChannelAddress("", "", ""), max_model_len=9, vocab_size=9)
        self.view = ClusterView(Roster(1, (member,)))
        self.answers = True
        self.sent: list[Any] = []

    def send(self, _engine: Any, call: Any) -> None:
        if not isinstance(call, UtilityCall):
            self.sent.append(call)
            return
        loop = asyncio.get_running_loop()
        raw = msgspec.Raw(msgspec.msgpack.encode("idle"))
        self._answer = EngineCoreOutputs(utility_output=UtilityOutput(call.call_id, None, raw))
        loop.add_reader(self._event, self._arrive)
        loop.call_soon(self._block)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._event)
        os.close(self._event)

    def _block(self) -> None:
        time.sleep(2 * TIMEOUT_S)
        if self.answers:
            os.eventfd_write(self._event, 1)

    def _arrive(self) -> None:
        os.eventfd_read(self._event)
        self._listener.on_outputs(self._answer)


def open_llm(**settings: object) -> tuple[AsyncLLM, BlockedLinks]:
    """Returns an `AsyncLLM` with one engine."""
    links: list[BlockedLinks] = []

    def connect(*args: Any, **periods: float) -> BlockedLinks:
        links.append(BlockedLinks(*args, **periods))
        return links[-1]

    detokenizer = Detokenizer(tokenizers_for_tests.chat_tokenizer())
    config = load({"model": {"path": "none"}}, settings)
    llm = AsyncLLM(detokenizer, config, connect, PrometheusStats(), lambda *_limits: None)
    llm.on_view(links[0].view, [])
    return llm, links[0]


async def call(*, answers: bool) -> Any:
    llm, links = open_llm()
    links.answers = answers
    try:
        return await llm.call_engine(0, "check_idle", timeout_s=TIMEOUT_S)
    finally:
        llm.close()


def test_a_received_answer_counts_although_the_loop_was_late() -> None:
    assert asyncio.run(call(answers=True)) == "idle"


def test_an_engine_that_does_not_answer_is_a_timeout() -> None:
    with pytest.raises(TimeoutError, match=r"engine 0 .*'check_idle'.*0\.02 s"):
        asyncio.run(call(answers=False))


@pytest.mark.parametrize("comes", [True, False])
def test_a_resumed_ingress_looks_for_an_engine_before_it_times_out(comes: bool) -> None:
    """When the ingress resumes, the request's time is over, but the view with a new engine is still
    unread."""

    async def story() -> None:
        settings = {"serve.no_engine_timeout_s": TIMEOUT_S, "cluster.heartbeat_s": 0.1}
        llm, links = open_llm(**settings)
        llm.on_view(ClusterView(Roster(2)), [EngineId.of(links.view.roster.members[0])])
        request = EngineCoreRequest("r", [1], SamplerParams(), max_tokens=3)
        state = llm.submit(request, SamplingParams(), RequestOutputKind.DELTA)
        time.sleep(0.1 + 2 * TIMEOUT_S)
        for _ in range(3):  # due timers fire here
            await asyncio.sleep(0)
        if comes:
            roster = Roster(3, links.view.roster.members)
            llm.on_view(msgspec.structs.replace(links.view, roster=roster), [])
            assert [sent.request_id for sent in links.sent] == ["r"]
        else:
            outputs = MergedOutputs([state], SamplingParams(), RequestOutputKind.DELTA)
            with pytest.raises(NoEngine, match=r"waited 0\.02 s"):
                await asyncio.wait_for(anext(outputs), HANG_S)
        llm.close()

    asyncio.run(story())
