"""Runs the examples that need a server."""

from __future__ import annotations

import re

import pytest

from tests.e2e.cluster import Cluster
from tests.pages.test_examples import OF_A_SERVER, run_example

pytestmark = pytest.mark.slow

PRINTED = {
    "stream": r"3, 4, 5, 6, 7, 8, 9\n\d+ tokens\n",
    "tools": r"get_weather \{'city': '(Oslo|Lima|Pune)', 'days': [1-7]\}\n",
    "session": r"chunk 0: \d+ prompt tokens, 0 from the cache\n"
    r"chunk 1: \d+ prompt tokens, [1-9]\d* from the cache\n"
    r"chunk 2: \d+ prompt tokens, [1-9]\d* from the cache\n.+\n",
    "rescale": r"2 engines after \d+ answers, none failed\n"
    r"1 engines after \d+ answers, none failed\n(engine [\d,]+: \d+ answers\n)+",
}


@pytest.mark.parametrize("name", OF_A_SERVER)
def test_example(cluster: Cluster, name: str) -> None:
    printed = run_example(name, cluster.url)
    assert re.fullmatch(PRINTED[name], printed, re.DOTALL), printed
