"""Settings of the whole test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swell.configs import process
from swell.configs.process import prepare_for_torch

prepare_for_torch()

SLOW = (
    *("/e2e/", "/worker/", "/kernels/", "/judges/", "test_token_exact", "test_local", "test_cli"),
    *(
        "test_ray_executor",
        "test_inproc_groups",
        "test_expert_parallel",
        "test_waves_explorer",
        "test_routing_trace",
    ),
    *("test_ingress", "test_failover", "test_responses", "test_messages.py", "test_benchmarks"),
    *("test_server", "test_mending", "test_lockstep", "test_channel"),
    *("test_nan_logits", "test_failed_rows", "test_failed_requests"),
    *("test_dead_loops", "test_process"),
    *("test_laws", "test_json_stream", "test_structured.py"),
    *("test_access", "test_bodies", "test_connection", "test_submission"),
    *("test_continuations", "test_cors", "test_ecosystem", "test_half_close"),
    *("test_request_forms", "test_sdk_loops", "test_tokenize", "test_answer_grammars", "/kinds/"),
)
"""What starts clusters or processes, talks over sockets, computes with tensors, or searches long:
not part of `make test-fast`."""


def pytest_sessionstart() -> None:
    """Oracles compute in this process too, some before the first engine of it."""
    from swell.worker.vector_math import initialize_vector_math

    initialize_vector_math()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(part in str(item.path) for part in SLOW):
            item.add_marker(pytest.mark.slow)


Deaths = list[tuple[str, BaseException]]


@pytest.fixture(autouse=True)
def deaths(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deaths]:
    """Loops that would have ended this process, and what they raised. A test that plants such a
    failure takes it out of the list; else a loop that ends fails the test, not pytest."""
    ended: Deaths = []
    monkeypatch.setattr(process, "exit_process", lambda loop, error: ended.append((loop, error)))
    yield ended
    assert not ended
