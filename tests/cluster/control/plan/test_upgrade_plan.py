"""The plan of an upgrade says one thing about each engine."""

from __future__ import annotations

from swell.cluster.control.plan.fleet_view import EngineStatus, FleetView, Intent, Place
from swell.cluster.control.plan.upgrade import UpgradeState
from swell.cluster.control.plan.upgrade_plan import plan
from swell.cluster.control.plan.versions import UpgradeRecord, Version
from swell.configs.schema import load

CONFIG = load({"model": {"path": "m"}})
ONE, TWO, THREE = (Version.of(n, name, CONFIG) for n, name in enumerate("abc", 1))
RELOADING = EngineStatus(
    0, Place.SERVING, Intent.RELOAD, version=ONE.name, next_version=TWO.name, node="host0"
)


def test_an_engine_that_is_kept_gets_no_other_version_to_load() -> None:
    """The engine has another lineage of weights than the new target, so it cannot reload."""
    record = UpgradeRecord((ONE, TWO, THREE), THREE.name, TWO.name, proven=(ONE.name,))
    _, done = plan(UpgradeState(record), FleetView((RELOADING,)), 1, (), 100.0)
    assert (done.keep, done.retarget) == ((0,), ())


def test_an_engine_that_reloads_gets_the_newest_version() -> None:
    two = Version.of(2, "b", CONFIG, base=ONE.name)
    three = Version.of(3, "c", CONFIG, base=ONE.name)
    record = UpgradeRecord((ONE, two, three), three.name, two.name, proven=(ONE.name,))
    _, done = plan(UpgradeState(record), FleetView((RELOADING,)), 1, (), 100.0)
    assert (done.keep, done.retarget) == ((), (0,))
