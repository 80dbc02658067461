"""Names that are found in Ray: which application owns them, and which actors are adopted."""

from __future__ import annotations

import pytest

from swell.cluster.control.engines.actor_names import (
    EngineName,
    candidates,
    choose,
    engine_tag,
    is_group,
    parse,
)
from swell.coordinator.roster import Member, Roster
from swell.coordinator.transport.channel import ChannelAddress

TAG = engine_tag("configuration", "keys")


def name(rank: int, start: str = "a", tag: str = TAG, app: str = "swell-app") -> EngineName:
    return EngineName(app, rank, tag, start)


def roster(**starts: int) -> Roster:
    members = (Member(int(r[1:]), ChannelAddress("m", "i", "t"), incarnation=n)
               for r, n in starts.items())  # fmt: skip
    return Roster(1, tuple(members))


def test_engine_names_parse_back_and_are_recognised_as_groups() -> None:
    one = name(12)
    assert parse(str(one), "swell-app") == one
    assert is_group(str(one), "swell-app") and is_group("swell-app-engine-12", "swell-app")
    assert not is_group("swell-app-engine-", "swell-app") and not is_group("12", "swell-app")


@pytest.mark.parametrize(
    "text",
    [
        "swell-app-engine-1",
        "swell-app-engine-x-tag-a",
        "swell-app-engine-1-tag-a",
        f"swell-app-engine-1-{TAG}-a-b",
        f"swell-other-engine-1-{TAG}-a",
        f"x-swell-app-engine-1-{TAG}-a",
        "coordinator-configuration",
        "",
    ],
)
def test_foreign_names_are_not_engines(text: str) -> None:
    assert parse(text, "swell-app") is None


def test_applications_with_a_common_name_prefix_are_separate() -> None:
    """Example: one application is called `app`, another one `app-engine`."""
    for app in ("app-engine", "app-engine-1", "another-app"):
        other = str(name(1, app=f"swell-{app}"))
        assert parse(other, "swell-app") is None and not is_group(other, "swell-app")
        assert not is_group(f"swell-{app}-engine-1", "swell-app")


def test_candidates_are_of_this_configuration_and_coordinator_and_have_a_group() -> None:
    ours, other, bare = name(0), name(1, tag=engine_tag("configuration", "others")), name(2)
    actors = [str(ours), str(other), str(bare), "coordinator-configuration"]
    assert candidates(actors, {str(ours), str(other)}, "swell-app", {TAG}) == [ours]


def test_a_roster_member_is_preferred_for_its_rank_then_a_ready_engine() -> None:
    first, second, third = name(0, "a"), name(0, "b"), name(0, "c")
    answers = {first: 5, second: 7, third: None}
    assert choose(answers, roster(r0=5)) == {0: first}
    assert choose(answers, roster(r0=7)) == {0: second}
    assert choose({first: 5, third: None}, Roster()) == {0: first}
    assert choose({third: None, name(1): 1}, Roster()) == {0: third, 1: name(1)}
