"""The page about the path of a request lists functions that a streamed chat calls in an ingress,
and those on the way to the engine in the order of their first calls."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fake_cluster import FakeCluster
from tests.cluster.text import tokenizers_for_tests
from tests.test_layers import ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "design" / "request-path.md"
STEP = re.compile(r"^\| .* \| `(\S+)` \| `(\S+)` \|$", re.MULTILINE)
NOT_CALLED = {"LimitedConnection", "with_error_handling"}
"""A class, whose connection the test's client does not make, and a decorator."""


def steps(text: str) -> list[tuple[str, str]]:
    """Returns the file and the function of each step in an ingress."""
    found = STEP.findall(text)
    return [at for at in found if at[0].startswith("cluster/") and at[1] not in NOT_CALLED]


def first_calls(folder: Path, listed: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Streams a chat, and returns the listed functions in the order of their first calls."""
    seen: list[tuple[str, str]] = []

    def note(frame: Any, event: str, _: object) -> None:
        name = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        at = (name, frame.f_code.co_qualname)
        if event == "call" and at in listed and at not in seen:
            seen.append(at)

    async def run() -> None:
        async with FakeCluster(folder).serving() as cluster:
            await cluster.join(0)
            messages = [{"role": "user", "content": "hi"}]
            body = {"messages": messages, "stream": True, "max_tokens": 5}
            threading.setprofile(note)
            sys.setprofile(note)
            try:
                answer = await cluster.client.post("/v1/chat/completions", json=body)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
            assert answer.status_code == 200 and answer.text.endswith("[DONE]\n\n")

    asyncio.run(run())
    return seen


def test_a_streamed_chat_calls_the_functions_of_the_page_in_order(tmp_path: Path) -> None:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    down, up = map(steps, PAGE.read_text().split("## From the engine to the client"))
    seen = first_calls(tmp_path, {*down, *up})
    assert {*seen} == {*down, *up}
    assert [at for at in seen if at in down] == down
