"""Names of engines in Ray, and which of the engines found there are adopted or are orphans. Pure.

Each start has a unique name, so a name that Ray is still removing does not block another start. An
actor or placement group with a name of this cluster that its manager does not know is an orphan.

    swell-app - engine - 3 - 0f3a..91 - 7c01d2e4
    namespace            rank  tag      start

The tag is a digest of the version's weights lineage and of the coordinator's key: an engine with
another tag cannot be used here. The engine itself says which version of its lineage it runs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass

from swell.coordinator.roster import Roster

_ENGINE = "engine"
_TAG_DIGITS = 12
_HEX = re.compile(f"[0-9a-f]{{{_TAG_DIGITS}}}")


@dataclass(frozen=True, order=True)
class EngineName:
    """One start of one engine: the name of its actor and of its placement group."""

    namespace: str
    rank: int
    tag: str
    start: str

    def __str__(self) -> str:
        return f"{self.namespace}-{_ENGINE}-{self.rank}-{self.tag}-{self.start}"


def parse(text: str, namespace: str) -> EngineName | None:
    """Parses a name; None: it is not an engine of this namespace, or has an unknown format."""
    head, _, tail = text.partition(f"{namespace}-{_ENGINE}-")
    parts = tail.split("-")
    if head or len(parts) != 3 or not parts[0].isdecimal() or not _HEX.fullmatch(parts[1]):
        return None
    return EngineName(namespace, int(parts[0]), parts[1], parts[2])


def is_group(text: str, namespace: str) -> bool:
    """Whether a placement group belongs to this namespace; Ray does not have namespaces for groups.
    Earlier releases used names with only the rank."""
    rank = text.removeprefix(f"{namespace}-{_ENGINE}-")
    return parse(text, namespace) is not None or (rank != text and rank.isdecimal())


def engine_tag(weights_lineage: str, coordinator: str) -> str:
    """Returns the tag of engines of this lineage whose coordinator has this public key."""
    return hashlib.sha256(f"{weights_lineage} {coordinator}".encode()).hexdigest()[:_TAG_DIGITS]


def candidates(
    actors: Iterable[str], groups: Collection[str], namespace: str, tags: Container[str]
) -> list[EngineName]:
    """Engines that may be adopted: they have one of our tags, and their placement group exists."""
    names = (parse(actor, namespace) for actor in actors if actor in groups)
    return sorted(name for name in names if name is not None and name.tag in tags)


def find_orphans(
    actors: Iterable[str], groups: Iterable[str], namespace: str, known: Collection[str] = ()
) -> list[str]:
    """Returns the names that a manager must terminate, sorted: all actors of its namespace and all
    groups of its engines that are not in `known`."""
    ours = {*actors, *(name for name in groups if is_group(name, namespace))}
    return sorted(ours.difference(known))


def choose(answers: Mapping[EngineName, int | None], roster: Roster) -> dict[int, EngineName]:
    """Chooses one engine for each rank. `answers`: the engines that have answered, with their
    incarnation, or None while they load. Engines in the roster are preferred, then those that are
    ready."""

    def priority(name: EngineName) -> tuple[bool, bool]:
        start = answers[name]
        return start is not None and roster.find(name.rank, start) is not None, start is not None

    ordered = sorted(answers, key=lambda name: (priority(name), name))
    chosen = {name.rank: name for name in ordered}
    return dict(sorted(chosen.items()))
