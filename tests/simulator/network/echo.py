"""A small cluster for network tests: a server that answers requests, and clients."""

from __future__ import annotations

import msgspec

from swell.coordinator.transport.channel import ChannelKeys
from tests.simulator.kernel.kernel import Kernel
from tests.simulator.kernel.process import Process
from tests.simulator.kernel.runtime import SimRuntime
from tests.simulator.network.network import Network, NetworkOptions

KEYS = ChannelKeys(b"", b"")


class Request(msgspec.Struct, frozen=True, tag=0, array_like=True):
    number: int


class Reply(msgspec.Struct, frozen=True, tag=1, array_like=True):
    number: int


class EchoWorld:
    """A server on host0, and clients on host1, host2 and so on. `settle` waits until they are
    connected."""

    def __init__(
        self, clients: int = 1, options: NetworkOptions | None = None, seed: int = 0
    ) -> None:
        self.kernel = Kernel(seed)
        self.net = Network(self.kernel, options)
        self.server = Process(self.kernel, "server", "host0")
        self.received: list[tuple[float, int]] = []
        """Times at which the server received each number."""
        self.serve(self.server)
        self.clients = [Client(self, f"client{i}", f"host{i}") for i in range(1, clients + 1)]

    def serve(self, process: Process) -> None:
        runtime = SimRuntime(process, self.net)
        self.inbox = inbox = runtime.inbox(Request, KEYS, name="echo", port=5000)

        async def serve() -> None:
            while True:
                await runtime.ready(inbox, None)
                for peer, request in inbox.take():
                    self.received.append((self.kernel.now, request.number))
                    inbox.send(peer, Reply(request.number))

        self.kernel.soon(process, lambda: runtime.spawn("serve", serve()))

    def settle(self) -> None:
        """Gets an answer for each client, so that all are connected, and forgets these messages."""
        for client in self.clients:
            client.ask(0)
        self.kernel.run(self.kernel.now + 0.1)
        assert all(client.numbers() == [0] for client in self.clients)
        for client in self.clients:
            client.replies.clear()
        self.received.clear()

    def run(self, seconds: float) -> None:
        self.kernel.run(self.kernel.now + seconds)

    def numbers(self) -> list[int]:
        return [number for _, number in self.received]


class Client:
    """`replies`: the times at which it received each number."""

    def __init__(self, world: EchoWorld, name: str, host: str) -> None:
        self._kernel = world.kernel
        self.process = Process(world.kernel, name, host)
        self.replies: list[tuple[float, int]] = []
        runtime = SimRuntime(self.process, world.net)

        def take(reply: Reply) -> None:
            self.replies.append((world.kernel.now, reply.number))

        self.outlet = runtime.async_outlet(world.inbox.address, Reply, KEYS, take)

    def ask(self, number: int) -> None:
        self._kernel.soon(self.process, self.outlet.send, Request(number))

    def numbers(self) -> list[int]:
        return [number for _, number in self.replies]
