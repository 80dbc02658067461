"""The pairs of hosts that try to connect to each other, and their ports."""

from __future__ import annotations

import pytest

from swell.cluster.cli.doctor.facts import HTTP, Listener, Part, Target
from swell.cluster.cli.doctor.probes.links import pairs, parts, targets
from swell.configs.schema import load
from swell.coordinator.transport.ports import CHOSEN_PORTS

ADDRESS = "10.0.0.7"


@pytest.mark.parametrize("size", range(18))
def test_every_pair_of_few_hosts_is_tried_in_both_directions(size: int) -> None:
    hosts = [f"h{number:02}" for number in range(size)]
    assert pairs(hosts) == [(a, b) for a in hosts for b in hosts if a != b]


@pytest.mark.parametrize("size", [18, 19, 33, 64, 100, 1000])
def test_each_of_many_hosts_has_a_bounded_number_of_peers(size: int) -> None:
    hosts = [f"h{number:04}" for number in range(size)]
    found = pairs(hosts)
    assert len(set(found)) == len(found)
    assert {(b, a) for a, b in found} == set(found)
    for host in hosts:
        assert 15 <= sum(source == host for source, _ in found) <= 16
    for border in range(1, size):
        """Some link crosses every boundary between two groups of hosts, so a faulty switch between
        them is found."""
        assert any(source < hosts[border] <= target for source, target in found)


def test_the_port_shares_agree_with_those_of_the_sockets() -> None:
    config = load("owner/name", {"cluster.ports": "21000-21063", "serve.host": "0.0.0.0"})
    assert parts(config, ADDRESS) == [
        Part(name="coordinator", first=21000, last=21007, host=ADDRESS),
        Part(name="engines", first=21016, last=21063, host=ADDRESS),
        Part(name=HTTP, first=8000, last=8000, host="0.0.0.0"),
    ]


def test_an_ingress_without_a_configured_port_uses_the_second_eighth() -> None:
    overrides = {"cluster.ports": "21000-21063", "serve.host": "interface", "serve.port": 0}
    found = parts(load("owner/name", overrides), ADDRESS)[-1]
    assert found == Part(name=HTTP, first=21008, last=21015, host=ADDRESS)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::", "::1"])
def test_addresses_that_no_other_host_can_reach_are_not_tried(host: str) -> None:
    config = load("owner/name", {"serve.host": host})
    assert [part.name for part in parts(config, ADDRESS)] == ["coordinator", "engines"]


def test_without_a_range_any_port_is_used() -> None:
    assert parts(None, ADDRESS) == [
        Part(name="coordinator", first=CHOSEN_PORTS[0], last=CHOSEN_PORTS[-1], host=ADDRESS),
        Part(name="engines", first=0, last=0, host=ADDRESS),
    ]


@pytest.mark.parametrize("key", ["parallel.pipeline", "parallel.expert"])
def test_groups_across_hosts_use_ephemeral_ports(key: str) -> None:
    value = 2 if key == "parallel.pipeline" else True
    config = load("owner/name", {"cluster.ports": "21000-21063", key: value})
    assert Part(name="collectives", first=0, last=0, host=ADDRESS) in parts(config, ADDRESS)


def test_a_host_connects_to_the_open_ports_of_the_others() -> None:
    listeners = {
        "a": [Listener(part="engines", host="10.0.0.1", port=21020)],
        "b": [
            Listener(part="engines", host="10.0.0.2", error="none is free"),
            Listener(part=HTTP, host="0.0.0.0", port=8000),
        ],
    }
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2"}
    assert targets(listeners, addresses, pairs(["a", "b"])) == {
        "a": [Target(name="b", part=HTTP, host="10.0.0.2", port=8000)],
        "b": [Target(name="a", part="engines", host="10.0.0.1", port=21020)],
    }
