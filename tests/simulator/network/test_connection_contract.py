"""Connections that break, both over ZeroMQ with a TCP proxy and over the simulated network."""

from __future__ import annotations

import pytest

from tests.simulator.network.channel_worlds import (
    LONG_S,
    ChannelWorld,
    Seen,
    over_both,
    read_next,
    take,
    until,
    until_reached,
)
from tests.simulator.network.tcp_proxy import Direction

SILENCE_S = 1.0
NOTICED_S = 2 * SILENCE_S

impatient = pytest.mark.parametrize("silence_s", [SILENCE_S])


# ---------------------------------------------------------------- connections that break


@over_both
async def test_a_reset_loses_only_messages_in_flight(world: ChannelWorld) -> None:
    """This holds in both directions. Nobody is told; the outlet connects again after 100 ms, with
    the same identity."""

    inbox = world.inbox()
    wire = world.wire(inbox)
    outlet = world.outlet(wire.address, b"peer")
    outlet.send("before")
    assert await take(world, inbox, 1) == [(b"peer", "before")]
    wire.hold("up", "down")
    outlet.send("lost")
    inbox.send(b"peer", "lost")
    await world.sleep(LONG_S)
    wire.reset()
    await world.sleep(0.05)
    outlet.send("kept")
    inbox.send(b"peer", "dropped: not connected")
    assert list(inbox.take()) == []
    wire.release()
    assert await take(world, inbox, 1) == [(b"peer", "kept")]
    inbox.send(b"peer", "after")
    assert await read_next(world, outlet) == "after"


@over_both
async def test_delayed_messages_arrive_in_order(world: ChannelWorld) -> None:
    inbox = world.inbox()
    wire = world.wire(inbox)
    outlet = world.outlet(wire.address, b"peer")
    outlet.send("0")
    assert await take(world, inbox, 1) == [(b"peer", "0")]
    wire.hold("up", "down")
    for i in range(1, 20):
        outlet.send(str(i))
        inbox.send(b"peer", str(i))
    await world.sleep(LONG_S)
    assert list(inbox.take()) == [] and not outlet.ready(0.0)
    wire.release()
    outlet.send("20")
    received = await take(world, inbox, 20)
    assert [message for _, message in received] == [str(i) for i in range(1, 21)]
    assert [await read_next(world, outlet) for _ in range(19)] == [str(i) for i in range(1, 20)]
    assert wire.connections == 1


@pytest.mark.parametrize("held", ["up", "down"])
@over_both
async def test_a_half_open_connection_is_detected_late(
    world: ChannelWorld, held: Direction
) -> None:
    inbox = world.inbox()
    wire = world.wire(inbox)
    outlet = world.outlet(wire.address, b"peer")
    outlet.send("x")
    await take(world, inbox, 1)
    wire.hold(held)
    outlet.send("up")
    inbox.send(b"peer", "down")
    await world.sleep(NOTICED_S)
    arrived = [message for _, message in inbox.take()]
    assert arrived == (["up"] if held == "down" else [])
    assert outlet.ready(0.0) == (held == "up")
    assert wire.connections == 1


@impatient
@over_both
async def test_heartbeats_keep_an_idle_connection(world: ChannelWorld) -> None:
    inbox = world.inbox()
    wire = world.wire(inbox)
    outlet = world.outlet(wire.address, b"peer")
    outlet.send("x")
    await take(world, inbox, 1)
    await world.sleep(2 * NOTICED_S)
    inbox.send(b"peer", "y")
    assert await read_next(world, outlet) == "y"
    assert wire.connections == 1


@impatient
@over_both
async def test_only_the_silent_side_closes_the_connection(world: ChannelWorld) -> None:
    """The inbox still hears the outlet, and closes the connection only when it receives the
    outlet's close. What the inbox sends into the half-open connection is lost."""

    inbox = world.inbox()
    wire = world.wire(inbox)
    outlet = world.outlet(wire.address, b"peer")
    outlet.send("x")
    await take(world, inbox, 1)
    wire.hold("down")
    inbox.send(b"peer", "lost")
    await world.sleep(SILENCE_S / 4)
    outlet.send("still heard")
    assert await take(world, inbox, 1) == [(b"peer", "still heard")]
    await world.sleep(NOTICED_S)
    outlet.send("kept")
    wire.release()
    assert await take(world, inbox, 1) == [(b"peer", "kept")]
    inbox.send(b"peer", "after")
    assert await read_next(world, outlet) == "after"


@impatient
@over_both
async def test_the_other_side_of_a_half_cut_detects_it_by_the_disconnect(
    world: ChannelWorld,
) -> None:
    """Nothing arrives from the outlet, so the inbox gives up; the other direction still works."""

    inbox = world.inbox()
    wire = world.wire(inbox)
    outlet = world.outlet(wire.address, b"peer")
    outlet.send("x")
    await take(world, inbox, 1)
    wire.hold("up")
    outlet.send("lost")
    await world.sleep(NOTICED_S)
    inbox.send(b"peer", "dropped: not connected")
    wire.release()
    outlet.send("kept")
    assert await take(world, inbox, 1) == [(b"peer", "kept")]
    inbox.send(b"peer", "after")
    assert await read_next(world, outlet) == "after"


# ---------------------------------------------------------------- identities


@over_both
async def test_the_newest_connection_of_an_identity_takes_over_and_unread_messages_are_lost(
    world: ChannelWorld, seen: Seen
) -> None:
    inbox = world.inbox()
    first = world.outlet(seen(inbox.address), b"peer")
    first.send("0")
    await take(world, inbox, 1)
    for i in range(3):
        first.send(str(i))
    await world.sleep(LONG_S)  # polling the inbox would read the first message
    second = world.outlet(seen(inbox.address), b"peer")
    await until_reached(world, inbox, b"peer", second)
    while (
        await read_next(world, first, 0.02) is not None
    ):  # the first outlet got some of these messages
        pass
    second.send("new")
    assert await take(world, inbox, 1) == [(b"peer", "new")]
    inbox.send(b"peer", "to the newest")
    assert await read_next(world, second) == "to the newest"
    assert await read_next(world, first, 0.02) is None


@pytest.mark.parametrize("returns", [False, True])
@over_both
async def test_messages_received_before_a_disconnect_can_be_read(
    world: ChannelWorld, returns: bool
) -> None:
    """They are read under another identity if the outlet has connected again by then."""

    inbox = world.inbox()
    wire = world.wire(inbox)
    outlet = world.outlet(wire.address, b"peer")
    outlet.send("0")
    await take(world, inbox, 1)
    for i in range(1, 4):
        outlet.send(str(i))
    await world.sleep(LONG_S)
    wire.hold("up", "down")  # the outlet cannot connect again yet
    wire.reset()
    await world.sleep(0.05)
    if returns:
        wire.release()
        await until_reached(world, inbox, b"peer", outlet)
        outlet.send("new")
    received = await take(world, inbox, 4 if returns else 3)
    old = [(peer, message) for peer, message in received if message != "new"]
    assert [message for _, message in old] == ["1", "2", "3"]
    assert len({peer for peer, _ in old}) == 1
    assert (old[0][0] == b"peer") == (not returns)
    assert ((b"peer", "new") in received) == returns


@over_both
async def test_an_async_outlet_knows_whether_it_is_connected(world: ChannelWorld) -> None:
    inbox = world.inbox()
    wire = world.wire(inbox)
    outlet = world.async_outlet(wire.address, print)
    assert not outlet.is_connected()
    await until(world, outlet.is_connected)
    wire.hold("up", "down")
    wire.reset()
    await until(world, lambda: not outlet.is_connected())
    wire.release()
    await until(world, outlet.is_connected)
    inbox.close()
    await until(world, lambda: not outlet.is_connected())
