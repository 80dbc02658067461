"""An engine that can be talked to: the core's loop between its channel and its executor.

Runs on one thread, without Ray. Messages are taken in before each step and again when its result
is there, so that an abort counts for that very step; outputs leave once per step for each
ingress; the load is reported between steps, on a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from swell.configs.log import FactLogger
from swell.configs.schema import ClusterConfig, Config
from swell.coordinator.channel import ChannelAddress, ChannelKeys, Inbox, Outlet
from swell.coordinator.wire import EngineReport
from swell.engine.core import EngineCore
from swell.engine.wire import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    KeepAlive,
    UtilityCall,
    UtilityOutput,
)


class LoadReporter:
    """When to tell the coordinator what: a deadline after a change, else a heartbeat."""

    def __init__(self, config: ClusterConfig, outlet: Outlet[None]) -> None:
        self._config = config
        self._outlet = outlet
        self._changed = False
        self._last_at = -1e9

    def changed(self) -> None:
        """Something happened that the last report does not tell."""
        self._changed = True

    def wait_s(self, now: float) -> float:
        """Time until a report is due: as long as an idle engine may sleep."""
        config = self._config
        period_s = config.load_report_s if self._changed else config.heartbeat_s
        return max(0.0, self._last_at + period_s - now)

    def offer(self, make: Callable[[], EngineReport], now: float) -> None:
        """Send a report if one is due; nothing is made or sent otherwise."""
        if self.wait_s(now) == 0.0:
            self._outlet.send(make())
            self._changed, self._last_at = False, now


class EngineServer:
    """One engine of a cluster."""

    def __init__(
        self,
        config: Config,
        rank: int,
        core: EngineCore,
        keys: ChannelKeys,
        coordinator: ChannelAddress,
        host: str = "127.0.0.1",
    ) -> None:
        self.rank = rank
        self._log = FactLogger("engine", rank=rank)
        self.core = core
        self._inbox: Inbox[EngineMessage] = Inbox(EngineMessage, keys, host)
        self._outlet: Outlet[None] = Outlet(coordinator, None, keys)
        self._reporter = LoadReporter(config.cluster, self._outlet)
        self._stopping = threading.Event()
        self._services: dict[str, Callable[..., object]] = {
            "report": self._report,
            "check_idle": core.check_idle,
        }

    @property
    def address(self) -> ChannelAddress:
        return self._inbox.address

    def run(self) -> None:
        """Serve until `stop`. A failure of the executor is raised.

        Requests that are left in either case are not answered: whoever asked hears from the
        roster that this engine has gone, and continues them elsewhere.
        """
        try:
            while not self._stopping.is_set():
                self._turn()
        finally:
            self.core.shutdown()
            self._inbox.close()
            self._outlet.close()

    def stop(self) -> None:
        """Ask the loop to end; from any thread."""
        self._stopping.set()

    def _turn(self) -> None:
        now = time.monotonic()
        self._reporter.offer(self._report, now)
        self._intake(0.0 if self.core.has_work else self._reporter.wait_s(now))
        if self.core.has_work:
            self._reporter.changed()
            for client, outputs in self.core.step(self._intake).items():
                self._send(client, outputs)
            if not self.core.has_work:
                self._check_conservation()

    def _intake(self, timeout_s: float = 0.0) -> None:
        for peer, message in self._inbox.receive(timeout_s):
            self._reporter.changed()
            match message:
                case EngineCoreRequest():
                    answer = self.core.add_request(message, peer)
                    if answer is not None:
                        self._send(peer, [answer])
                case AbortRequests():
                    self.core.abort_requests(message.request_ids)
                case UtilityCall():
                    self._serve(peer, message)
                case KeepAlive():
                    pass

    def _check_conservation(self) -> None:
        """An idle engine holds nothing; if it does, say so, once it is known and not later."""
        try:
            self.core.check_idle()
        except AssertionError as leak:
            self._log.error("idle, but not everything is free", leak=str(leak))

    def _serve(self, peer: bytes, call: UtilityCall) -> None:
        """Run a service; whatever it raises is the answer."""
        try:
            if call.method not in self._services:
                known = ", ".join(sorted(self._services))
                raise ValueError(f"unknown utility {call.method!r}; known: {known}")
            result = self._services[call.method](*call.args)
            answer = UtilityOutput(call.call_id, None, msgspec.Raw(msgspec.msgpack.encode(result)))
        except Exception as error:
            answer = UtilityOutput(call.call_id, f"{type(error).__name__}: {error}")
        self._inbox.send(peer, EngineCoreOutputs(self.rank, utility_output=answer))

    def _send(self, client: bytes, outputs: list[EngineCoreOutput]) -> None:
        self._inbox.send(client, EngineCoreOutputs(self.rank, outputs, time.monotonic()))

    def _report(self) -> EngineReport:
        scheduler = self.core.scheduler
        return EngineReport(
            rank=self.rank,
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.waiting_tokens(),
            kv_usage=scheduler.kv.usage,
            steps=self.core.num_steps,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.num_prompt_tokens,
            generation_tokens=scheduler.num_generated_tokens,
            prefix_queries=scheduler.kv.num_queried_tokens,
            prefix_hits=scheduler.kv.num_hit_tokens,
        )
