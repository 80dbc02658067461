"""One cluster under trial: a fault in a given moment, or many in a row, and what became of answers.

    whole --- load, moment --- fault --- whole again --- settle --- judge

Every cell begins with a cluster at full capacity. One that is not whole again within
`RECOVER_S` has failed its cell, and is replaced for the next.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from swell.cluster.api.admin.protocol import ClusterState
from swell.cluster.api.models import ModelList
from swell.cluster.cli.http_client import Client
from tests.faults.cluster_monitor import ClusterMonitor, Missed, Passed, pids
from tests.faults.fault_types import Event, FaultEffect
from tests.faults.load import (
    Answer,
    Ask,
    Load,
    LoadResult,
    Shape,
    compare,
    make_requests,
    reference,
)
from tests.faults.moments import Moment
from tests.faults.process import Cluster, ClusterFailed

RECOVER_S = 60.0
"""From a fault to full capacity."""
_SETTLE_S = 3.0
"""Load after that: what is late shows, and a stall that is none would have been called one."""
_BETWEEN_S = 2.0
"""From full capacity to the next fault of a row; in a storm from fault to fault."""
_RESUBMITTED = "swell_resubmitted_requests_total"


class Setup(msgspec.Struct, frozen=True):
    """A cluster to try: `config` is what `swell serve` takes, `settings` are for its `--set`."""

    name: str
    config: str
    settings: list[str]
    waves: bool = False


class Cell(msgspec.Struct, frozen=True):
    """What became of one fault in one moment, or of a row of faults."""

    event: str
    moment: str
    """`after X` if X was over before it could be seen."""
    effects: list[str]
    in_flight: int
    """Requests, when the fault came; of a row the fewest."""
    load_result: LoadResult
    recover_s: float | None
    """From the fault to full capacity; of a row the longest; None if it was not reached."""
    resubmitted: int
    """By the counters of all ingresses; a coordinator that dies forgets those of past ones."""
    troubles: list[str]

    @property
    def good(self) -> bool:
        return not (self.troubles or self.load_result.failed or self.load_result.wrong)


class Trial:
    """A cluster that is started when it is needed, and again when a fault was too much for it."""

    def __init__(self, setup: Setup, streams: int, seed: int) -> None:
        self.setup = setup
        self._streams = streams
        self._rng = random.Random(seed)
        self._seed = seed
        self._cluster: Cluster | None = None
        self._monitor: ClusterMonitor | None = None
        self._engines = 0
        self._oracle: dict[Shape, tuple[list[Ask], list[Answer]]] = {}

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the cluster in order. Raises ClusterFailed if that does not end well."""
        cluster, self._cluster, self._monitor = self._cluster, None, None
        if cluster is not None:
            cluster.stop()

    def cell(self, event: Event, moment: Moment) -> Cell:
        """One fault in one moment. Raises ClusterFailed, ReferenceFailed."""
        return self._run(lambda monitor: self._cell(monitor, event, moment))

    def row(self, name: str, events: Sequence[Event], shape: Shape) -> Cell:
        """Many faults under one load, each once the cluster is whole again."""
        return self._run(lambda monitor: self._row(monitor, name, events, shape))

    def storm(self, name: str, events: Sequence[Event], shape: Shape) -> Cell:
        """Many faults under one load, one every two seconds, whole or not."""
        return self._run(lambda monitor: self._storm(monitor, name, events, shape))

    def _run(self, work: Callable[[ClusterMonitor], Coroutine[Any, Any, Cell]]) -> Cell:
        """Start a cluster if there is none; one that is not whole afterwards ends here."""
        if self._cluster is None or self._monitor is None:
            self._cluster = Cluster(self.setup.config, *self.setup.settings).__enter__()
            self._monitor = ClusterMonitor(self._cluster)
        cell = asyncio.run(work(self._monitor))
        if cell.recover_s is None:
            self._cluster.kill()
            self._cluster = self._monitor = None
        return cell

    # ---------------------------------------------------------------- one cell

    async def _cell(self, monitor: ClusterMonitor, event: Event, moment: Moment) -> Cell:
        record, load = await self._begin(monitor, moment.shape)
        when = moment.name
        try:
            await moment.reach(monitor, load)
        except Passed:
            when = f"after {moment.name}"
        except Missed as missed:
            record.troubles.append(f"the moment was missed: {missed}")
        await record.fault(event)
        await asyncio.sleep(_SETTLE_S)
        return await record.end(event.name, when)

    async def _row(
        self, monitor: ClusterMonitor, name: str, events: Sequence[Event], shape: Shape
    ) -> Cell:
        record, load = await self._begin(monitor, shape)
        load.start()
        for event in events:
            await asyncio.sleep(_BETWEEN_S)
            await record.fault(event)
            if record.broken:
                break
        await asyncio.sleep(_SETTLE_S)
        return await record.end(name, "decode")

    async def _storm(
        self, monitor: ClusterMonitor, name: str, events: Sequence[Event], shape: Shape
    ) -> Cell:
        record, load = await self._begin(monitor, shape)
        load.start()
        for event in events:
            await asyncio.sleep(_BETWEEN_S)
            await record.inject(event)
        await record.recover()
        await asyncio.sleep(_SETTLE_S)
        return await record.end(name, "decode")

    async def _begin(self, monitor: ClusterMonitor, shape: Shape) -> tuple[_Record, Load]:
        """A whole cluster of the first size, and a load that has not begun."""
        if not self._engines:
            state = await monitor.get_state()
            self._engines = state.target if state is not None else 1
        try:
            state = await monitor.get_state()
            if state is not None and state.target != self._engines:
                await monitor.ask("/admin/scale", {"engines": self._engines})
            await monitor.until_whole({self._engines}, RECOVER_S)
        except Missed as missed:
            raise ClusterFailed(f"not whole before the fault: {missed}") from None
        asks, answers = await self._reference(monitor.cluster.url, shape)
        load = Load([monitor.cluster.url], asks, self._streams)
        resubmitted = await monitor.counter(_RESUBMITTED)
        return _Record(monitor, load, self._rng, answers, resubmitted), load

    async def _reference(self, url: str, shape: Shape) -> tuple[list[Ask], list[Answer]]:
        """Requests and their right answers, which the first calm cluster gives."""
        if shape not in self._oracle:
            model = (await Client(url).get("/v1/models", ModelList)).data[0].id
            asks = make_requests(model, self._streams, shape, self._seed)
            self._oracle[shape] = asks, await reference(url, asks)
        return self._oracle[shape]


class _Record:
    """What happens under one load."""

    def __init__(
        self,
        monitor: ClusterMonitor,
        load: Load,
        rng: random.Random,
        expected: list[Answer],
        resubmitted: float,
    ) -> None:
        self.troubles: list[str] = []
        self.broken = False
        self._monitor = monitor
        self._load = load
        self._rng = rng
        self._expected = expected
        self._resubmitted = resubmitted
        self._deeds: list[str] = []
        self._in_flight: list[int] = []
        self._recover_s: list[float] = []
        self._cuts = False

    async def fault(self, event: Event) -> None:
        """Cause it and wait for full capacity."""
        before = await self._monitor.get_state()
        if before is None:
            self._break(f"{event.name}: nobody answers /admin/cluster")
            return
        self._in_flight.append(len(self._load.open))
        began = time.monotonic()
        self._cuts |= event.cuts_connections
        try:
            effect = await event.act(self._monitor, before, self._rng)
            self._deeds.append(effect.text)
            if not self._load.busy:
                self._load.start()
            after = await self._monitor.until_whole(effect.targets, RECOVER_S, effect.victims)
        except (Missed, ProcessLookupError) as missed:
            self._break(f"{event.name}: {missed}")
            return
        self._recover_s.append(time.monotonic() - began)
        if effect.expects_no_restart:
            await self._check_kept(effect, before, after)

    async def inject(self, event: Event) -> None:
        """Cause it in whatever state the cluster is: one that finds nobody, or is refused, is
        told and is no fault."""
        before = await self._monitor.get_state()
        self._in_flight.append(len(self._load.open))
        self._cuts |= event.cuts_connections
        try:
            if before is None:
                raise Missed("nobody answers /admin/cluster")
            self._deeds.append((await event.act(self._monitor, before, self._rng)).text)
        except (Missed, ProcessLookupError, IndexError) as missed:
            self._deeds.append(f"({event.name}: {missed})")

    async def recover(self) -> None:
        """Wait for full capacity, at whatever size was asked for last."""
        began = time.monotonic()
        try:
            while (state := await self._monitor.get_state()) is None:
                await asyncio.sleep(_SETTLE_S)
            await self._monitor.until_whole({state.target}, RECOVER_S)
        except Missed as missed:
            self._break(str(missed))
        self._recover_s.append(time.monotonic() - began)

    async def _check_kept(
        self, effect: FaultEffect, before: ClusterState, after: ClusterState
    ) -> None:
        await asyncio.sleep(_SETTLE_S)
        after = await self._monitor.get_state() or after
        if lost := set(pids(before)) - set(pids(after)):
            self.troubles.append(
                f"{effect.text}: processes {sorted(lost)} were replaced for nothing"
            )

    async def end(self, event: str, moment: str) -> Cell:
        """Let the answers end, and judge."""
        load_result = compare(self._expected, await self._load.finish())
        if load_result.cut and not self._cuts:
            self.troubles.append(f"{load_result.cut} connections were cut by no ingress's end")
        if not load_result.answers:
            self.troubles.append("no answers")
        counter = await self._monitor.counter(_RESUBMITTED)
        return Cell(
            event=event,
            moment=moment,
            effects=self._deeds,
            in_flight=min(self._in_flight, default=0),
            load_result=load_result,
            recover_s=None if self.broken else max(self._recover_s, default=0.0),
            resubmitted=max(0, round(counter - self._resubmitted)),
            troubles=self.troubles,
        )

    def _break(self, trouble: str) -> None:
        self.broken = True
        self.troubles.append(trouble)


def print_cell(cell: Cell) -> None:
    """One line about a cell, as it ends."""
    took = "never" if cell.recover_s is None else f"{cell.recover_s:.1f} s"
    load_result = cell.load_result
    print(
        f"{'ok  ' if cell.good else 'FAIL'} {cell.event} in {cell.moment}: "
        f"{', '.join(cell.effects)}; {cell.in_flight} in flight, {load_result.answers} answers, "
        f"{load_result.failed} failed, {load_result.wrong} wrong, {load_result.cut} cut; "
        f"whole after {took}, longest pause {load_result.pause_s:.1f} s",
        flush=True,
    )
    for line in (*cell.troubles, *load_result.examples):
        print(f"     {line}", file=sys.stderr, flush=True)
