"""Settings of the whole test session."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from swell.cluster.text.params import sampling_params
from swell.configs.runtime import process
from swell.configs.runtime.process import freeze_gc, prepare_for_torch
from tests import progress
from tests.sharing import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.sharing import pytest_ignore_collect as pytest_ignore_collect
from tests.sharing import pytest_make_collect_report as pytest_make_collect_report
from tests.sharing import pytest_runtest_setup as pytest_runtest_setup
from tests.sharing import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler
from tests.slowest_files import pytest_addoption as pytest_addoption
from tests.slowest_files import pytest_configure as pytest_configure
from tests.slowest_files import pytest_runtest_makereport as pytest_runtest_makereport
from tests.slowest_files import pytest_runtest_protocol as pytest_runtest_protocol
from tests.support import reaper, signals
from tests.support.untrusted import tls_contexts

prepare_for_torch()


def _register_hypothesis_profiles() -> None:
    """Registers two profiles. `ci`, the default, uses the same examples in every run and writes
    nothing. `random` (`--hypothesis-profile random`) draws new examples in every run, and stores
    failing ones to retry them."""
    if find_spec("hypothesis") is None:  # machines with a GPU run `tests/gpu` without it
        return
    from hypothesis import settings

    settings.register_profile("ci", derandomize=True, database=None, deadline=None)
    settings.register_profile("random", derandomize=False, deadline=None, print_blob=True)
    settings.load_profile("ci")


_register_hypothesis_profiles()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Starts the reaper, so that processes started by tests end with this one. Also initializes
    vector math, because oracles compute in this process, some before its first engine."""
    from swell.worker.mkl_functions import initialize_vector_math

    reaper.start()
    signals.guard()
    progress.start(session.config)
    tls_contexts.share()
    initialize_vector_math()


NEW_MODULES = 200
_num_frozen_modules = 0


def freeze_objects() -> None:
    """Excludes all tests and modules from garbage collection. Otherwise a full collection takes
    seconds in a process with all tests, and each engine that ends collects."""
    global _num_frozen_modules
    freeze_gc()
    _num_frozen_modules = len(sys.modules)


def pytest_collection_finish() -> None:
    freeze_objects()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Excludes new modules too, such as those of transformers, which the first engine imports: a
    collection that visits them takes 40 ms instead of 2."""
    yield
    if len(sys.modules) >= _num_frozen_modules + NEW_MODULES:
        freeze_objects()


@pytest.fixture(autouse=True)
def _tests_stay_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps workers that release memory from collecting the excluded tests too. That is safe,
    because no engine of a test is excluded."""
    for module in ("swell.worker.memory.sleep", "swell.worker.worker"):
        monkeypatch.setattr(f"{module}.collect_frozen", gc.collect)


@pytest.fixture(autouse=True)
def _same_random_numbers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a test draw the same numbers in every run, from generators that start with its id.
    Requests without a seed get theirs from one too. Otherwise the tokens of a run would decide a
    test: one sampled end token in 50 would finish a request that should wait."""
    name = request.node.nodeid
    seeds = random.Random(name)
    random.seed(name)
    if torch := sys.modules.get("torch"):
        seed = seeds.getrandbits(63)
        torch.default_generator.manual_seed(seed)
        # Not `torch.manual_seed`: without CUDA it stores three stack traces of some ms, for later.
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
    monkeypatch.setattr(
        sampling_params, "random_seed", lambda: seeds.getrandbits(sampling_params.SEED_BITS)
    )


@pytest.fixture(scope="module", autouse=True)
def _settings_of_ray_end_with_their_module() -> Iterator[None]:
    """Restores the `RAY_*` environment variables. A Ray that a test starts in this process sets
    some, such as the authentication mode, and they would affect the cluster of another test."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    yield
    for name in [name for name in os.environ if name.startswith("RAY_") and name not in before]:
        del os.environ[name]
    os.environ.update(before)


Deaths = list[tuple[str, BaseException]]


@pytest.fixture(autouse=True)
def deaths(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deaths]:
    """Yields the background loops that would have ended this process, and their exceptions. A test
    that injects such a failure must remove it from the list. Any other loop that ends fails the
    test instead of killing pytest."""
    ended: Deaths = []
    monkeypatch.setattr(process, "exit_process", lambda loop, error: ended.append((loop, error)))
    yield ended
    assert not ended
