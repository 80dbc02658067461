"""The address and the ports on which a host listens."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest

from swell.cluster.control.ray.http_port import claim_port
from swell.configs.runtime import network
from swell.configs.runtime.network import (
    NCCL_INTERFACE,
    PortsTakenError,
    bind_free_port,
    coordinator_ports,
    host_address,
    ingress_ports,
    listening_socket,
    other_ports,
    parse_ports,
    prepare_for_nccl,
)
from swell.configs.schema import ConfigError, load

NODE = "10.0.0.9"
HOST = "127.0.0.9"
ADDRESSES = [
    ("lo", "127.0.0.1"),
    ("eth0", NODE),
    ("eth1", "10.1.0.9"),
    ("eth1", "10.1.7.9"),
    ("eth2", "10.2.0.9"),
]


@pytest.fixture
def four_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "addresses", lambda: ADDRESSES)


@pytest.mark.parametrize(
    ("interface", "address"),
    [
        (None, NODE),
        ("eth1", "10.1.0.9"),
        ("lo", "127.0.0.1"),
        ("10.1.7.0/24", "10.1.7.9"),
        ("10.2.0.9/16", "10.2.0.9"),
        ("10.2.0.9/32", "10.2.0.9"),
        ("127.0.0.0/8", "127.0.0.1"),
        ("0.0.0.0/0", NODE),
    ],
)
def test_the_address_of_an_interface(four_networks, interface, address) -> None:
    assert host_address(interface, NODE) == address


def test_a_missing_interface_is_named_with_the_existing_ones(four_networks) -> None:
    with pytest.raises(ValueError, match=rf"'eth7' .*{NODE}; its addresses: lo .*, eth1 10\.1"):
        host_address("eth7", NODE)


def test_this_host_knows_its_addresses() -> None:
    assert ("lo", "127.0.0.1") in network.addresses()
    assert host_address("lo", NODE) == "127.0.0.1"
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("192.0.2.254") is None


@pytest.mark.parametrize(
    ("interface", "before", "after"),
    [
        (None, None, "=eth1"),
        (None, "eth0,eth1", "eth0,eth1"),
        ("eth1", "eth0,eth1", "=eth1"),
    ],
)
def test_nccl_uses_the_interface_of_the_host(
    four_networks, monkeypatch, interface, before, after
) -> None:
    """NCCL uses the interface of the host; a user's own setting is kept, unless the cluster
    configures an interface."""
    monkeypatch.setenv(NCCL_INTERFACE, before or "")
    if before is None:
        monkeypatch.delenv(NCCL_INTERFACE)
    prepare_for_nccl("10.1.0.9", interface)
    assert os.environ[NCCL_INTERFACE] == after


def test_nccl_chooses_an_interface_if_none_has_the_address(four_networks, monkeypatch) -> None:
    monkeypatch.setenv(NCCL_INTERFACE, "eth0")
    prepare_for_nccl("203.0.113.1", "eth1")
    assert os.environ[NCCL_INTERFACE] == "eth0"


# -------------------------------------------------------------------------------- ports


def test_a_range_is_used_up_before_it_is_refused() -> None:
    ports = parse_ports("21400-21415")
    free = other_ports(ports)
    sockets = [listening_socket(HOST, free) for _ in range(12)]
    try:
        assert {taken.getsockname() for taken in sockets} == {(HOST, p) for p in ports[4:]}
        with pytest.raises(PortsTakenError, match=f"21404-21415 is free on {HOST}"):
            listening_socket(HOST, free)
    finally:
        for taken in sockets:
            taken.close()
    assert (coordinator_ports(ports), ingress_ports(ports)) == (ports[:2], ports[2:4])


def test_without_a_range_the_system_chooses() -> None:
    with listening_socket(HOST, None) as taken:
        assert taken.getsockname()[0] == HOST
        assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_a_foreign_address_is_not_reported_as_a_port_in_use() -> None:
    def bind(port: int) -> None:
        raise OSError(99, "Cannot assign requested address")

    with pytest.raises(OSError, match="assign"):
        bind_free_port(HOST, range(21_400, 21_416), bind)


# -------------------------------------------------------------------------------- the keys


@pytest.mark.parametrize("interface", ["eth1", "bond0.4001", "10.1.0.0/16", "10.1.2.3/32"])
def test_valid_interfaces(interface: str) -> None:
    config = load({"model": {"path": "m"}, "cluster": {"interface": interface}})
    assert config.cluster.interface == interface


@pytest.mark.parametrize("interface", ["", "a name", "x" * 16, "10.1.0.0/33", "fd00::/8", "eth0/1"])
def test_invalid_interfaces(interface: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.interface=.*write the name"):
        load({"model": {"path": "m"}, "cluster": {"interface": interface}})


def test_valid_port_ranges_exclude_the_ports_of_serve() -> None:
    source = {"model": {"path": "m"}, "cluster": {"ports": "21000-21099"}}
    assert load(source).cluster.port_range == range(21_000, 21_100)
    assert load({"model": {"path": "m"}}).cluster.port_range is None
    for key in ("port", "proxy_port"):
        with pytest.raises(ConfigError, match=rf"serve\.{key}=21050 is in cluster\.ports"):
            load(source, {f"serve.{key}": 21_050})
    assert load(source, {"serve.port": 21_012}).serve.port == 21_012
    with pytest.raises(ConfigError, match="21012 is in"):
        load(source, {"serve.proxy_port": 21_012})


def test_a_configuration_whose_port_was_chosen_can_be_read_again() -> None:
    source = {"model": {"path": "m"}, "cluster": {"ports": "21000-21099"}}
    for chosen in (
        claim_port(load(source, {"serve.port": 0})),
        claim_port(load({"model": {"path": "m"}}, {"serve.port": 0})),
    ):
        assert load(msgspec.to_builtins(chosen)) == chosen


@pytest.mark.parametrize(
    "ports", ["", "21000", "21000-21014", "21099-21000", "100-900", "65000-65536", "21000-", "a-b"]
)
def test_invalid_port_ranges(ports: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.ports=.*at least 16 ports from 1024 to"):
        load({"model": {"path": "m"}, "cluster": {"ports": ports}})
