"""Damaged bodies at every endpoint: a refusal names what is wrong, no answer is a 5xx, and a
correct request afterwards gets the right answer."""

from __future__ import annotations

import os
import random

import pytest

from tests.conformance.document import check_answer
from tests.conformance.in_process_server import InProcessServer
from tests.conformance.mutations import BODIES, mutated

pytestmark = pytest.mark.slow

CASES = int(os.environ.get("SWELL_FUZZ_CASES", "240"))
SEED = int(os.environ.get("SWELL_FUZZ_SEED", "1"))
BATCH = 40
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("case", range(len(BODIES)))
def test_every_body_is_valid(in_process_server: InProcessServer, case: int) -> None:
    path, body = BODIES[case]
    response = in_process_server.client.post(path, json=body)
    assert response.status_code in (200, 202), response.text
    check_answer(path, response)


def test_no_body_breaks_the_server(in_process_server: InProcessServer) -> None:
    source = random.Random(SEED)
    for case in range(CASES):
        path, body = BODIES[case % len(BODIES)]
        content = mutated(source, body)
        response = in_process_server.client.post(path, content=content, headers=JSON)
        where = f"case {case}, {path}: {content!r}: {response.text}"
        assert response.status_code < 500, where
        if response.status_code >= 400:
            assert response.json()["error"]["message"], where
        check_answer(path, response)
        assert "server_error" not in response.text and '"api_error"' not in response.text, where
        if case % BATCH == BATCH - 1:
            in_process_server.answers()
    in_process_server.answers()
    in_process_server.wait_idle()
