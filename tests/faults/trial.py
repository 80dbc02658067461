"""One cluster under trial: a fault at a given moment, or many in a row, and the effect on the
answers.

    whole --- load, moment --- fault --- whole again --- settle --- compare

Every cell begins with a cluster at full capacity. A cluster that is not whole again within
`RECOVER_S` fails its cell, and is replaced for the next one.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from swell.cluster.api.admin.protocol import ClusterState, ModelList
from swell.cluster.cli.http_client import Client
from tests.faults.cluster_monitor import AlreadyPassed, ClusterMonitor, NotReached, pids
from tests.faults.fault_types import Fault, FaultEffect, Prepare
from tests.faults.load import (
    Answer,
    Load,
    LoadRequest,
    LoadResult,
    Shape,
    compare,
    make_requests,
    percentile,
    reference,
)
from tests.faults.moments import Moment, until_streaming
from tests.faults.process import Cluster, ClusterFailed

RECOVER_S = 60.0
"""The limit from a fault to full capacity."""
_SETTLE_S = 3.0
"""The time under load after that, in which late effects show and a false stall would be
reported."""
_BETWEEN_S = 2.0
"""The time from full capacity to the next fault of a row; in a storm from fault to fault."""
_STREAMING_SHARE = 0.25
"""The share of the streams that are in the middle of an answer when a fault of a row begins."""
_UNDER_WAY_S = 0.1
"""The time in which tokens that were sent before a fault still arrive."""
_RESUBMITTED = "swell_resubmitted_requests_total"


class Setup(msgspec.Struct, frozen=True):
    """A cluster to try: `config` is the argument of `swell serve`, `settings` are for its
    `--set`."""

    name: str
    config: str
    settings: list[str]
    waves: bool = False
    full: bool = False
    """Whether there is no room for another engine: a moment that adds one begins with one fewer."""
    patient: bool = False
    """Whether Ray considers a host lost only after minutes."""


class Cell(msgspec.Struct, frozen=True):
    """The outcome of one fault at one moment, or of a row of faults."""

    fault: str
    moment: str
    """The name, or `after X` if X was over before it could be observed."""
    effects: list[str]
    in_flight: int
    """The number of requests at the time of the fault; for a row the smallest."""
    result: LoadResult
    recover_s: float | None
    """The time from the fault to full capacity; for a row the longest; None if it was not
    reached."""
    next_p50_s: float | None
    """The time from a fault to the next chunk, over readers whose ingress is reachable; None
    without streams."""
    next_p99_s: float | None
    resubmitted: int
    """The sum of the counters of all ingresses; a coordinator that dies forgets those of former
    ones."""
    problems: list[str]
    num_hit: int = 0
    """The number of answers that engines which were hit had begun, as far as clients knew it."""

    @property
    def good(self) -> bool:
        return not (self.problems or self.result.failed or self.result.wrong)


class Trial:
    """A cluster that is started on first use, and replaced after a fault that it did not
    survive."""

    def __init__(
        self, setup: Setup, streams: int, seed: int, start: Callable[..., Cluster] = Cluster
    ) -> None:
        """`start` takes the configuration and the settings."""
        self.setup = setup
        self._start = start
        self._streams = streams
        self._rng = random.Random(seed)
        self._seed = seed
        self._cluster: Cluster | None = None
        self._monitor: ClusterMonitor | None = None
        self._engines = 0
        self._oracle: dict[Shape, tuple[list[LoadRequest], list[Answer]]] = {}

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the cluster. Raises ClusterFailed if that fails."""
        cluster, self._cluster, self._monitor = self._cluster, None, None
        if cluster is not None:
            cluster.stop()

    def cell(self, fault: Fault, moment: Moment) -> Cell:
        """Tries one fault at one moment. Raises ClusterFailed, ReferenceFailed."""
        return self._run(lambda monitor: self._cell(monitor, fault, moment))

    def row(
        self, name: str, faults: Sequence[Fault], shape: Shape, burst_every_s: float = 0.0
    ) -> Cell:
        """Tries many faults under one load (`Load`), each as soon as the cluster is whole again and
        answers are streamed."""
        return self._run(lambda monitor: self._row(monitor, name, faults, shape, burst_every_s))

    def storm(
        self, name: str, faults: Sequence[Fault], shape: Shape, every_s: float = _BETWEEN_S
    ) -> Cell:
        """Tries many faults under one load, one every `every_s` seconds, whether the cluster is
        whole or not."""
        return self._run(lambda monitor: self._storm(monitor, name, faults, shape, every_s))

    def _run(self, work: Callable[[ClusterMonitor], Coroutine[Any, Any, Cell]]) -> Cell:
        """Starts a cluster if there is none, and runs a cell; kills a cluster that is not whole
        afterwards."""
        if self._cluster is None or self._monitor is None:
            self._cluster = self._start(self.setup.config, *self.setup.settings).__enter__()
            self._monitor = ClusterMonitor(self._cluster)
        cell = asyncio.run(work(self._monitor))
        if cell.recover_s is None:
            self._cluster.kill()
            self._cluster = self._monitor = None
        return cell

    # ---------------------------------------------------------------- one cell

    async def _cell(self, monitor: ClusterMonitor, fault: Fault, moment: Moment) -> Cell:
        fewer = int(moment.grows and self.setup.full)
        record, load = await self._begin(monitor, moment.shape, fewer)
        when = moment.name
        try:
            if fault.prepare is not None:
                await fault.prepare(monitor)
            await moment.reach(monitor, load)
        except AlreadyPassed:
            when = f"after {moment.name}"
        except NotReached as error:
            record.problems.append(f"the moment was not reached: {error}")
        await record.inject_and_wait(fault)
        await asyncio.sleep(_SETTLE_S)
        return await record.end(fault.name, when)

    async def _row(
        self,
        monitor: ClusterMonitor,
        name: str,
        faults: Sequence[Fault],
        shape: Shape,
        burst_every_s: float,
    ) -> Cell:
        record, load = await self._begin(monitor, shape, burst_every_s=burst_every_s)
        load.start()
        for fault in faults:
            await asyncio.sleep(_BETWEEN_S)
            await record.inject_and_wait(fault, _STREAMING_SHARE)
            if record.broken:
                break
        await asyncio.sleep(_SETTLE_S)
        return await record.end(name, "decode")

    async def _storm(
        self,
        monitor: ClusterMonitor,
        name: str,
        faults: Sequence[Fault],
        shape: Shape,
        every_s: float,
    ) -> Cell:
        prepare = next((fault.prepare for fault in faults if fault.prepare is not None), None)
        record, load = await self._begin(monitor, shape, prepare=prepare)
        load.start()
        for fault in faults:
            await asyncio.sleep(every_s)
            await record.inject(fault, self._engines if self.setup.full else None)
        await record.recover()
        await asyncio.sleep(_SETTLE_S)
        return await record.end(name, "decode")

    async def _begin(
        self,
        monitor: ClusterMonitor,
        shape: Shape,
        fewer: int = 0,
        prepare: Prepare | None = None,
        burst_every_s: float = 0.0,
    ) -> tuple[_Record, Load]:
        """Returns a record and a load that has not begun, for a whole cluster with `fewer` engines
        less than the first."""
        try:
            state = await monitor.wait_for_state(RECOVER_S)
            self._engines = self._engines or state.target
            engines = self._engines - fewer
            if state.target != engines:
                await monitor.post("/admin/scale", {"engines": engines, "drain_timeout_s": 0})
            await monitor.until_whole({engines}, RECOVER_S)
            if prepare is not None:
                await prepare(monitor)
        except NotReached as error:
            raise ClusterFailed(f"not whole before the fault: {error}") from None
        requests, answers = await self._reference(monitor.cluster.urls[0], shape)
        load = Load(monitor.cluster.urls, requests, self._streams, burst_every_s)
        resubmitted = await monitor.counter(_RESUBMITTED)
        return _Record(monitor, load, self._rng, answers, resubmitted), load

    async def _reference(self, url: str, shape: Shape) -> tuple[list[LoadRequest], list[Answer]]:
        """Returns requests and their right answers, from a cluster without faults."""
        if shape not in self._oracle:
            model = (await Client(url).get("/v1/models", ModelList)).data[0].id
            requests = make_requests(model, self._streams, shape, self._seed)
            self._oracle[shape] = requests, await reference(url, requests)
        return self._oracle[shape]


class Hit(msgspec.Struct, frozen=True):
    """A fault, and the requests that it hit."""

    at_s: float
    """The time at which the fault began."""
    answers: list[Answer]
    """The answers in flight."""
    unreached: frozenset[str]

    def waits(self, answers: Sequence[Answer], streams: int) -> list[float]:
        """Returns how long each reader waited for its next chunk, without those of unreachable
        ingresses. If no request was in flight, these are the readers of the first requests after
        the fault."""
        later = (answer for answer in answers if answer.began_s >= self.at_s)
        first = self.answers or sorted(later, key=lambda answer: answer.began_s)[:streams]
        reached = [answer for answer in first if answer.url not in self.unreached]
        after_s = self.at_s + _UNDER_WAY_S
        waits = [answer.next_chunk_s(self.at_s, after_s) for answer in reached]
        return [wait for wait in waits if wait is not None]


async def _end_later(after_s: float, undo: Callable[[], Awaitable[None]]) -> None:
    await asyncio.sleep(after_s)
    await undo()


class _Record:
    """Faults, effects and problems under one load."""

    def __init__(
        self,
        monitor: ClusterMonitor,
        load: Load,
        rng: random.Random,
        expected: list[Answer],
        resubmitted: float,
    ) -> None:
        self.problems: list[str] = []
        self.broken = False
        self._monitor = monitor
        self._load = load
        self._rng = rng
        self._expected = expected
        self._resubmitted = resubmitted
        self._effects: list[str] = []
        self._in_flight: list[int] = []
        self._num_hit = 0
        self._recover_s: list[float] = []
        self._may_cut: set[str] = set()
        """Addresses whose connections may have been lost with an ingress."""
        self._hits: list[Hit] = []
        self._began_s = time.monotonic()
        self._undoing: asyncio.Task[None] | None = None
        """The task that ends a fault of a host; there is at most one."""

    async def inject_and_wait(self, fault: Fault, streaming_share: float = 0.0) -> None:
        """Waits until this share of the streams has a request whose answer has begun, causes a
        fault, and waits for full capacity."""
        try:
            before = await self._monitor.wait_for_state(RECOVER_S)
            kept = {*pids(before), *self._monitor.replicas()}
            await until_streaming(self._load, streaming_share)
        except NotReached as error:
            self._break(f"{fault.name}: {error}")
            return
        self._in_flight.append(len(self._load.open))
        began = time.monotonic()
        try:
            effect = await self._act(fault, before)
            if not self._load.busy:
                self._load.start()
            if self._undoing is not None:
                await self._undoing
            after = await self._monitor.until_whole(effect.targets, RECOVER_S, effect.victims)
        except (NotReached, ProcessLookupError) as error:
            self._break(f"{fault.name}: {error}")
            return
        self._recover_s.append(time.monotonic() - began)
        if effect.expects_no_restart:
            await self._check_kept(effect, kept, after)

    async def inject(self, fault: Fault, most: int | None = None) -> None:
        """Causes a fault in any state of the cluster. A fault that finds no victim, is refused, or
        exceeds the room for `most` engines is recorded in brackets and does not count as a problem.
        Each is printed, with the seconds since the load began."""
        before = await self._monitor.get_state()
        self._in_flight.append(len(self._load.open))
        at_s = time.monotonic() - self._began_s
        try:
            if before is None:
                raise NotReached("no answer from /admin/cluster")
            if fault.adds > 0 and most is not None and before.target >= most:
                raise NotReached(f"there is room for {most} engines")
            await self._act(fault, before)
        except (NotReached, ProcessLookupError, IndexError) as error:
            if fault.instead is not None:
                await self.inject(fault.instead, most)
                return
            self._effects.append(f"({fault.name}: {error})")
        self._effects[-1] = f"{at_s:.0f} s: {self._effects[-1]}"
        print(self._effects[-1], flush=True)

    async def _act(self, fault: Fault, before: ClusterState) -> FaultEffect:
        """Raises what the fault raises, and NotReached while a host has another fault."""
        if fault.hits_host and self._undoing is not None and not self._undoing.done():
            raise NotReached("a host has another fault")
        began = time.monotonic()
        computing = [
            answer.engines.rpartition(",")[2].strip() for answer in self._load.open.values()
        ]
        effect = await fault.act(self._monitor, before, self._rng)
        self._num_hit += sum(computing.count(str(rank)) for rank in effect.ranks)
        open_answers = list(self._load.open.values())
        self._effects.append(effect.text)
        if fault.cuts_connections:
            self._may_cut |= effect.unreached or set(self._monitor.cluster.urls)
        began = began if effect.undo is None else time.monotonic()
        self._hits.append(Hit(began, open_answers, effect.unreached))
        if effect.undo is not None:
            self._undoing = asyncio.create_task(_end_later(effect.lasts_s, effect.undo))
        return effect

    async def recover(self) -> None:
        """Waits for full capacity, at the size of the last request."""
        if self._undoing is not None:
            await self._undoing
        began = time.monotonic()
        try:
            while (state := await self._monitor.get_state()) is None:
                await asyncio.sleep(_SETTLE_S)
            await self._monitor.until_whole({state.target}, RECOVER_S)
        except NotReached as error:
            self._break(str(error))
        self._recover_s.append(time.monotonic() - began)

    async def _check_kept(self, effect: FaultEffect, before: set[int], after: ClusterState) -> None:
        # Messages from the time in which a link was down arrive up to this long after it is up
        # again.
        await asyncio.sleep(_SETTLE_S + 1.5 * effect.lasts_s)
        after = await self._monitor.get_state() or after
        if lost := before - set(pids(after)) - set(self._monitor.replicas()):
            self.problems.append(
                f"{effect.text}: processes {sorted(lost)} were replaced without need"
            )

    async def end(self, fault: str, moment: str) -> Cell:
        """Waits for all answers, and compares them."""
        answers = await self._load.finish()
        result = compare(self._expected, answers)
        if cut := [a for a in answers if a.cut and a.url not in self._may_cut]:
            self.problems.append(f"{len(cut)} connections were cut by no ingress's end")
        if not result.answers:
            self.problems.append("no answers")
        counter = await self._monitor.counter(_RESUBMITTED)
        waits = [wait for hit in self._hits for wait in hit.waits(answers, self._load.streams)]
        return Cell(
            fault=fault,
            moment=moment,
            effects=self._effects,
            in_flight=min(self._in_flight, default=0),
            result=result,
            recover_s=None if self.broken else max(self._recover_s, default=0.0),
            next_p50_s=percentile(waits, 0.5),
            next_p99_s=percentile(waits, 0.99),
            resubmitted=max(0, round(counter - self._resubmitted)),
            problems=self.problems,
            num_hit=self._num_hit,
        )

    def _break(self, problem: str) -> None:
        self.broken = True
        self.problems.append(problem)


def print_cell(cell: Cell) -> None:
    """Prints one line about a finished cell."""
    took = seconds(cell.recover_s, "never")
    result = cell.result
    print(
        f"{'ok  ' if cell.good else 'FAIL'} {cell.fault} in {cell.moment}: "
        f"{', '.join(cell.effects)}; {cell.in_flight} in flight, {result.answers} answers, "
        f"{result.failed} failed, {result.wrong} wrong, {result.cut} cut; "
        f"whole after {took}, next token p50 {seconds(cell.next_p50_s)}, "
        f"p99 {seconds(cell.next_p99_s)}, longest pause {result.pause_s:.1f} s",
        flush=True,
    )
    for line in (*cell.problems, *result.examples):
        print(f"     {line}", file=sys.stderr, flush=True)


def seconds(value: float | None, none: str = "-") -> str:
    return none if value is None else f"{value:.1f} s"
