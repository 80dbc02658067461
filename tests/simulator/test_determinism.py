"""A seed determines a run up to its last event, for every hash seed."""

from __future__ import annotations

import pytest

from tests.simulator.kernel.hash_seeds import outputs
from tests.simulator.network.echo import EchoWorld
from tests.simulator.network.network import NetworkOptions


def run(seed: int) -> tuple[int, int, float, list[list[int]]]:
    """Runs some faults. Returns the checksum, the number of events, the time, and the answers that
    the clients received."""
    options = NetworkOptions(heartbeat_s=0.5, heartbeat_timeout_s=0.5, user_timeout_s=2.0)
    world = EchoWorld(clients=3, options=options, seed=seed)
    chance = world.kernel.random("faults")
    world.net.aim("Request", chance.randint(5, 20), world.net.drop)
    world.net.aim("Reply", chance.randint(5, 20), world.net.drop)
    for number in range(40):
        world.run(0.1 * chance.random())
        world.clients[number % 3].ask(number)
        if number == 15:
            world.net.isolate("host2", ["host0"])
        if number == 25:
            world.net.reunite("host2", ["host0"])
            world.server.stop()
        if number == 30:
            world.server.resume()
    world.run(20.0)
    kernel = world.kernel
    return kernel.checksum, kernel.events, kernel.now, [c.numbers() for c in world.clients]


def test_a_repeated_run_is_identical() -> None:
    for seed in range(5):
        assert run(seed) == run(seed)
    assert len({run(seed)[0] for seed in range(20)}) == 20


@pytest.mark.slow
def test_a_run_is_the_same_for_every_hash_seed() -> None:
    code = "from tests.simulator.test_determinism import run; print([run(s) for s in range(10)])"
    printed = outputs(code, ("0", "1", "4711"))
    assert len(printed) == 1 and printed != {""}


def test_removing_a_fault_does_not_change_another_client() -> None:
    """The messages of a client keep their times if a fault of another client is left out."""

    def times(dropped: bool) -> list[tuple[float, int]]:
        world = EchoWorld(clients=2)
        for number in range(5):
            world.clients[0].ask(number)
            world.clients[1].ask(number)
            world.run(0.1)
            if dropped and number == 2:
                for side in world.net.connections("client1"):
                    world.net.drop(side)
        return world.clients[1].replies

    assert times(dropped=True) == times(dropped=False)
