"""Results as tables: in the terminal, and between the markers of a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from swell.cluster.cli.console import print_table
from tests.benchmarks.results import Figure, Results
from tests.support import marked_page

HEAD = ("case", "what", "swell", "against", "theirs", "ratio", "spread", "target", "")
MARKER = "bench"
_MARKS = {None: "", True: "met", False: "MISSED"}


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Yields a row for each figure, to go under the header."""
    for name, result in results.items():
        for figure in result.figures:
            yield name, *_cells(figure)


def _cells(figure: Figure) -> tuple[str, ...]:
    compared = figure.compared
    spread = f"{number(compared.low)} .. {number(compared.high)}" if len(figure.ours) > 1 else ""
    return (
        figure.what,
        number(median(figure.ours)),
        figure.against,
        number(median(figure.theirs)) if figure.theirs else "",
        number(compared.median) if figure.against else "",
        spread,
        target(figure),
        _MARKS[figure.met],
    )


def target(figure: Figure) -> str:
    """Returns the target of the ratio if there is a reference, otherwise of the number itself."""
    if figure.at_least is not None:
        return f">= {number(figure.at_least)}"
    return f"<= {number(figure.at_most)}" if figure.at_most is not None else ""


def number(value: float) -> str:
    """Returns three significant digits, without exponents."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 4}f}"


def show(results: Results) -> None:
    print_table("", HEAD, rows(results), left=2)
    for name, result in results.items():
        for problem in result.problems:
            print(f"{name}: {problem}")


def markdown(results: Results) -> str:
    """Returns the environment, then the table."""
    lines = [*environment(results), "", marked_page.row(HEAD)]
    lines.append(marked_page.row(["---", "---", "---:", "---", *["---:"] * 4, "---"]))
    lines += [marked_page.row(row) for row in rows(results)]
    for name, result in results.items():
        lines += ["", *(f"{name}: {problem}" for problem in result.problems)]
    return "\n".join(lines).rstrip()


def environment(results: Results) -> list[str]:
    """Returns a line for each machine, one for the peers, and one for each date and commit."""
    lines = [*dict.fromkeys(_listed({**r.machine, **r.versions}) for r in results.values())]
    peers: dict[str, str] = {}
    for result in results.values():
        peers |= result.peers
    if peers:
        lines.append(f"against {_listed(peers)}")
    when: dict[str, list[str]] = {}
    for name, result in results.items():
        rounds = f"{result.date}, commit {result.commit or 'unknown'}, {result.repeats} rounds"
        when.setdefault(rounds, []).append(name)
    lines += [f"{rounds}: {', '.join(names)}" for rounds, names in when.items()]
    return [f"- {line}" for line in lines]


def _listed(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value)


def write_markdown(path: Path, results: Results) -> None:
    """Writes the table between the markers of a page. Raises ValueError if these are missing."""
    marked_page.replace(path, MARKER, markdown(results))
