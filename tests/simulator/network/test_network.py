"""Network faults, and when each side of a connection notices them."""

from __future__ import annotations

import pytest

from tests.simulator.kernel.process import Process
from tests.simulator.network.connection import Side
from tests.simulator.network.echo import EchoWorld
from tests.simulator.network.network import NetworkOptions

HEARTBEAT_S, TIMEOUT_S, USER_TIMEOUT_S = 1.0, 2.0, 4.0
HEARTBEATS = NetworkOptions(heartbeat_s=HEARTBEAT_S, heartbeat_timeout_s=TIMEOUT_S)
USER_TIMEOUT = NetworkOptions(user_timeout_s=USER_TIMEOUT_S)


def closed_at(world: EchoWorld, side: Side, within_s: float = 30.0) -> float | None:
    """Returns after how many seconds the side has closed, or None."""
    begun = world.kernel.now
    while world.kernel.now < begun + within_s:
        if side.closed:
            return world.kernel.now - begun
        world.run(0.01)
    return None


def test_a_message_takes_one_delay_and_a_reply_two() -> None:
    world = EchoWorld()
    world.settle()
    begun = world.kernel.now
    world.clients[0].ask(1)
    world.run(1.0)
    ((arrived, _),), ((answered, _),) = world.received, world.clients[0].replies
    delay_s = world.net.options.delay_s
    assert 0.5 * delay_s <= arrived - begun <= 1.5 * delay_s
    assert 1.0 * delay_s <= answered - begun <= 3.0 * delay_s


def test_a_slow_host_is_slow_both_ways() -> None:
    world = EchoWorld(clients=2)
    world.settle()
    world.net.slow("host1", 0.2)
    begun = world.kernel.now
    for client in world.clients:
        client.ask(1)
    world.run(1.0)
    slow, fast = (client.replies[0][0] - begun for client in world.clients)
    assert slow == pytest.approx(0.4, abs=0.01) and fast < 0.01
    world.net.slow("host1", 0.0)
    begun = world.kernel.now
    world.clients[0].ask(2)
    world.run(1.0)
    assert world.clients[0].replies[-1][0] - begun < 0.01


def test_a_drop_loses_messages_in_flight_and_the_outlet_reconnects() -> None:
    world = EchoWorld(clients=2)
    world.settle()
    client, other = world.clients
    world.net.aim("Request", 1, world.net.drop)
    client.ask(1)
    other.ask(1)
    world.run(0.05)
    client.ask(2)
    world.run(0.04)
    assert client.numbers() == [] and other.numbers() == [1]
    world.run(0.1)
    assert client.numbers() == [2]
    assert world.numbers() == [1, 2]


@pytest.mark.parametrize("kind", ["Request", "Reply"])
def test_a_fault_can_hit_a_message_in_flight(kind: str) -> None:
    world = EchoWorld()
    world.settle()
    hits: list[tuple[float, str]] = []

    def action(side: Side) -> None:
        hits.append((world.kernel.now, side.process.name))
        world.net.drop(side)

    world.net.aim(kind, 3, action)
    for number in range(5):
        world.kernel.at(0.2 + number, world.clients[0].process, world.clients[0].ask, number)
    world.run(10.0)
    assert world.numbers() == ([0, 1, 3, 4] if kind == "Request" else [0, 1, 2, 3, 4])
    assert world.clients[0].numbers() == [0, 1, 3, 4]
    ((when, who),) = hits
    assert 2.2 < when < 2.2 + 4 * world.net.options.delay_s
    assert who == ("client1" if kind == "Request" else "server")
    assert world.net.aims == {}


def test_a_short_cut_delays_and_loses_nothing() -> None:
    world = EchoWorld(options=HEARTBEATS)
    world.settle()
    (side,) = world.net.connections("client1")
    client = world.clients[0]
    client.ask(1)
    world.run(0.0001)
    world.net.isolate("host1", ["host0"])
    client.ask(2)
    world.run(1.0)
    assert world.numbers() == []
    world.net.reunite("host1", ["host0"])
    world.run(2.0)
    assert world.numbers() == client.numbers() == [1, 2]
    assert not side.closed


def test_a_direction_heals_with_its_last_cut() -> None:
    world = EchoWorld(options=HEARTBEATS)
    world.settle()
    client = world.clients[0]
    world.net.isolate("host1", ["host0"])
    world.net.cut("host1", "host0")
    world.net.reunite("host1", ["host0"])
    assert world.net.cuts.keys() == {("host1", "host0")}
    client.ask(1)
    world.run(0.5)
    assert world.numbers() == []
    world.net.heal("host1", "host0")
    world.net.heal("host1", "host0")
    world.run(2.0)
    assert world.numbers() == client.numbers() == [1] and world.net.cuts == {}


def test_a_long_cut_ends_the_connection_separately_on_each_side() -> None:
    world = EchoWorld(options=HEARTBEATS)
    world.settle()
    (side,) = world.net.connections("client1")
    world.net.isolate("host1", ["host0"])
    client = world.clients[0]
    client.ask(1)
    times = [closed_at(world, each) for each in (side, side.peer)]
    assert times[0] is not None and TIMEOUT_S <= times[0] <= TIMEOUT_S + HEARTBEAT_S + 0.01
    assert side.peer.closed
    client.ask(2)
    world.run(10.0)
    world.net.reunite("host1", ["host0"])
    world.run(20.0)
    assert client.numbers() == [2]


@pytest.mark.parametrize("cut_s", [7.3, 12.9, 33.7, 70.1])
def test_a_restored_link_is_used_soon_after_any_outage(cut_s: float) -> None:
    world = EchoWorld(options=HEARTBEATS)
    world.settle()
    world.net.isolate("host1", ["host0"])
    world.run(cut_s)
    client = world.clients[0]
    client.ask(1)
    world.net.reunite("host1", ["host0"])
    world.run(HEARTBEATS.connect_s)
    assert client.numbers() == [1]


def test_without_heartbeats_only_the_side_that_sends_notices_a_cut() -> None:
    world = EchoWorld(options=USER_TIMEOUT)
    world.settle()
    (side,) = world.net.connections("client1")
    world.net.isolate("host1", ["host0"])
    world.run(5.0)
    assert not side.closed
    world.clients[0].ask(1)
    assert closed_at(world, side) == pytest.approx(USER_TIMEOUT_S, abs=0.02)
    world.run(20.0)
    assert side.peer.open, "a half-open connection"
    world.net.reunite("host1", ["host0"])
    world.run(40.0)
    assert side.peer.closed, "its outlet has connected again"
    world.clients[0].ask(2)
    world.run(0.1)
    assert world.clients[0].numbers() == [2]


def test_a_half_cut_loses_acknowledgements_too() -> None:
    """The client's message arrives, but its acknowledgement does not, so the client gives up."""
    world = EchoWorld(options=USER_TIMEOUT)
    world.settle()
    (side,) = world.net.connections("client1")
    world.net.cut("host0", "host1")
    world.clients[0].ask(1)
    world.run(1.0)
    assert world.numbers() == [1] and world.clients[0].numbers() == []
    assert closed_at(world, side) == pytest.approx(USER_TIMEOUT_S - 1.0, abs=0.02)
    world.run(1.0)
    assert side.peer.closed


@pytest.mark.parametrize("terminates", [False, True])
def test_messages_into_a_half_open_connection_cause_a_reset(terminates: bool) -> None:
    """The host of the side that has closed answers, also after the process has terminated."""
    world = EchoWorld(options=USER_TIMEOUT)
    world.settle()
    (side,) = world.net.connections("client1")
    world.net.isolate("host1", ["host0"])
    world.clients[0].ask(1)
    assert closed_at(world, side) is not None
    world.clients[0].outlet.close()
    if terminates:
        world.clients[0].process.kill()
    world.net.reunite("host1", ["host0"])
    world.run(10.0)
    assert side.peer.open and world.numbers() == []
    side.peer.send(b"\x92\x01\x07")
    world.run(0.01)
    assert side.peer.closed


@pytest.mark.parametrize("options", [None, HEARTBEATS])
def test_only_heartbeats_detect_a_stopped_process(options: NetworkOptions | None) -> None:
    world = EchoWorld(options=options)
    world.settle()
    (side,) = world.net.connections("client1")
    world.server.stop()
    world.clients[0].ask(1)
    world.run(5.0)
    assert side.closed == (options is not None)
    world.clients[0].ask(2)
    world.run(5.0)
    world.server.resume()
    world.run(5.0)
    assert world.numbers() == [1, 2]  # the server's host has kept what had arrived
    assert world.clients[0].numbers() == ([1, 2] if options is None else [2])


def test_a_killed_process_closes_its_connections_and_some_messages_arrive() -> None:
    arrived = set()
    for seed in range(30):
        world = EchoWorld(seed=seed)
        world.settle()
        client = world.clients[0]
        for number in range(4):
            client.ask(number)
        world.kernel.soon(client.process, client.process.kill)
        world.run(1.0)
        assert world.numbers() == list(range(len(world.numbers())))
        arrived.add(len(world.numbers()))
        assert world.net.connections("client1") == []
    assert arrived == {0, 1, 2, 3, 4}


def test_flushed_messages_always_arrive() -> None:
    for seed in range(30):
        world = EchoWorld(seed=seed)
        world.settle()
        client = world.clients[0]
        for number in range(4):
            client.ask(number)
        world.kernel.soon(client.process, client.outlet.side.flush)
        client.ask(4)
        world.kernel.soon(client.process, client.process.kill)
        world.run(1.0)
        assert world.numbers()[:4] == [0, 1, 2, 3]


def test_a_successor_is_found_at_the_same_address() -> None:
    world = EchoWorld()
    world.settle()
    world.server.kill()
    world.run(1.0)
    world.clients[0].ask(1)
    world.run(1.0)
    world.serve(Process(world.kernel, "server.2", "host0"))
    world.run(0.2)
    assert world.clients[0].numbers() == [1]


def test_a_lost_host_sends_no_end_of_its_connections() -> None:
    world = EchoWorld(options=HEARTBEATS)
    world.settle()
    (side,) = world.net.connections("client1")
    hosts, processes = ["host0"], [world.clients[0].process]
    world.clients[0].ask(1)
    world.kernel.at(world.kernel.now, world.server, lambda: None)
    world.run(0.00005)
    world.net.lose_host("host1", hosts, processes)
    noticed_s = closed_at(world, side.peer)
    assert noticed_s is not None and TIMEOUT_S <= noticed_s <= TIMEOUT_S + HEARTBEAT_S + 0.01
    assert world.numbers() == []


def test_a_process_that_dies_during_a_handshake_is_harmless() -> None:
    """The process dies at each moment of the handshake, and the client then finds its successor."""
    for moment in range(1, 40):
        world = EchoWorld(seed=moment)
        client = world.clients[0]
        client.ask(1)
        world.run(moment * 5e-5)
        world.server.kill()
        world.run(0.5)
        world.serve(Process(world.kernel, "server.2", "host0"))
        client.ask(2)
        world.run(1.0)
        assert client.numbers()[-1:] == [2], moment


def test_a_cut_during_a_handshake_only_delays_it() -> None:
    for moment in range(1, 40):
        world = EchoWorld(seed=moment, options=HEARTBEATS)
        client = world.clients[0]
        client.ask(1)
        world.run(moment * 5e-5)
        world.net.isolate("host1", ["host0"])
        world.run(10.0)
        world.net.reunite("host1", ["host0"])
        world.run(60.0)
        client.ask(2)
        world.run(1.0)
        assert client.numbers()[-1:] == [2], moment


def test_messages_in_flight_from_a_lost_host_never_arrive() -> None:
    """This holds even if the host returns before anyone has noticed its loss."""
    world = EchoWorld(options=HEARTBEATS)
    world.settle()
    (side,) = world.net.connections("client1")
    world.clients[0].ask(1)
    world.run(0.00005)
    world.net.lose_host("host1", ["host0"], [world.clients[0].process])
    world.run(0.5)
    world.net.reunite("host1", ["host0"])
    world.run(1.0)
    assert world.numbers() == [] and side.peer.closed
