"""Groups of simulated engines that share experts: they form, step together, and break.

Invariant: a group forms when all engines of its plan have come to its store and reach each other:
no member has joined while two others do not.
An all-reduce returns at a member when all members have contributed their values and these have
reached it; packets that a cut holds back arrive after the cut. A member that leaves, is aborted or
dies breaks the group a moment later at each peer that it can reach; the other peers notice by a
timeout, or when they are aborted themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import combinations
from typing import Any

from swell.engine.executor import GroupBroken
from swell.worker.wire import GroupPlan
from tests.simulator.kernel.kernel import WORLD, Kernel
from tests.simulator.kernel.process import Process
from tests.simulator.network.network import Network

GROUP_TIMEOUT_S = 120.0
"""Equals `swell.worker.comm.mesh.GROUP_TIMEOUT_S`."""
_CONNECT_S = 20.0
"""Equals `swell.worker.comm.gloo_transport.CONNECT_S`."""
_POLL_S = 0.05
_DELAY_S = 0.0005
"""The delay from a member to its peers."""
_FORM_S = 0.05
"""The longest time to form a group after all members have come: connections, and experts that
move."""

Sums = tuple[int, int]
"""Number of engines that need another step, and number that vote for a pause."""


class SimMember:
    """One engine in one group."""

    def __init__(self, group: SimGroup, process: Process) -> None:
        self.group, self.process = group, process
        self.broken: str | None = None
        self.values: list[Sums] = []
        self.waiting: dict[int, asyncio.Future[Sums]] = {}

    def all_reduce(self, work: bool, pause: bool) -> asyncio.Future[Sums]:
        """Returns a future for the sums of this member's next step. The future raises
        GroupBroken."""
        future: asyncio.Future[Sums] = self.process.loop.create_future()
        future.add_done_callback(asyncio.Future.exception)  # nobody may await it
        if self.broken is not None:
            future.set_exception(GroupBroken(self.broken))
            return future
        self.waiting[len(self.values)] = future
        self.values.append((int(work), int(pause)))
        loop = self.process.loop
        loop.call_later(GROUP_TIMEOUT_S, self._time_out, future)
        self.group.deliver()
        return future

    def leave(self, reason: str) -> None:
        """Breaks the group at this member. The peers notice it."""
        if self.broken is not None:
            return
        self.broken = reason
        waiting, self.waiting = self.waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(GroupBroken(reason))
        self.group.on_left(self)

    def _time_out(self, future: asyncio.Future[Sums]) -> None:
        if not future.done():
            self.leave(f"a peer did not answer in {GROUP_TIMEOUT_S:g} s")


class SimGroup:
    """The group of one epoch at one store."""

    def __init__(self, groups: SimGroups, engines: int) -> None:
        self.engines = engines
        self.members: dict[int, SimMember] = {}
        """The members that have come, by index."""
        self._groups = groups

    def add(self, index: int, process: Process) -> SimMember:
        member = self.members[index] = SimMember(self, process)
        return member

    def deliver(self) -> None:
        """Delivers every result that is complete to each member that it reaches."""
        if len(self.members) < self.engines:
            return
        members = [self.members[index] for index in sorted(self.members)]
        known = min(len(member.values) for member in members)
        for member in members:
            for number in list(member.waiting):
                if number < known:
                    self._groups.later(self._deliver_one, member, number)

    def _deliver_one(self, member: SimMember, number: int) -> None:
        future = member.waiting.get(number)
        if future is None or not self._groups.reaches(self.members.values(), member):
            return
        del member.waiting[number]
        values = [peer.values[number] for peer in self.members.values()]
        if not future.done():
            future.set_result((sum(v[0] for v in values), sum(v[1] for v in values)))

    def on_left(self, member: SimMember) -> None:
        for _, peer in sorted(self.members.items()):
            if peer is not member:
                self._groups.later(self._break_one, member, peer)

    def _break_one(self, member: SimMember, peer: SimMember) -> None:
        """Delivers a connection reset to a peer. A peer that does not wait for anything notices it
        at its next step."""
        if self._groups.reaches([member], peer) and peer.process.alive:
            peer.leave(f"connection reset by {member.process.name} at {member.process.host}")

    def look_again(self) -> None:
        """Delivers pending results and breaks after the network has changed."""
        self.deliver()
        for member in self.members.values():
            if member.broken is not None:
                self.on_left(member)


class SimGroups:
    """All groups and stores of a cluster."""

    def __init__(self, kernel: Kernel, net: Network) -> None:
        self._kernel, self._net = kernel, net
        self._groups: dict[tuple[Any, int, bytes], SimGroup] = {}
        self._stores: dict[tuple[str, int], Process] = {}
        self._times = kernel.random("groups")
        net.on_change.append(self._on_change)

    def open_store(self, process: Process) -> tuple[str, int]:
        address = (process.host, self._net.free_port(process.host))
        self._stores[address] = process
        return address

    def later(self, call: Callable[..., None], *args: Any) -> None:
        self._kernel.at(self._kernel.now + _DELAY_S, WORLD, call, *args)

    def reaches(self, sources: Any, member: SimMember) -> bool:
        host = member.process.host
        return not any(self._net.is_cut(source.process.host, host) for source in sources)

    def _on_change(self) -> None:
        for group in list(self._groups.values()):
            group.look_again()

    async def form(
        self, process: Process, plan: GroupPlan, is_aborted: Callable[[], bool]
    ) -> SimMember:
        """Waits for the other engines of the plan and forms their group. Raises GroupBroken."""
        begun = process.time()
        if plan.engines == 1:
            return SimGroup(self, 1).add(0, process)
        store = plan.expert_store
        assert store is not None
        while not self._answers(store, process):
            await self._wait(begun, is_aborted, f"the store at {store} does not answer", [0])
        key = (store, plan.epoch, plan.expert_secret)
        group = self._groups.setdefault(key, SimGroup(self, plan.engines))
        assert group.engines == plan.engines, "two plans of one epoch"
        assert plan.index not in group.members, "it comes twice"
        member = group.add(plan.index, process)
        process.on_exit.append(lambda _process: member.leave("died"))
        try:
            while len(group.members) < group.engines:
                absent = sorted(set(range(group.engines)) - set(group.members))
                await self._wait(
                    begun,
                    is_aborted,
                    f"engines {absent} of {group.engines} did not connect",
                    absent,
                )
                if not self._answers(store, process):
                    raise GroupBroken(f"the store at {store} is gone")
            await self._connect(member, is_aborted)
        except GroupBroken as error:
            member.leave(str(error))
            raise
        return member

    async def _connect(self, member: SimMember, is_aborted: Callable[[], bool]) -> None:
        """Waits until all members reach each other, as the exchange of tokens in
        `swell.worker.comm.transport` does. A member names the peers that it did not reach, also
        if the group broke before."""
        begun = member.process.time()
        await asyncio.sleep(self._times.random() * _FORM_S)
        while True:
            if member.broken is not None:
                raise GroupBroken(member.broken, self._unreached(member))
            if is_aborted():
                raise GroupBroken("aborted", self._unreached(member))
            hosts = {peer.process.host for peer in member.group.members.values()}
            if not any(self._net.is_blocked(*pair) for pair in combinations(hosts, 2)):
                return
            if member.process.time() - begun > _CONNECT_S:
                absent = self._unreached(member)
                raise GroupBroken(f"no connection to {absent}, or between others", absent)
            await asyncio.sleep(_POLL_S)

    def _unreached(self, member: SimMember) -> list[int]:
        """Returns the indices of the peers that a member does not reach."""
        own = member.process.host
        peers = member.group.members.items()
        return [i for i, peer in peers if self._net.is_blocked(peer.process.host, own)]

    async def _wait(
        self, begun: float, is_aborted: Callable[[], bool], reason: str, absent: list[int]
    ) -> None:
        if is_aborted():
            raise GroupBroken("aborted", absent)
        await asyncio.sleep(_POLL_S)
        if asyncio.get_running_loop().time() - begun > GROUP_TIMEOUT_S:
            raise GroupBroken(f"{reason} in {GROUP_TIMEOUT_S:g} s", absent)

    def _answers(self, store: tuple[str, int], process: Process) -> bool:
        owner = self._stores[store]
        return owner.alive and not self._net.is_blocked(owner.host, process.host)
