"""One ingress's `AsyncLLM` over real engine cores, without sockets or threads. All share one clock
that only the test moves, so every number in `/metrics` is exactly predictable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import cache
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from swell.cluster.client.async_llm import AsyncLLM
from swell.cluster.client.engine_connection import EngineId
from swell.cluster.client.metrics import PrometheusStats
from swell.cluster.client.requests.outputs import RequestOutputKind
from swell.cluster.client.requests.request_state import RequestState
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.configs.schema import load
from swell.coordinator import roster as rosters
from swell.coordinator.metrics import ViewCollector
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.transport.runtime import ThreadRuntime
from swell.coordinator.wire import ClusterReports, ClusterView, EngineReport
from swell.engine.core import EngineCore
from swell.engine.executor import ExecutorLimits
from swell.engine.serving.server import EngineServer
from swell.engine.wire import AbortRequests, EngineCoreOutputs, EngineCoreRequest
from tests.cluster.text import tokenizers_for_tests
from tests.engine.executor.fake_worker import VOCAB, FakeExecutor
from tests.support.core_requests import core_request

BLOCK_TOKENS = 4
MAX_MODEL_LEN = 600
CLIENT = b"ingress"


@cache
def detokenizer() -> Detokenizer:
    return Detokenizer(tokenizers_for_tests.chat_tokenizer())


class _ClockRuntime(ThreadRuntime):
    def __init__(self, cluster: ScriptedCluster) -> None:
        super().__init__()
        self._cluster = cluster

    def now(self) -> float:
        return self._cluster.now


class ScriptedCluster:
    """A scripted cluster. Use it within `run`, which provides the event loop."""

    def __init__(self, **settings: object) -> None:
        settings = {key.replace("__", "."): value for key, value in settings.items()}
        settings.setdefault("scheduler.steps_in_flight", 1)
        source = {"model": {"path": "m"}, "cache": {"block_tokens": BLOCK_TOKENS}}
        self.config = load(source, settings)
        self.now = 1000.0
        self.cores: dict[int, EngineCore] = {}
        self.roster = Roster()
        self.metrics = PrometheusStats()
        self.metrics.set_other_counts({})
        self._incarnations: dict[int, int] = {}
        self.llm = AsyncLLM(
            detokenizer(),
            self.config,
            self._connect,
            self.metrics,
            lambda max_model_len, vocab_size: None,
            runtime=_ClockRuntime(self),
        )
        self.metrics.registry.register(ViewCollector(lambda: self.llm.view))

    def _connect(self, client_index: int, listener: Any, metrics: Any, **_: Any) -> Any:
        return SimpleNamespace(send=self._send, close=lambda: None)

    def _send(self, engine: EngineId, message: object) -> None:
        core = self.cores.get(engine.rank)
        if core is None:
            return
        if isinstance(message, EngineCoreRequest):
            assert core.add_request(message, CLIENT) is None
        elif isinstance(message, AbortRequests):
            core.abort_requests(message.request_ids, message.attempts)

    # ---------------------------------------------------------------- engines

    def join(self, rank: int, num_blocks: int = 100, numerics: str = "") -> EngineCore:
        limits = ExecutorLimits(num_blocks, MAX_MODEL_LEN, VOCAB)
        executor = FakeExecutor(num_blocks, BLOCK_TOKENS)
        core = EngineCore(self.config, executor, limits, clock=lambda: self.now)
        self.cores[rank] = core
        self._incarnations[rank] = len(self._incarnations) + 1
        address = ChannelAddress("machine", f"ipc://@{rank}", "tcp://127.0.0.1:1")
        member = Member(
            rank,
            address,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB,
            incarnation=self._incarnations[rank],
            num_blocks=num_blocks,
            numerics=numerics,
        )
        self.roster = rosters.join(self.roster, [member])
        self.publish()
        return core

    def lose(self, rank: int) -> None:
        """Loses the engine together with its counters."""
        self._take_out(rank, rosters.remove)

    def detach(self, rank: int) -> None:
        """Detaches the engine as on request, even if it still has requests."""
        self._take_out(rank, rosters.detach)

    def _take_out(self, rank: int, step: Callable[[Roster, list[int]], Roster]) -> None:
        member = self.roster.find(rank)
        assert member is not None
        self.roster = step(self.roster, [rank])
        del self.cores[rank]
        self.publish([EngineId.of(member)])

    def mark(self, rank: int, state: MemberState) -> None:
        self.roster = rosters.update_members(self.roster, [rank], state=state)
        self.publish()

    def publish(self, lost: list[EngineId] | None = None) -> None:
        """Publishes a view with the reports of all engines to the ingress."""
        reports = [self._report(rank) for rank in sorted(self.cores)]
        self.llm.on_view(ClusterView(self.roster, ClusterReports(engines=reports)), lost or [])

    def _report(self, rank: int) -> EngineReport:
        """Returns the report that an engine's loop would make."""
        engine = SimpleNamespace(
            core=self.cores[rank],
            rank=rank,
            incarnation=self._incarnations[rank],
            repairs=0,
            _resets=0,
            _progress_at_forming=0,
            _is_repairing=False,
            _coordinator_client=SimpleNamespace(roster_epoch=self.roster.epoch),
        )
        return EngineServer._report(engine)  # type: ignore[arg-type]

    # ---------------------------------------------------------------- the script

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def step(self, rank: int, seconds: float) -> None:
        """Runs one engine step that takes `seconds`. Its outputs arrive at the end."""
        outputs = self.cores[rank].step()
        self.now += seconds
        self.llm.on_outputs(EngineCoreOutputs(outputs.get(CLIENT, [])))

    def submit(self, prompt: list[int], tokens: int, **changes: Any) -> list[RequestState]:
        """Submits all children of one answer. Without an end token, none finishes early."""
        params = replace(SamplingParams(max_tokens=tokens, seed=3), **changes)
        states = []
        for index in range(params.num_children):
            core = core_request(params, index, prompt_token_ids=prompt, max_tokens=tokens)
            states.append(self.llm.submit(core, params, RequestOutputKind.FINAL_ONLY, index))
        return states

    def abort(self, states: list[RequestState]) -> None:
        self.llm.abort([state.request_id for state in states])

    def shown(self) -> dict[str, float]:
        """Returns the metrics that a scrape shows, summed over engines, without zeros and histogram
        buckets."""
        self.publish()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self.metrics.render().decode()):
            for sample in family.samples:
                if sample.name.endswith(("_bucket", "_created")) or not sample.value:
                    continue
                reason = sample.labels.get("finished_reason", "")
                name = sample.name.removeprefix("swell_") + (f"/{reason}" if reason else "")
                values[name] = values.get(name, 0.0) + sample.value
        return values


def run(
    scenario: Callable[[ScriptedCluster], Coroutine[Any, Any, None] | None], **settings: object
) -> dict[str, float]:
    """Runs a scenario and returns what the metrics show after it."""

    async def whole() -> dict[str, float]:
        cluster = ScriptedCluster(**settings)
        script = scenario(cluster)
        if script is not None:
            await script
        shown = cluster.shown()
        cluster.llm.close()
        return shown

    return asyncio.run(whole())
