"""Settings of the whole test session."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from swell.configs.runtime import process
from swell.configs.runtime.process import freeze_gc, prepare_for_torch
from tests import reaper
from tests.sharing import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.sharing import pytest_runtest_setup as pytest_runtest_setup
from tests.sharing import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler

prepare_for_torch()


def _register_hypothesis_profiles() -> None:
    """`ci`, the default: the same examples in every run, and nothing is written. `random`, chosen
    with `--hypothesis-profile random`: new examples in every run; failing ones are kept and tried
    again."""
    if find_spec("hypothesis") is None:  # machines with a GPU run `tests/gpu` without it
        return
    from hypothesis import settings

    settings.register_profile("ci", derandomize=True, database=None, deadline=None)
    settings.register_profile("random", derandomize=False, deadline=None, print_blob=True)
    settings.load_profile("ci")


_register_hypothesis_profiles()


def pytest_sessionstart() -> None:
    """Start the reaper, so that processes that tests start end with this one. Oracles compute in
    this process too, some before its first engine."""
    from swell.worker.vector_math import initialize_vector_math

    reaper.start()
    initialize_vector_math()


def pytest_collection_finish() -> None:
    """Exclude the tests from garbage collections: else a full one takes seconds in a process that
    has all of them."""
    freeze_gc()


@pytest.fixture(autouse=True)
def _tests_stay_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that gives memory back would collect them too. It need not: no engine of a test is
    excluded."""
    for module in ("swell.worker.memory.sleep", "swell.worker.worker"):
        monkeypatch.setattr(f"{module}.collect_frozen", gc.collect)


@pytest.fixture(scope="module", autouse=True)
def _settings_of_ray_end_with_their_module() -> Iterator[None]:
    """A Ray that a test starts in this process leaves its own in the environment, such as the mode
    of authentication: a cluster that another test starts would have it."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    yield
    for name in [name for name in os.environ if name.startswith("RAY_") and name not in before]:
        del os.environ[name]
    os.environ.update(before)


Deaths = list[tuple[str, BaseException]]


@pytest.fixture(autouse=True)
def deaths(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deaths]:
    """Loops that would have ended this process, and their exceptions. A test that injects such a
    failure removes it from the list; else a loop that ends fails the test, not pytest."""
    ended: Deaths = []
    monkeypatch.setattr(process, "exit_process", lambda loop, error: ended.append((loop, error)))
    yield ended
    assert not ended
