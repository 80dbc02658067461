"""One cluster under trial: a fault in a given moment, or many in a row, and what became of the
answers.

    whole --- load, moment --- fault --- whole again --- settle --- compare

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

from swell.cluster.api.admin.protocol import ClusterState, ModelList
from swell.cluster.cli.http_client import Client
from tests.faults.cluster_monitor import AlreadyPassed, ClusterMonitor, NotReached, pids
from tests.faults.fault_types import Fault, FaultEffect
from tests.faults.load import (
    Answer,
    Load,
    LoadRequest,
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
"""Load after that: late effects show, and a false stall would have been reported."""
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
    """The outcome of one fault in one moment, or of a row of faults."""

    fault: str
    moment: str
    """`after X` if X was over before it could be seen."""
    effects: list[str]
    in_flight: int
    """Requests, when the fault came; of a row the fewest."""
    result: LoadResult
    recover_s: float | None
    """From the fault to full capacity; of a row the longest; None if it was not reached."""
    resubmitted: int
    """By the counters of all ingresses; a coordinator that dies forgets those of past ones."""
    troubles: list[str]

    @property
    def good(self) -> bool:
        return not (self.troubles or self.result.failed or self.result.wrong)


class Trial:
    """A cluster that is started on use, and replaced after a fault that it did not survive."""

    def __init__(self, setup: Setup, streams: int, seed: int) -> None:
        self.setup = setup
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
        """Stop the cluster in order. Raises ClusterFailed if that does not end well."""
        cluster, self._cluster, self._monitor = self._cluster, None, None
        if cluster is not None:
            cluster.stop()

    def cell(self, fault: Fault, moment: Moment) -> Cell:
        """One fault in one moment. Raises ClusterFailed, ReferenceFailed."""
        return self._run(lambda monitor: self._cell(monitor, fault, moment))

    def row(self, name: str, faults: Sequence[Fault], shape: Shape) -> Cell:
        """Many faults under one load, each once the cluster is whole again."""
        return self._run(lambda monitor: self._row(monitor, name, faults, shape))

    def storm(self, name: str, faults: Sequence[Fault], shape: Shape) -> Cell:
        """Many faults under one load, one every two seconds, whole or not."""
        return self._run(lambda monitor: self._storm(monitor, name, faults, shape))

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

    async def _cell(self, monitor: ClusterMonitor, fault: Fault, moment: Moment) -> Cell:
        record, load = await self._begin(monitor, moment.shape)
        when = moment.name
        try:
            await moment.reach(monitor, load)
        except AlreadyPassed:
            when = f"after {moment.name}"
        except NotReached as error:
            record.troubles.append(f"the moment was not reached: {error}")
        await record.inject_and_wait(fault)
        await asyncio.sleep(_SETTLE_S)
        return await record.end(fault.name, when)

    async def _row(
        self, monitor: ClusterMonitor, name: str, faults: Sequence[Fault], shape: Shape
    ) -> Cell:
        record, load = await self._begin(monitor, shape)
        load.start()
        for fault in faults:
            await asyncio.sleep(_BETWEEN_S)
            await record.inject_and_wait(fault)
            if record.broken:
                break
        await asyncio.sleep(_SETTLE_S)
        return await record.end(name, "decode")

    async def _storm(
        self, monitor: ClusterMonitor, name: str, faults: Sequence[Fault], shape: Shape
    ) -> Cell:
        record, load = await self._begin(monitor, shape)
        load.start()
        for fault in faults:
            await asyncio.sleep(_BETWEEN_S)
            await record.inject(fault)
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
                await monitor.post("/admin/scale", {"engines": self._engines})
            await monitor.until_whole({self._engines}, RECOVER_S)
        except NotReached as error:
            raise ClusterFailed(f"not whole before the fault: {error}") from None
        requests, answers = await self._reference(monitor.cluster.url, shape)
        load = Load([monitor.cluster.url], requests, self._streams)
        resubmitted = await monitor.counter(_RESUBMITTED)
        return _Record(monitor, load, self._rng, answers, resubmitted), load

    async def _reference(self, url: str, shape: Shape) -> tuple[list[LoadRequest], list[Answer]]:
        """Requests and their right answers, from a cluster without faults."""
        if shape not in self._oracle:
            model = (await Client(url).get("/v1/models", ModelList)).data[0].id
            requests = make_requests(model, self._streams, shape, self._seed)
            self._oracle[shape] = requests, await reference(url, requests)
        return self._oracle[shape]


class _Record:
    """Faults, effects and troubles under one load."""

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
        self._effects: list[str] = []
        self._in_flight: list[int] = []
        self._recover_s: list[float] = []
        self._cuts = False

    async def inject_and_wait(self, fault: Fault) -> None:
        """Cause it and wait for full capacity."""
        before = await self._monitor.get_state()
        if before is None:
            self._break(f"{fault.name}: no answer from /admin/cluster")
            return
        self._in_flight.append(len(self._load.open))
        began = time.monotonic()
        self._cuts |= fault.cuts_connections
        try:
            effect = await fault.act(self._monitor, before, self._rng)
            self._effects.append(effect.text)
            if not self._load.busy:
                self._load.start()
            after = await self._monitor.until_whole(effect.targets, RECOVER_S, effect.victims)
        except (NotReached, ProcessLookupError) as error:
            self._break(f"{fault.name}: {error}")
            return
        self._recover_s.append(time.monotonic() - began)
        if effect.expects_no_restart:
            await self._check_kept(effect, before, after)

    async def inject(self, fault: Fault) -> None:
        """Cause it in any state of the cluster. A fault without a victim, or one that is refused,
        is recorded in brackets and is no trouble."""
        before = await self._monitor.get_state()
        self._in_flight.append(len(self._load.open))
        self._cuts |= fault.cuts_connections
        try:
            if before is None:
                raise NotReached("no answer from /admin/cluster")
            self._effects.append((await fault.act(self._monitor, before, self._rng)).text)
        except (NotReached, ProcessLookupError, IndexError) as error:
            self._effects.append(f"({fault.name}: {error})")

    async def recover(self) -> None:
        """Wait for full capacity, at the size of the last request."""
        began = time.monotonic()
        try:
            while (state := await self._monitor.get_state()) is None:
                await asyncio.sleep(_SETTLE_S)
            await self._monitor.until_whole({state.target}, RECOVER_S)
        except NotReached as error:
            self._break(str(error))
        self._recover_s.append(time.monotonic() - began)

    async def _check_kept(
        self, effect: FaultEffect, before: ClusterState, after: ClusterState
    ) -> None:
        await asyncio.sleep(_SETTLE_S)
        after = await self._monitor.get_state() or after
        if lost := set(pids(before)) - set(pids(after)):
            self.troubles.append(
                f"{effect.text}: processes {sorted(lost)} were replaced without need"
            )

    async def end(self, fault: str, moment: str) -> Cell:
        """Wait for the answers to end, and compare them."""
        result = compare(self._expected, await self._load.finish())
        if result.cut and not self._cuts:
            self.troubles.append(f"{result.cut} connections were cut by no ingress's end")
        if not result.answers:
            self.troubles.append("no answers")
        counter = await self._monitor.counter(_RESUBMITTED)
        return Cell(
            fault=fault,
            moment=moment,
            effects=self._effects,
            in_flight=min(self._in_flight, default=0),
            result=result,
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
    result = cell.result
    print(
        f"{'ok  ' if cell.good else 'FAIL'} {cell.fault} in {cell.moment}: "
        f"{', '.join(cell.effects)}; {cell.in_flight} in flight, {result.answers} answers, "
        f"{result.failed} failed, {result.wrong} wrong, {result.cut} cut; "
        f"whole after {took}, longest pause {result.pause_s:.1f} s",
        flush=True,
    )
    for line in (*cell.troubles, *result.examples):
        print(f"     {line}", file=sys.stderr, flush=True)
