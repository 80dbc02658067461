"""The properties of channels that senders rely on, over ZeroMQ and over the simulated network."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from swell.coordinator.transport.channel import _LINGER_MS, _MAX_BURST
from tests.simulator.network.channel_worlds import (
    LONG_S,
    ChannelWorld,
    Seen,
    over_both,
    own,
    read_next,
    take,
    until,
)

# ---------------------------------------------------------------- messages


@over_both
async def test_messages_keep_their_order_both_ways(world: ChannelWorld, seen: Seen) -> None:
    inbox = world.inbox()
    outlet = world.outlet(seen(inbox.address))
    sent = [str(i) for i in range(500)]
    for message in sent:
        outlet.send(message)
    received = await take(world, inbox, len(sent))
    assert [message for _, message in received] == sent
    (peer,) = {peer for peer, _ in received}
    for message in sent:
        inbox.send(peer, message)
    assert [await read_next(world, outlet) for _ in sent] == sent


@over_both
async def test_each_peer_gets_its_own_answers(world: ChannelWorld, seen: Seen) -> None:
    inbox = world.inbox()
    outlets = [world.outlet(seen(inbox.address)) for _ in range(4)]
    for index, outlet in enumerate(outlets):
        outlet.send(str(index))
    received = await take(world, inbox, 4)
    assert len({peer for peer, _ in received}) == 4
    for peer, message in received:
        inbox.send(peer, f"answer {message}")
    for index, outlet in enumerate(outlets):
        assert await read_next(world, outlet) == f"answer {index}"
        assert await read_next(world, outlet, 0.01) is None


@over_both
async def test_an_inbox_drops_what_it_cannot_deliver(world: ChannelWorld, seen: Seen) -> None:
    """Messages to a peer that has gone, and to one that has not connected yet, are dropped, too."""

    inbox = world.inbox()
    inbox.send(b"peer", "before")
    first = world.outlet(seen(inbox.address), b"peer")
    first.send("x")
    assert await take(world, inbox, 1) == [(b"peer", "x")]
    first.close()
    await world.sleep(LONG_S)
    inbox.send(b"peer", "between")
    second = world.outlet(seen(inbox.address), b"peer")
    second.send("y")
    assert await take(world, inbox, 1) == [(b"peer", "y")]
    inbox.send(b"peer", "after")
    assert await read_next(world, second) == "after"


@over_both
async def test_an_outlet_keeps_its_messages_until_its_peer_connects(
    world: ChannelWorld, seen: Seen
) -> None:
    free = world.inbox(name=own("later-free"))
    port = int(free.address.tcp.rpartition(":")[2])
    free.close()
    outlet = world.outlet(seen(free.address))
    outlet.send("early")
    await world.sleep(LONG_S)
    inbox = world.inbox(name=own("later-free"), port=port)
    assert [message for _, message in await take(world, inbox, 1)] == ["early"]


@over_both
async def test_a_successor_at_the_same_address_receives_earlier_messages(
    world: ChannelWorld, seen: Seen
) -> None:
    first = world.inbox(name=own("succession"))
    port = int(first.address.tcp.rpartition(":")[2])
    outlet = world.outlet(seen(first.address), b"peer")
    outlet.send("x")
    await take(world, first, 1)
    first.close()
    await world.sleep(LONG_S)
    for message in ("y", "z"):
        outlet.send(message)
    second = world.inbox(name=own("succession"), port=port)
    assert await take(world, second, 2) == [(b"peer", "y"), (b"peer", "z")]


@over_both
async def test_frames_that_do_not_decode_are_skipped_and_counted(
    world: ChannelWorld, seen: Seen
) -> None:
    inbox = world.inbox()
    outlet = world.outlet(seen(inbox.address))
    bad = [b"", b"\xc1", b"\xa2\xff\xfe", msgspec.msgpack.encode(7), b"\xa1x\x00"]
    outlet.send("before")
    for frame in bad:
        outlet.send(msgspec.Raw(frame))
    outlet.send("after")
    received = await take(world, inbox, 2)
    assert [message for _, message in received] == ["before", "after"]
    assert inbox.malformed == len(bad)
    inbox.send(received[0][0], msgspec.Raw(b"\xc1"))
    inbox.send(received[0][0], "fine")
    assert [await read_next(world, outlet), await read_next(world, outlet)] == [None, "fine"]
    assert outlet.malformed == 1


@over_both
async def test_a_flood_is_received_in_parts(world: ChannelWorld, seen: Seen) -> None:
    inbox = world.inbox()
    outlet = world.outlet(seen(inbox.address))
    for i in range(_MAX_BURST + 10):
        outlet.send(str(i))
    await until(world, lambda: inbox.ready(0.0))
    await world.sleep(5 * LONG_S)
    assert len(list(inbox.take())) == _MAX_BURST
    assert inbox.ready(0.0)
    assert len(list(inbox.take())) == 10


# ---------------------------------------------------------------- channel ends


@over_both
async def test_messages_sent_right_before_closing_arrive(world: ChannelWorld, seen: Seen) -> None:
    inbox = world.inbox()
    outlet = world.outlet(seen(inbox.address))
    outlet.send("last")
    outlet.close()
    ((_, message),) = await take(world, inbox, 1)
    assert message == "last"
    peer_outlet = world.outlet(seen(inbox.address), b"peer")
    peer_outlet.send("x")
    await take(world, inbox, 1)
    inbox.send(b"peer", "last")
    inbox.close()
    assert await read_next(world, peer_outlet) == "last"


@pytest.mark.parametrize("comes_s", [0.0, 0.2 + _LINGER_MS / 1000])
@over_both
async def test_an_outlet_that_closes_tries_to_deliver_for_a_while(
    world: ChannelWorld, comes_s: float
) -> None:
    """A real outlet blocks while it closes, so another thread closes it."""

    free = world.inbox(name=own("linger"))
    port = int(free.address.tcp.rpartition(":")[2])
    free.close()
    outlet = world.outlet(free.address)
    outlet.send("late")
    closing = asyncio.create_task(asyncio.to_thread(outlet.close))
    await world.sleep(0.05 + comes_s)
    inbox = world.inbox(name=own("linger"), port=port)
    if comes_s == 0.0:
        assert len(await take(world, inbox, 1)) == 1
    else:
        await world.sleep(LONG_S)
        assert list(inbox.take()) == []
    await closing


@over_both
async def test_a_successor_waits_until_its_address_is_free(world: ChannelWorld, seen: Seen) -> None:
    """A real inbox blocks until its address is free, so another thread creates it."""

    first = world.inbox(name=own("taken"))
    port = int(first.address.tcp.rpartition(":")[2])
    making = asyncio.create_task(
        asyncio.to_thread(lambda: world.inbox(name=own("taken"), port=port))
    )
    await world.sleep(LONG_S)
    outlet = world.outlet(seen(first.address))
    outlet.send("x")
    ((_, message),) = await take(world, first, 1)
    assert message == "x"
    first.close()
    second = await making
    assert second.address == first.address
    await world.sleep(LONG_S)  # the outlet has noticed that the first inbox has closed
    outlet.send("y")
    ((_, message),) = await take(world, second, 1)
    assert message == "y"


# ---------------------------------------------------------------- event loops


@over_both
async def test_an_async_outlet_keeps_order_and_accepts_every_message(
    world: ChannelWorld, seen: Seen
) -> None:
    inbox = world.inbox()
    heard: list[str] = []
    outlet = world.async_outlet(seen(inbox.address), heard.append)
    for i in range(100):
        outlet.send(str(i))
    for peer, message in await take(world, inbox, 100):
        inbox.send(peer, message)
    await until(world, lambda: len(heard) >= 100)
    assert heard == [str(i) for i in range(100)]


@over_both
async def test_a_closing_async_outlet_delivers_sent_messages_and_drops_the_rest(
    world: ChannelWorld,
) -> None:
    inbox = world.inbox(name=own("dropped"))
    port = int(inbox.address.tcp.rpartition(":")[2])
    outlet = world.async_outlet(inbox.address, print)
    outlet.send("first")
    await take(world, inbox, 1)
    for i in range(10):
        outlet.send(str(i))
    outlet.close()
    assert len(await take(world, inbox, 10)) == 10
    inbox.close()
    late = world.async_outlet(inbox.address, print)
    late.send("never")
    late.close()
    await world.sleep(0.05)
    successor = world.inbox(name=own("dropped"), port=port)
    await world.sleep(LONG_S)
    assert list(successor.take()) == []


@over_both
async def test_an_outlet_closed_by_a_message_delivers_no_later_one(
    world: ChannelWorld, seen: Seen
) -> None:
    inbox = world.inbox()
    heard: list[str] = []

    def close(message: str) -> None:
        heard.append(message)
        outlet.close()

    outlet = world.async_outlet(seen(inbox.address), close)
    outlet.send("hello")
    ((peer, _),) = await take(world, inbox, 1)
    for i in range(3):
        inbox.send(peer, str(i))
    await until(world, lambda: bool(heard))
    await world.sleep(LONG_S)
    assert heard == ["0"]
