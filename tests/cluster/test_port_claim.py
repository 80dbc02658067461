"""A port of a host belongs to one application at a time, across restarts of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.port_claim import LEASE_S, PortClaim, PortClaims
from swell.configs.schema import ConfigError
from tests.support.deadlines import HANG_S

PORT = 8000
SLEEPER = "import sys; print(flush=True); sys.stdin.read()"
CLAIMER = """
import os, sys
from pathlib import Path
from swell.cluster.port_claim import PortClaims
from swell.configs.schema import ConfigError
try:
    held = PortClaims(Path(sys.argv[1])).claim("127.0.0.1", 8000, sys.argv[2], os.getpid())
    print("held", flush=True)
    sys.stdin.read()
except ConfigError as error:
    print(error, flush=True)
"""


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def claims(tmp_path: Path, clock: Clock) -> PortClaims:
    return PortClaims(tmp_path / "ports", clock)


def process(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[str]]:
    """A process that outlives the ingresses."""
    with process(SLEEPER) as found:
        assert found.stdout is not None
        found.stdout.readline()
        yield found
        found.kill()


def end(found: subprocess.Popen[str]) -> None:
    found.send_signal(signal.SIGKILL)
    found.wait(HANG_S)


def is_free(claims: PortClaims, owner: str, host: str = "127.0.0.1", port: int = PORT) -> bool:
    try:
        claims.check(host, port, owner.__eq__)
    except ConfigError:
        return False
    return True


def test_only_ingresses_of_one_application_share_a_port(
    claims: PortClaims,
) -> None:
    held = [claims.claim("127.0.0.1", PORT, "a", os.getpid()) for _ in range(3)]
    with pytest.raises(ConfigError, match=r"serve\.port=8000 on 127.0.0.1 is in use .*\(a, proc"):
        claims.claim("127.0.0.1", PORT, "b", os.getpid())
    held.pop().release(ends=True)
    assert not is_free(claims, "b")
    for one in held:
        one.release(ends=True)
    claims.claim("127.0.0.1", PORT, "b", os.getpid()).release(ends=True)


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        ("127.0.0.1", "0.0.0.0", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("::", "0.0.0.0", True),
        ("localhost", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", False),
    ],
)
def test_a_wildcard_host_overlaps_all_hosts(
    claims: PortClaims, first: str, second: str, overlap: bool
) -> None:
    held = claims.claim(first, PORT, "a", os.getpid())
    assert is_free(claims, "b", second) is not overlap
    assert is_free(claims, "b", first, PORT + 1)
    held.release(ends=True)


def test_a_replaced_ingress_finds_its_port(
    claims: PortClaims, clock: Clock, raylet: subprocess.Popen[str]
) -> None:
    """Between the two ingresses, nobody holds the claim and nobody else gets it."""
    claims.claim("127.0.0.1", PORT, "a", raylet.pid).release(ends=False)
    clock.now_s += LEASE_S - 1
    assert not is_free(claims, "b") and is_free(claims, "a")
    again = claims.claim("127.0.0.1", PORT, "a", raylet.pid)
    clock.now_s += 100 * LEASE_S
    assert not is_free(claims, "b"), "held"
    again.renew()
    again.release(ends=False)
    clock.now_s += LEASE_S - 1
    assert not is_free(claims, "b")
    clock.now_s += 2
    assert is_free(claims, "b")


def test_a_claim_is_released_with_its_ray(
    claims: PortClaims, raylet: subprocess.Popen[str]
) -> None:
    claims.claim("127.0.0.1", PORT, "a", raylet.pid).release(ends=False)
    assert not is_free(claims, "b")
    end(raylet)
    assert is_free(claims, "b")


def test_a_claim_is_renamed_to_its_ray(claims: PortClaims) -> None:
    held = claims.claim("127.0.0.1", PORT, "start 7", os.getpid())
    held.set_owner("a")
    assert is_free(claims, "a") and not is_free(claims, "b") and not is_free(claims, "start 7")
    held.release(ends=True)


def test_exactly_one_of_concurrent_processes_claims_the_port(tmp_path: Path) -> None:
    folder = str(tmp_path / "ports")
    found = [process(CLAIMER, folder, f"app {number}") for number in range(4)]
    try:
        lines = [one.stdout.readline().strip() for one in found if one.stdout is not None]
        (winner,) = [one for one, line in zip(found, lines, strict=True) if line == "held"]
        assert sum("in use by another application" in line for line in lines) == 3
        end(winner)
        assert is_free(PortClaims(Path(folder)), "next")
    finally:
        for one in found:
            one.kill()
            one.communicate(timeout=HANG_S)


@pytest.mark.parametrize("text", [b"", b"{", b'{"owner": 1}'])
def test_an_incompletely_written_claim_has_no_owner(
    claims: PortClaims, tmp_path: Path, text: bytes
) -> None:
    held = claims.claim("127.0.0.1", PORT, "a", os.getpid())
    (path,) = (tmp_path / "ports").glob(f"*-{PORT}-*")
    path.write_bytes(text)
    assert not is_free(claims, "b"), "it is held"
    held.release(ends=False)
    assert is_free(claims, "b")


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "ports"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="belongs to another user"):
        PortClaims(folder).check("127.0.0.1", PORT, lambda _: False)


HOSTS = ["127.0.0.1", "127.0.0.2", "0.0.0.0"]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("claim"), st.sampled_from("ab"), st.sampled_from(HOSTS)),
        st.tuples(st.sampled_from(["die", "end", "renew"]), st.integers(0, 9), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([LEASE_S / 2, LEASE_S + 1]), st.none()),
    ),
    max_size=20,
)


@settings(deadline=None)
@given(STEPS)
def test_two_owners_never_have_overlapping_claims(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    """Compared with a model that records who holds each claim, and until when a released claim is
    reserved."""
    clock = Clock()
    claims = PortClaims(tmp_path_factory.mktemp("claims") / "ports", clock)
    held: list[tuple[PortClaim, str, str]] = []
    kept: dict[str, tuple[str, float]] = {}  # host -> owner, end

    def may(owner: str, host: str) -> bool:
        others = [(o, h) for _, o, h in held if o != owner]
        others += [(o, h) for h, (o, until_s) in kept.items() if o != owner and until_s > clock()]
        return not any(h == host or HOSTS[2] in (h, host) for _, h in others)

    for step, what, host in steps:
        if step == "claim":
            assert is_free(claims, what, host) == may(what, host)
            if may(what, host):
                held.append((claims.claim(host, PORT, what, os.getpid()), what, host))
                kept[host] = (what, clock() + LEASE_S)
        elif step == "wait":
            clock.now_s += what
        elif held:
            one, owner, where = held[what % len(held)]
            if step == "renew":
                one.renew()
                kept[where] = (owner, clock() + LEASE_S)
                continue
            held.remove((one, owner, where))
            one.release(ends=step == "end")
            if step == "end" and not any(h == where for _, _, h in held):
                kept.pop(where, None)
    for one, _, _ in held:
        one.release(ends=True)
