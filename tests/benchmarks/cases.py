"""The table of cases, in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence

from tests.benchmarks import cluster_overhead, host_cost, long_context, offline, served, startup
from tests.benchmarks.case import Case

CASES: dict[str, Case] = {
    **offline.CASES,
    **served.CASES,
    **cluster_overhead.CASES,
    **host_cost.CASES,
    **startup.CASES,
    **long_context.CASES,
}


def chosen(names: Sequence[str]) -> dict[str, Case]:
    """Returns the cases whose names are or begin with these; all cases if there are no names.
    Raises ValueError for an unknown name."""
    for name in names:
        if not any(case.startswith(name) for case in CASES):
            raise ValueError(f"no case {name!r}; the cases are: {', '.join(CASES)}")
    return {
        name: case
        for name, case in CASES.items()
        if not names or any(name.startswith(start) for start in names)
    }
