"""Versions of a cluster's engines: what they run, and which of them is wanted. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import msgspec

from swell.configs.schema import Config, load

MAX_VERSIONS = 4
"""That are remembered besides those in use: an ingress that was cut off for long may still need an
earlier one. As many may be in use at once."""


class Version(msgspec.Struct, frozen=True, dict=True):
    """Weights and limits. Engines of one version give the same answers."""

    number: int
    """Grows with each upgrade."""
    identity: str
    """Of the configuration as it was given; see `configs/identity.py`."""
    settings: dict[str, Any]
    """The configuration, with the device that was found."""
    base: str = ""
    """Name of the version whose engines may get these weights in place of theirs; empty: none."""

    @classmethod
    def of(cls, number: int, identity: str, config: Config, base: str = "") -> Version:
        return cls(number, identity, msgspec.to_builtins(config), base)

    @cached_property
    def name(self) -> str:
        """As rosters and answers have it."""
        return f"{self.number}-{self.identity}"

    @property
    def lineage(self) -> str:
        """Versions of one lineage differ in their weights alone, which engines change in place."""
        return self.base or self.name

    @cached_property
    def config(self) -> Config:
        """Raises ConfigError if another release wrote it, with other keys."""
        return load(self.settings)


class UpgradeStage(enum.StrEnum):
    SETTLED = "idle"
    """Every engine is of the wanted version."""
    IN_PROGRESS = "in progress"
    ROLLING_BACK = "rolling back"
    """The new version did not become ready, or was cancelled: engines of the one before are made
    again."""
    FAILED = "failed"
    """It is rolled back."""


class UpgradeCounts(msgspec.Struct, frozen=True):
    """How upgrades have ended since the cluster was there first."""

    done: int = 0
    failed: int = 0
    """A version did not become ready. One that is being rolled back is counted."""
    cancelled: int = 0
    """An operator has requested the version before, or another one."""

    def plus(self, *, done: int = 0, failed: int = 0, cancelled: int = 0) -> UpgradeCounts:
        return UpgradeCounts(self.done + done, self.failed + failed, self.cancelled + cancelled)


_CANCELLED = {UpgradeStage.ROLLING_BACK: "cancelling", UpgradeStage.FAILED: "cancelled"}
"""Phases of an upgrade that was not given up for a failure."""


class UpgradeRecord(msgspec.Struct, frozen=True):
    """What outlives a manager. Append-only: another release may read it."""

    versions: tuple[Version, ...] = ()
    """The newest ones, by number; empty: no manager has written any."""
    wanted: str = ""
    """Name of the version of which all engines are to be."""
    previous: str = ""
    """Of the one that was wanted before."""
    stage: UpgradeStage = UpgradeStage.SETTLED
    deployed: str = ""
    """Identity of the configuration with which the application was deployed last."""
    proven: tuple[str, ...] = ()
    """Names of versions of which an engine has served."""
    in_place: bool = False
    """There is no room for an extra engine: one leaves before the next one starts."""
    error: str | None = None
    """Why the last upgrade failed."""
    is_cancelled: bool = False
    """It is rolled back because an operator wants that."""
    counts: UpgradeCounts = UpgradeCounts()

    @property
    def phase(self) -> str:
        """As `/admin/cluster` names it."""
        return _CANCELLED.get(self.stage, self.stage) if self.is_cancelled else self.stage

    def find(self, name: str) -> Version | None:
        return next((version for version in self.versions if version.name == name), None)

    def get(self, name: str) -> Version:
        version = self.find(name)
        assert version is not None, f"the version {name} is unknown"
        return version

    def known(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.find(name) is not None]
