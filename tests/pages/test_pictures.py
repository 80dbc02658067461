"""The pictures of `docs/design/` are those that the generator draws, legible, and true."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest

from swell.coordinator import roster as rosters
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.transport.channel import ChannelAddress
from tests.pages.pictures import (
    CHAR_PX,
    FOLDER,
    LINE_PX,
    PICTURES,
    Arrow,
    Box,
    Picture,
    membership,
    svg,
)


@pytest.mark.parametrize("name", PICTURES)
def test_each_picture_equals_its_generated_version(name: str) -> None:
    drawn = (FOLDER / f"{name}.svg").read_text()
    assert drawn == svg(PICTURES[name]()), "run python -m tests.pages.pictures"
    ElementTree.fromstring(drawn)


def test_every_picture_is_on_a_page_of_its_folder() -> None:
    text = "".join(page.read_text() for page in FOLDER.glob("*.md"))
    assert [path.name for path in FOLDER.glob("*.svg") if f"]({path.name})" not in text] == []


def text_box(text: str, middle: tuple[float, float]) -> Box:
    """Returns the place that a line of text takes."""
    width, (x, y) = len(text) * CHAR_PX, middle
    return Box(x - width / 2, y - LINE_PX * 0.75, width, LINE_PX, text)


def overlap(one: Box, other: Box) -> bool:
    apart_x = one.x + one.width <= other.x or other.x + other.width <= one.x
    apart_y = one.y + one.height <= other.y or other.y + other.height <= one.y
    return not (apart_x or apart_y)


def inside(one: Box, other: Box) -> bool:
    return (
        other.x <= one.x
        and one.x + one.width <= other.x + other.width
        and other.y <= one.y
        and one.y + one.height <= other.y + other.height
    )


def faults(picture: Picture) -> list[str]:
    """Returns the texts that do not fit, and the things that cover each other."""
    ground = Box(0, 0, picture.width, picture.height, "")
    boxes = [box for box in picture.boxes if box.kind != "group"]
    groups = [box for box in picture.boxes if box.kind == "group"]
    labels = [text_box(a.text, a.text_at) for a in picture.arrows if a.text]
    lines = [
        (text_box(line, box.line_at(i)), box)
        for box in picture.boxes
        for i, line in enumerate(box.lines)
    ]
    return [
        *(f"{line.text} leaves its box" for line, box in lines if not inside(line, box)),
        *(
            f"{one.text} leaves the picture"
            for one in [*boxes, *groups, *labels]
            if not inside(one, ground)
        ),
        *(
            f"{a.text} covers {b.text}"
            for a, b in combinations([*boxes, *labels], 2)
            if overlap(a, b)
        ),
        *(
            f"{group.text} cuts {box.text}"
            for group in groups
            for box in [*boxes, *labels]
            if overlap(group, box) and not inside(box, group)
        ),
    ]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_legible(name: str) -> None:
    assert faults(PICTURES[name]()) == []


def test_faults_are_found() -> None:
    small, other = Box(0, 0, 30, 20, "a long text"), Box(20, 0, 60, 20, "b")
    found = faults(Picture("", 100, 50, [small, other], [Arrow((90, 40), (99, 40), "outside")]))
    assert found == [
        "a long text leaves its box",
        "outside leaves the picture",
        "a long text covers b",
    ]
    group = Box(0, 0, 50, 50, "g", "group")
    assert faults(Picture("", 100, 50, [group, Box(40, 25, 40, 20, "b")], [])) == ["g cuts b"]


# ------------------------------------------------------------------------------ states of a member


def edges(picture: Picture) -> set[tuple[str, str, str]]:
    """Returns (state, change, next state) of each arrow that joins two boxes."""

    def at(point: tuple[float, float]) -> str | None:
        x, y = point
        touching = (
            box.text
            for box in picture.boxes
            if box.x <= x <= box.x + box.width and box.y <= y <= box.y + box.height
        )
        return next(touching, None)

    found = ((at(one.start), one.text, at(one.end)) for one in picture.arrows)
    return {(a, text, b) for a, text, b in found if a is not None and b is not None}


def member(state: MemberState, *, leaves: bool = False) -> Roster:
    one = Member(0, ChannelAddress("", "", ""), state, incarnation=7, leaves=leaves)
    return rosters.of(1, [one])


def state_after(change: Callable[..., Roster], roster: Roster) -> str:
    after = change(roster, [0])
    if after.members:
        return str(after.members[0].state)
    return "left" if 7 in after.left else "lost"


def test_the_picture_has_the_member_states_of_the_roster() -> None:
    drawn = edges(membership())
    states = {box.text for box in membership().boxes}
    assert states == {*map(str, MemberState), "ready", "left", "lost"}
    changes: list[Any] = [rosters.leave, rosters.cancel_leave, rosters.end_repair]
    real = {
        (str(state), change.__name__, after)
        for state in MemberState
        for leaves in (False, True)
        for change in changes
        if (after := state_after(change, member(state, leaves=leaves))) != state
    }
    assert {edge for edge in drawn if edge[1] in {one.__name__ for one in changes}} == real
    for state, change, after in drawn:
        if change in ("detach", "remove"):
            assert state_after(getattr(rosters, change), member(MemberState(state))) == after
