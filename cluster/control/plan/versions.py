"""Versions of a cluster's engines: what they run, and which version is the target. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import msgspec

from swell.configs.schema import Config, load

MAX_VERSIONS = 4
"""The number of versions that are remembered besides those in use, because an ingress that was cut
off for long may still need an earlier one. Also the limit of versions in use at once."""


class Version(msgspec.Struct, frozen=True, dict=True):
    """Weights and limits. Engines of one version compute the same responses."""

    number: int
    """Increases with each upgrade."""
    config_hash: str
    """Hash of the configuration as it was given; see `configs/config_hash.py`."""
    settings: dict[str, Any]
    """The configuration, with the detected device."""
    base: str = ""
    """Name of the version whose engines may load these weights in place of theirs; empty: none."""

    @classmethod
    def of(cls, number: int, config_hash: str, config: Config, base: str = "") -> Version:
        return cls(number, config_hash, msgspec.to_builtins(config), base)

    @cached_property
    def name(self) -> str:
        """The name that rosters and responses contain."""
        return f"{self.number}-{self.config_hash}"

    @property
    def weights_lineage(self) -> str:
        """Versions of one lineage differ only in their weights, which engines can change in
        place."""
        return self.base or self.name

    @cached_property
    def config(self) -> Config:
        """The configuration. Raises ConfigError if another release wrote it, with other keys."""
        return load(self.settings)


class UpgradeStage(enum.StrEnum):
    SETTLED = "idle"
    """Every engine runs the target version."""
    IN_PROGRESS = "in progress"
    ROLLING_BACK = "rolling back"
    """The new version did not become ready, or was cancelled: engines of the previous version are
    started again."""
    FAILED = "failed"
    """The rollback is complete."""


class UpgradeCounts(msgspec.Struct, frozen=True):
    """The outcomes of upgrades since the cluster was first deployed."""

    done: int = 0
    failed: int = 0
    """Upgrades whose version did not become ready, including one that is still being rolled
    back."""
    cancelled: int = 0
    """Upgrades that were given up because an operator requested the previous or another version."""

    def plus(self, *, done: int = 0, failed: int = 0, cancelled: int = 0) -> UpgradeCounts:
        return UpgradeCounts(self.done + done, self.failed + failed, self.cancelled + cancelled)


_CANCELLED = {UpgradeStage.ROLLING_BACK: "cancelling", UpgradeStage.FAILED: "cancelled"}
"""Phases of an upgrade that an operator cancelled."""


class UpgradeRecord(msgspec.Struct, frozen=True):
    """The part of an upgrade that outlives a manager. Append-only: another release may read it."""

    versions: tuple[Version, ...] = ()
    """The newest versions, by number; empty: no manager has written any."""
    wanted: str = ""
    """Name of the target version, which all engines must run."""
    previous: str = ""
    """Name of the previous target version."""
    stage: UpgradeStage = UpgradeStage.SETTLED
    deployed: str = ""
    """Hash of the configuration with which the application was last deployed."""
    proven: tuple[str, ...] = ()
    """Names of the versions that an engine has served."""
    in_place: bool = False
    """There is no room for an extra engine: one engine leaves before the next one starts."""
    error: str | None = None
    """Why the last upgrade failed."""
    is_cancelled: bool = False
    """The rollback was requested by an operator."""
    counts: UpgradeCounts = UpgradeCounts()

    @property
    def phase(self) -> str:
        """The phase as `/admin/cluster` reports it."""
        return _CANCELLED.get(self.stage, self.stage) if self.is_cancelled else self.stage

    def find(self, name: str) -> Version | None:
        return next((version for version in self.versions if version.name == name), None)

    def get(self, name: str) -> Version:
        version = self.find(name)
        assert version is not None, f"the version {name} is unknown"
        return version

    def known(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.find(name) is not None]
