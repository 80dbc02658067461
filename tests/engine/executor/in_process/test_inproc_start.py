"""The start of workers that are threads, if one of them fails or hangs: its peers may wait for it
in an operation of a group, which ends only if it is aborted, as with NCCL."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest

import swell.worker.worker
from swell.configs.schema import Config, ConfigError, load
from swell.engine.executor import ExecutorError
from swell.engine.executor.inproc import InprocExecutor
from swell.worker.worker import GroupError
from tests.support.deadlines import HANG_S


class HangingWorker:
    """A worker whose operations with peers end only after `abort`."""

    fails: ClassVar[bool] = False
    """Whether rank 0 fails while the others wait for it; otherwise rank 0 waits, too."""
    ended: ClassVar[list[int]] = []
    """Ranks whose operations have been aborted."""
    progress_counter = 0

    def __init__(self, _config: Config, rank: int, *_args: Any) -> None:
        self._rank, self._aborted = rank, threading.Event()

    def load(self) -> int:
        return 0

    def regroup(self, *_args: Any) -> int:
        return self._rank

    def measure(self) -> int:
        if self.fails and self._rank == 0:
            raise ValueError("no memory is left")
        assert self._aborted.wait(HANG_S), "the peers were not aborted"
        self.ended.append(self._rank)
        raise GroupError("aborted")

    def abort(self, _generation: int | None = None) -> None:
        self._aborted.set()

    def shutdown(self) -> None:
        pass


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[HangingWorker]:
    monkeypatch.setattr(swell.worker.worker, "Worker", HangingWorker)
    monkeypatch.setattr(HangingWorker, "ended", [])
    return HangingWorker


def executor(start_timeout_s: float) -> InprocExecutor:
    parallel = {"tensor": 3, "executor": "inproc"}
    cluster = {"start_timeout_s": start_timeout_s}
    return InprocExecutor(load({"model": {"path": "m"}, "parallel": parallel, "cluster": cluster}))


def test_a_worker_that_fails_does_not_leave_its_peers_in_an_operation(
    worker: type[HangingWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "fails", True)
    with pytest.raises(ConfigError, match="no memory is left"):
        executor(start_timeout_s=HANG_S).start()
    assert sorted(worker.ended) == [1, 2]


def test_workers_that_hang_are_aborted_after_the_start_timeout(
    worker: type[HangingWorker],
) -> None:
    text = r"workers \[0, 1, 2\] did not finish `measure` within cluster\.start_timeout_s=0\.3"
    with pytest.raises(ExecutorError, match=text):
        executor(start_timeout_s=0.3).start()
    assert sorted(worker.ended) == [0, 1, 2]
