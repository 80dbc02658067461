"""An engine with its channels: runs the core's loop between ingresses, coordinator and executor.

Runs on one thread, without Ray. Messages are handled before each step and again when its result is
there, so that an abort applies to that very step. Outputs are sent once per step to each ingress.
The load is reported between steps, with a deadline.

Worker failures are handled here: lost workers are replaced, and broken groups are formed again.
Meanwhile requests are kept, as if they were preempted. Only an unrecoverable failure stops the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from swell.configs.runtime.log import StructuredLogger
from swell.configs.schema import Config
from swell.coordinator.transport.channel import ChannelAddress, ChannelKeys, Inbox
from swell.coordinator.transport.finder import FindCoordinator, find_nothing
from swell.coordinator.transport.runtime import THREADS, Runtime, drive
from swell.coordinator.wave_protocol.wave_interface import WITHOUT_GROUP, Phase
from swell.coordinator.wire import (
    CoordinatorMessage,
    EngineReport,
    Introduce,
    Pause,
    ReconfigureDistributedRequest,
    Repaired,
    Resume,
    StartDPWave,
)
from swell.engine.core import EngineCore
from swell.engine.executor import ExecutorError, GroupBroken, WorkerLost
from swell.engine.scheduling.step_builder import StartedRequest
from swell.engine.serving.client_tracker import ClientTracker
from swell.engine.serving.coordinator_client import (
    CoordinatorClient,
    EngineCallbacks,
    EngineSnapshot,
    LoopCommand,
    ServeAlone,
)
from swell.engine.serving.engine_report import (
    LoadReporter,
    member_of,
    report_of,
    worker_reports,
)
from swell.engine.wire import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    FinishReason,
    KeepAlive,
    ReplaceClient,
    UtilityCall,
    UtilityOutput,
)
from swell.worker.wire import GroupPlan

_FLUSH_S = 0.005
"""Time within which a sent message has left the process: ten times what is needed on cores that
other processes keep busy."""


class EngineServer:
    """One engine of a cluster."""

    def __init__(
        self,
        config: Config,
        rank: int,
        core: EngineCore,
        keys: ChannelKeys,
        coordinator: ChannelAddress,
        runtime: Runtime = THREADS,
        find_coordinator: FindCoordinator = find_nothing,
        version: str = "",
    ) -> None:
        self._runtime = runtime
        self.rank, self.version = rank, version
        self.incarnation = runtime.random_bits(48)
        self.repairs = 0
        self.core = core
        core.join_cluster(rank, self.incarnation)
        self._resets = 0
        self._progress_at_forming = 0
        self._log = StructuredLogger("engine", rank=rank)
        self._keys = keys
        self._inbox: Inbox[EngineMessage] = runtime.inbox(EngineMessage, keys)
        self._waker = runtime.waker()
        self._reporter = LoadReporter(config.cluster)
        self._client_tracker = ClientTracker(config.cluster.stall_timeout_s)
        self._check_interval_s = config.cluster.heartbeat_s
        self._checked_at = 0.0
        self._reconfiguration: ReconfigureDistributedRequest | ServeAlone | None = None
        self._is_repairing = False
        """Whether it replaces workers or wakes up, until it sends `Repaired`."""
        self._describe()
        self._reported: EngineSnapshot | None = None
        """The group's state in the last report."""
        self._coordinator_client = CoordinatorClient(
            config.cluster,
            runtime,
            coordinator,
            keys,
            EngineSnapshot.of(self.member, core.wave_member),
            EngineCallbacks(
                progress_counter=lambda: core.progress,
                num_requests=lambda: len(core.scheduler.requests) + core.adapters.num_held,
                workers=partial(worker_reports, core),
                abort_collectives=core.executor.abort,
                on_command=self._waker.wake,
            ),
            find=find_coordinator,
        )
        self._stopping = self.keeps_core = False
        self._services = UtilityServices({"report": self._report, "check_idle": core.check_idle})
        self._is_waking = False
        """Whether the engine was asleep when `Resume` arrived."""
        self._coordinator_client.start()

    @property
    def address(self) -> ChannelAddress:
        return self._inbox.address

    def _describe(self) -> None:
        """Updates `workers` and `member`, because workers may have been replaced."""
        self.workers = self.core.executor.workers()
        """Replaced as a whole, so that any thread may read it; `member` too."""
        self.member = member_of(self.core, self.rank, self.incarnation, self.address, self.version)
        """The engine as the roster lists it."""

    def run(self) -> None:
        """Runs `serve` on this thread."""
        drive(self.serve())

    async def serve(self) -> None:
        """Serves until `stop`. Raises an unrecoverable failure.

        In both cases remaining requests are not answered: their ingress sees in the roster that
        this engine is gone, and continues them elsewhere.
        """
        try:
            failure: ExecutorError | None = None
            while not self._stopping:
                try:
                    if failure is not None:
                        await self._recover(failure)
                    failure = None
                    await self._run_once()
                except (GroupBroken, WorkerLost) as error:
                    failure = error
        finally:
            self._coordinator_client.stop()
            if not (self.keeps_core and self._stopping):
                self.core.shutdown()
            self._inbox.close()
            self._waker.close()

    def stop(self, keeps_core: bool = False) -> None:
        """Stops the loop; may be called from any thread. `keeps_core`: for another server."""
        self.keeps_core, self._stopping = keeps_core, True
        self._waker.wake()

    # ---------------------------------------------------------------- the loop

    async def _run_once(self) -> None:
        busy = self.core.has_work or self._reconfiguration is not None
        if not busy:
            self._send_to_coordinator(self.core.take_messages())  # before waiting for more
        await self._process_inputs(0.0 if busy else self._report_wait_s())
        self._check_peers(self._runtime.now())  # after handling received messages
        if self._reconfiguration is not None:
            await self._reconfigure()  # takes long, like sleep: messages are handled before a step
        elif not await self._follow_sleep() and self.core.has_work:
            self._reporter.changed()
            outputs_by_client = await self.core.step_on(
                self._runtime, self._process_inputs, self._send_started
            )
            self._reporter.changed()  # reports sent within the step lack what finished in it
            for client, outputs in outputs_by_client.items():
                self._send(client, outputs)
            if not self.core.scheduler.has_requests and not self.core.has_work:
                self._check_conservation()

    async def _process_inputs(self, timeout_s: float = 0.0) -> None:
        if await self._runtime.ready(self._inbox, timeout_s, self._waker):
            for peer, message in self._inbox.take():
                self._on_message(peer, message)
        self._client_tracker.advance(self._runtime.now())
        while not self._coordinator_client.commands.empty():
            self._handle_command(self._coordinator_client.commands.get())
        self._send_to_coordinator(self.core.take_messages())

    def _on_message(self, peer: bytes, message: EngineMessage) -> None:
        now, clients = self._runtime.now(), self._client_tracker
        if clients.is_replaced(peer):
            return
        if isinstance(message, KeepAlive):
            reply = clients.on_keep_alive(peer, message, now, self._waits_for_coordinator)
            self._inbox.send(peer, reply)
            return
        clients.on_message(peer, now)
        self._reporter.changed()
        match message:
            case EngineCoreRequest():
                answer = self.core.add_request(message, peer)
                if answer is not None:
                    self._send(peer, [answer])
            case AbortRequests():
                self.core.abort_requests(message.request_ids, message.attempts)
            case UtilityCall():
                output = self._services.call(message)
                self._inbox.send(peer, EngineCoreOutputs(utility_output=output))
            case ReplaceClient():
                clients.replace(message.identities, now)
                for identity in message.identities:
                    self.core.abort_client(identity)

    @property
    def _waits_for_coordinator(self) -> bool:
        member = self.core.wave_member
        is_left_out = self.rank not in member.ranks
        return member.needs_coordinator and (is_left_out or self._coordinator_client.is_silent)

    def _check_peers(self, now: float) -> None:
        """Every `heartbeat_s`: drops silent clients, and checks the workers while idle."""
        if now - self._checked_at < self._check_interval_s:
            return
        self._checked_at = now
        for client in self._client_tracker.drop_silent():
            dropped = self.core.abort_client(client)
            if dropped:
                self._log.warning("client sends no heartbeats", requests=len(dropped))
                aborted = [
                    EngineCoreOutput(r.request_id, [], FinishReason.ABORT, attempt=r.attempt)
                    for r in dropped
                ]
                self._send(client, aborted)
                self._client_tracker.forget(client)
        if not self.core.has_work and self.core.wave_member.phase not in WITHOUT_GROUP:
            self.core.executor.check()

    def _check_conservation(self) -> None:
        """Logs an error if an idle engine still holds resources."""
        try:
            self.core.check_idle()
        except AssertionError as leak:
            self._log.error("the engine is idle, but resources are still in use", leak=str(leak))

    def _send(self, client: bytes, outputs: list[EngineCoreOutput]) -> None:
        seq = self._client_tracker.next_seq(client)
        self._inbox.send(client, EngineCoreOutputs(outputs, seq=seq))

    def _send_started(self, started: list[StartedRequest]) -> None:
        """Reports requests that start now, because they may crash this process. Waits until the
        message has left if one is a suspect; else it leaves within the first millisecond of the
        step."""
        by_client: dict[bytes, list[StartedRequest]] = {}
        for one in started:
            by_client.setdefault(one.client, []).append(one)
        for client, requests in by_client.items():
            message = EngineCoreOutputs(
                seq=self._client_tracker.next_seq(client),
                started=[request.request_id for request in requests],
                started_attempts=[request.attempt for request in requests],
                journey_events=[request.events for request in requests],
            )
            self._inbox.send(client, message)
        if any(request.failed_attempts for request in started):
            self._runtime.flush(_FLUSH_S)

    # ---------------------------------------------------------------- groups and workers

    def _handle_command(self, command: LoopCommand) -> None:
        member = self.core.wave_member
        match command:
            case StartDPWave():
                self._send_to_coordinator(member.start(command))
            case Pause():
                self._is_waking = False
                self._send_to_coordinator(member.pause(command))
            case Resume():
                self._is_waking = self.core.memory.sleep_level > 0
                self._send_to_coordinator(member.resume(command))
            case ReconfigureDistributedRequest() | ServeAlone():
                self._reconfiguration = command
            case Introduce():
                """The coordinator client has sent `EngineHello`."""

    async def _reconfigure(self) -> None:
        """Joins the group of the newest epoch, or serves without a group."""
        request, self._reconfiguration = self._reconfiguration, None
        member = self.core.wave_member
        drained = member.phase is Phase.PAUSED
        match request:
            case ReconfigureDistributedRequest() if member.reconfigure(request):
                ranks, store, number = request.ranks, request.store, request.coordinator
            case ServeAlone() if member.serve_standalone(request.epoch):
                ranks, store, number = [self.rank], None, 0
            case _:
                return
        self._send_to_coordinator([])  # it has left its older group; what follows may take long
        if not drained:
            self.core.discard_steps_in_flight()
        self._log.info("reconfiguring", epoch=request.epoch, ranks=ranks, drained=drained)
        if self.rank not in ranks:
            return
        plan = GroupPlan(
            generation=0,
            epoch=request.epoch,
            engines=len(ranks),
            index=ranks.index(self.rank),
            expert_store=store,
            keep_states=drained,
            expert_secret=self._keys.derive(f"epoch {request.epoch} of {number} at {store}"),
        )
        regrouped = await self._runtime.run(self.core.regroup, plan)
        self._progress_at_forming = self.core.progress
        if isinstance(request, ReconfigureDistributedRequest):
            self._send_to_coordinator(member.joined())
        self._log.info(
            "reconfigured",
            epoch=request.epoch,
            phase=member.phase.name,
            experts_moved=sum(worker.experts_moved for worker in regrouped),
            experts_loaded=sum(worker.experts_loaded for worker in regrouped),
        )

    async def _follow_sleep(self) -> bool:
        """Puts a paused engine to sleep, to the requested level, or wakes it up, which takes as
        long as a repair and is listed as one in the roster. Returns whether it did either."""
        member, memory = self.core.wave_member, self.core.memory
        level = self._coordinator_client.sleep_level
        if self._is_waking:
            self._is_waking = False
            memory.wake_with_next_regroup()
            self._is_repairing = True
            self._send_to_coordinator(member.broken("engine wakes up", repairing=True))
            await self._form_again(wakes=True)
            return True
        if level > memory.sleep_level and member.phase is Phase.PAUSED and not member.lockstep:
            self._log.info("engine falls asleep", level=level)
            await self._runtime.run(memory.set_sleep, level)
            return True
        return False

    async def _recover(self, failure: ExecutorError) -> None:
        """Replaces lost workers, and forms the engine's own groups again; an engine that shares
        experts waits for the coordinator's next epoch."""
        lost = isinstance(failure, WorkerLost)
        self._log.warning("groups failed", reason=str(failure), workers_lost=lost)
        member = self.core.wave_member
        self._resets += 1
        self.core.memory.wake_with_next_regroup()
        self.core.discard_steps_in_flight()
        self._send_failed()
        absent = failure.absent if isinstance(failure, GroupBroken) else ()
        self._is_repairing |= lost
        self._send_to_coordinator(member.broken(str(failure), lost, absent))
        if lost:
            await self._runtime.run(self.core.executor.repair)
            self.core.on_repaired()
            self._send_failed()
            self._describe()
        await self._form_again()

    async def _form_again(self, wakes: bool = False) -> None:
        member = self.core.wave_member
        if not member.lockstep:
            await self._runtime.run(self.core.regroup, GroupPlan(generation=0))
            self._send_to_coordinator(member.joined())
        if self._is_repairing:  # perhaps from an earlier turn, whose groups failed
            self._is_repairing = False
            self.repairs += 1  # not earlier: to the coordinator a greater number means `Repaired`
            if wakes:
                self.core.memory.on_woken()
            self._log.info("engine serves again", repairs=self.repairs)
            repaired = Repaired(self.rank, self.incarnation, self.member.store)
            self._send_to_coordinator([repaired, self._report()])  # the old report says repairing

    def _send_failed(self) -> None:
        for failed in self.core.take_failed():
            for client, outputs in failed.items():
                self._send(client, outputs)

    # ---------------------------------------------------------------- reports

    def _send_to_coordinator(self, messages: list[CoordinatorMessage]) -> None:
        """Sends these, and a report if one is due or the group's state has changed: the client
        repeats the report while this thread is inside a step."""
        client = self._coordinator_client
        snapshot = EngineSnapshot.of(self.member, self.core.wave_member)
        is_changed = snapshot != self._reported
        if is_changed:
            self._reported = snapshot
            client.publish(snapshot)
        if is_changed or self._report_wait_s() == 0.0:
            self._reporter.reported(self._runtime.now())
            messages = [*messages, self._report()]
        if messages:
            client.send(messages)

    def _report_wait_s(self) -> float:
        return self._reporter.wait_s(self._runtime.now(), self._coordinator_client.load_report_s)

    def _report(self) -> EngineReport:
        return report_of(
            self.core,
            rank=self.rank,
            incarnation=self.incarnation,
            progress_at_forming=self._progress_at_forming,
            repairs=self.repairs,
            resets=self._resets,
            roster_epoch=self._coordinator_client.roster_epoch,
            is_repairing=self._is_repairing,
        )


class UtilityServices:
    """The functions that clients may call, in addition to requests, by name."""

    def __init__(self, services: Mapping[str, Callable[..., object]]) -> None:
        self._services = dict(services)

    def call(self, call: UtilityCall) -> UtilityOutput:
        """Runs a function; an exception is returned as a failure message."""
        try:
            if call.method not in self._services:
                known = ", ".join(sorted(self._services))
                raise ValueError(f"unknown utility {call.method!r}; known: {known}")
            result = self._services[call.method](*call.args)
            return UtilityOutput(call.call_id, None, msgspec.Raw(msgspec.msgpack.encode(result)))
        except Exception as error:
            return UtilityOutput(call.call_id, f"{type(error).__name__}: {error}")
