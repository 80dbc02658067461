"""The network between processes: listening addresses, connections, and faults.

An outlet whose connection is refused tries again after `reconnect_s`. If its packets vanish, it
sends a second one after 1 s, as TCP does, and starts a new attempt after `connect_s`. All these
attempts fail until the network changes, so such outlets wait in a list, and each change computes
the time of the next attempt of each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swell.coordinator.transport.channel import CONNECT_S, ChannelAddress
from swell.coordinator.transport.handshakes import HANDSHAKE_S
from tests.simulator.kernel.kernel import WORLD, Kernel
from tests.simulator.kernel.process import Process
from tests.simulator.network.connection import READY, Side

if TYPE_CHECKING:
    from tests.simulator.network.channel import SimInbox, SimOutlet

_FIRST_PORT = 20_000
_BIND_RETRY_S = 0.05
_SECOND_PACKET_S = 1.0
"""The time after which TCP repeats the first packet of a connection."""
_LONGEST_RETRANSMISSION_S = 120.0

Path = tuple[str, str]
"""A direction: source host and target host."""


@dataclass(frozen=True)
class NetworkOptions:
    """Options of the network; times are in seconds."""

    delay_s: float = 0.0003
    """Average one-way delay."""
    reconnect_s: float = 0.1
    """ZMQ_RECONNECT_IVL."""
    connect_s: float = CONNECT_S
    """ZMQ_CONNECT_TIMEOUT."""
    handshake_timeout_s: float = HANDSHAKE_S
    """ZMQ_HANDSHAKE_IVL."""
    heartbeat_s: float | None = None
    """ZMQ_HEARTBEAT_IVL; None: an idle side never notices that the other one has gone."""
    heartbeat_timeout_s: float = 1.0
    """ZMQ_HEARTBEAT_TIMEOUT."""
    user_timeout_s: float | None = None
    """TCP_USER_TIMEOUT; None: longer than any run (about 15 minutes on Linux)."""
    linger_s: float = 1.0
    """How long a closing outlet tries to deliver its messages."""

    @classmethod
    def with_silence(cls, silence_s: float) -> NetworkOptions:
        """Returns the options that channels set: a connection closes after this many seconds
        without data."""
        heartbeat_s = silence_s / 4
        timeout_s = silence_s - heartbeat_s
        return cls(heartbeat_s=heartbeat_s, heartbeat_timeout_s=timeout_s, user_timeout_s=timeout_s)


@dataclass
class _Aim:
    left: int
    action: Callable[[Any], None]


class Network:
    """Holds all connections, in the order in which they were created."""

    def __init__(self, kernel: Kernel, options: NetworkOptions | None = None) -> None:
        self.kernel = kernel
        self.options = options or NetworkOptions()
        self.delay_s = self.options.delay_s
        self.cuts: dict[Path, float] = {}
        """Directions in which nothing arrives, and since when."""
        self._num_cuts: Counter[Path] = Counter()
        """For each of these directions, the number of cuts that have not ended."""
        self.slow_hosts: dict[str, float] = {}
        """Seconds added to each packet to or from a host."""
        self.disturbed_at: dict[str, float] = {}
        """When the packets of each host last began or ceased to be slow or lost."""
        self.lossy_hosts: dict[str, int] = {}
        """Hosts that lose some packets in both directions, with the number of faults that cause
        it."""
        self.aims: dict[str, list[_Aim]] = {}
        self._sides: dict[Side, None] = {}
        """The outlet's side of each connection."""
        self._bound: dict[str, SimInbox] = {}
        self._waiting: dict[SimOutlet, None] = {}
        self._handshakes: dict[Side, SimInbox] = {}
        """Outlets' sides whose inbox has not completed the handshake."""
        self._ports: dict[str, int] = {}
        self._random = kernel.random("network")
        self.on_change: list[Callable[[], None]] = []
        """Called when a direction was cut or has healed."""
        self.made: dict[str, int] = {}
        """Number of connection attempts that reached an inbox, by label."""

    # ---------------------------------------------------------------- listening

    def free_port(self, host: str) -> int:
        self._ports[host] = self._ports.get(host, _FIRST_PORT - 1) + 1
        return self._ports[host]

    def bind(self, inbox: SimInbox) -> None:
        """Makes the inbox listen at both of its addresses as soon as they are free."""
        if inbox.closed or not inbox.process.alive:
            return
        keys = _endpoints(inbox.address)
        if any(key in self._bound for key in keys):
            now = self.kernel.now
            self.kernel.at(now + _BIND_RETRY_S, inbox.process, self.bind, inbox)
            return
        for key in keys:
            self._bound[key] = inbox
        self._retry_waiting()

    def unbind(self, inbox: SimInbox) -> None:
        for key in _endpoints(inbox.address):
            if self._bound.get(key) is inbox:
                del self._bound[key]
        for client in [c for c, whose in self._handshakes.items() if whose is inbox]:
            blocked = self.is_blocked(client.process.host, inbox.process.host)
            after_s = self.options.handshake_timeout_s if blocked else self.options.delay_s
            self.kernel.at(self.kernel.now + after_s, client.process, self._refuse, client)

    # ---------------------------------------------------------------- connecting

    def connect(self, outlet: SimOutlet) -> None:
        """Tries to connect an outlet without a connection. Runs in the outlet's process."""
        if not outlet.needs_connection():
            return
        inbox = self._find(outlet)
        outlet.was_blocked = self.is_blocked(outlet.process.host, _host(outlet.address))
        if inbox is None or outlet.was_blocked:
            self._waiting.setdefault(outlet)
            return
        self._waiting.pop(outlet, None)
        options, kernel = self.options, self.kernel
        number = self.made[outlet.label] = self.made.get(outlet.label, 0) + 1
        label = f"{outlet.label}#{number}"
        client = Side(self, outlet, outlet.identity, label, connected_here=True)
        delay_s = 3 * options.delay_s * (0.5 + client._random.random())
        if self.slow_hosts:
            delay_s += 3 * self.extra_delay_s(outlet.process.host, inbox.process.host)
        outlet.side = client
        self._handshakes[client] = inbox
        kernel.at(kernel.now + delay_s, inbox.process, self._accept, client, inbox, label)
        if inbox.process.stopped:  # its host accepts the connection, and nothing follows
            at = kernel.now + options.handshake_timeout_s
            kernel.at(at, outlet.process, self._refuse, client)

    def _accept(self, client: Side, inbox: SimInbox, label: str) -> None:
        """Completes the handshake on the inbox's side. Runs in the inbox's process."""
        if self._handshakes.get(client) is not inbox:
            return
        if client.closed or self.is_blocked(client.process.host, inbox.process.host):
            self.kernel.soon(client.process, self._refuse, client)
            return
        del self._handshakes[client]
        server = Side(self, inbox, client.identity, f"{label} back", connected_here=False)
        client.peer, server.peer = server, client
        self._sides[client] = None
        server.open = True
        inbox.on_open(server)
        server.mark(READY)

    def _refuse(self, client: Side) -> None:
        """Fails the handshake. Runs in the outlet's process."""
        if self._handshakes.pop(client, None) is not None and not client.closed:
            client.closed = True
            client.end.on_closed(client)

    def _find(self, outlet: SimOutlet) -> SimInbox | None:
        address = outlet.address
        near = address.machine == outlet.process.host
        return self._bound.get(_endpoints(address)[0 if near else 1])

    def retry_later(self, outlet: SimOutlet) -> None:
        """Schedules the next attempt of an outlet whose connection has closed."""
        outlet.trying_since = at = self.kernel.now + self.options.reconnect_s
        self.kernel.at(at, outlet.process, self.connect, outlet)

    def _retry_waiting(self) -> None:
        """Schedules the next attempt of each waiting outlet after the network has changed."""
        now, reconnect_s = self.kernel.now, self.options.reconnect_s
        waiting, self._waiting = self._waiting, {}
        for outlet in waiting:
            tried_s = now - outlet.trying_since
            if outlet.was_blocked:
                attempt_s = self.options.connect_s + reconnect_s
                spent_s = tried_s % attempt_s
                next_s = _SECOND_PACKET_S if spent_s <= _SECOND_PACKET_S else attempt_s
                after_s = tried_s - spent_s + next_s
            else:
                after_s = math.ceil(tried_s / reconnect_s) * reconnect_s
            self.kernel.at(outlet.trying_since + after_s, outlet.process, self.connect, outlet)

    def forget(self, side: Side) -> None:
        """Removes a connection after both of its sides have closed."""
        self._sides.pop(side if side.connected_here else side.peer, None)

    # ---------------------------------------------------------------- faults

    def connections(self, first: str, second: str = "") -> list[Side]:
        """Returns the outlets' sides of the connections between processes whose names have these
        prefixes."""

        def fits(side: Side) -> bool:
            here, there = side.process.name, side.peer.process.name
            return (here.startswith(first) and there.startswith(second)) or (
                here.startswith(second) and there.startswith(first)
            )

        return [side for side in self._sides if fits(side)]

    def drop(self, side: Side) -> None:
        """Resets both sides of a connection: all messages in flight are lost."""
        self.kernel.trace(b"dropped " + side.label)
        for each in (side, side.peer):
            each.lose_all()
            self.kernel.soon(each.process, each.close, False)

    def cut(self, source: str, target: str) -> None:
        """Blocks everything from one host to another one, until each of its cuts has ended."""
        if source == target:
            return
        self._num_cuts[source, target] += 1
        if (source, target) in self.cuts:
            return
        self.kernel.trace(f"cut {source}>{target}".encode())
        self.cuts[source, target] = self.kernel.now
        for side in self._directed(source, target):
            side.cut()
        self._changed()

    def heal(self, source: str, target: str) -> None:
        """Ends one cut, if there is one. After the last one, frames that were held back arrive at
        TCP's next attempt, unless their side has closed."""
        if (source, target) not in self.cuts:
            return
        self._num_cuts[source, target] -= 1
        if self._num_cuts[source, target]:
            return
        kernel, since = self.kernel, self.cuts.pop((source, target))
        kernel.trace(f"healed {source}>{target}".encode())
        longest_s = min(kernel.now - since, _LONGEST_RETRANSMISSION_S)
        for side in self._directed(source, target):
            again_s = self._random.random() * longest_s
            receiver = side.peer.process
            kernel.at(kernel.now + again_s, receiver if receiver.alive else WORLD, side.release)
        self._retry_waiting()
        self._changed()

    def isolate(self, host: str, hosts: list[str]) -> None:
        """Cuts one host off from others in both directions."""
        for other in hosts:
            self.cut(host, other)
            self.cut(other, host)

    def reunite(self, host: str, hosts: list[str]) -> None:
        for other in hosts:
            self.heal(host, other)
            self.heal(other, host)

    def lose_host(self, host: str, hosts: list[str], processes: list[Process]) -> None:
        """Makes a host lose its power: other hosts are not told that its connections have closed.
        `reunite` brings it back, empty."""
        self.isolate(host, hosts)
        for process in processes:
            if process.host == host:
                process.kill()
        for client in self._sides:
            for side in (client, client.peer):
                if side.process.host == host:
                    side.lose_all()

    def slow(self, host: str, extra_s: float) -> None:
        """Adds a delay to each packet to or from a host; 0 removes it."""
        self.disturbed_at[host] = self.kernel.now
        self.slow_hosts[host] = extra_s
        if not extra_s:
            del self.slow_hosts[host]

    def lose_packets(self, host: str, reasons: int) -> None:
        """Loses some packets to and from a host, which TCP sends again. `reasons`: 1 adds a cause
        of losses, -1 removes one."""
        self.disturbed_at[host] = self.kernel.now
        self.lossy_hosts[host] = self.lossy_hosts.get(host, 0) + reasons
        if not self.lossy_hosts[host]:
            del self.lossy_hosts[host]

    def aim(self, kind: str, count: int, action: Callable[[Any], None]) -> None:
        """Calls `action` while the `count`-th message of a kind from now on is in flight, with the
        side that has sent it; None: it is a call through Ray. `kind`: the name of the message's
        type, or of the called method."""
        self.aims.setdefault(kind, []).append(_Aim(count, action))

    def on_sent(self, kind: str, side: Side | None, arrives_at: float) -> None:
        now = self.kernel.now
        for aim in list(self.aims.get(kind, ())):
            aim.left -= 1
            if aim.left == 0:
                self.kernel.at((now + arrives_at) / 2, WORLD, aim.action, side)
                self.aims[kind].remove(aim)
        if kind in self.aims and not self.aims[kind]:
            del self.aims[kind]

    # ---------------------------------------------------------------- paths

    def _changed(self) -> None:
        for call in self.on_change:
            call()

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cuts

    def is_blocked(self, one: str, other: str) -> bool:
        return bool(self.cuts) and ((one, other) in self.cuts or (other, one) in self.cuts)

    def extra_delay_s(self, source: str, target: str) -> float:
        if source == target:
            return 0.0
        return self.slow_hosts.get(source, 0.0) + self.slow_hosts.get(target, 0.0)

    def is_lossy(self, source: str, target: str) -> bool:
        return source != target and (source in self.lossy_hosts or target in self.lossy_hosts)

    def _directed(self, source: str, target: str) -> list[Side]:
        both = [each for side in self._sides for each in (side, side.peer)]
        return [s for s in both if (s.process.host, s.peer.process.host) == (source, target)]


def _host(address: ChannelAddress) -> str:
    return address.tcp.removeprefix("tcp://").rpartition(":")[0]


def _endpoints(address: ChannelAddress) -> tuple[str, str]:
    """Returns the name on the inbox's machine, and the address for other machines."""
    return f"{address.machine} {address.ipc}", address.tcp
