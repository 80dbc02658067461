"""The table of checks in `docs/operate/doctor.md`, which this module writes:
`python -m tests.cluster.cli.doctor.doctor_page`."""

from __future__ import annotations

from swell.cluster.cli.doctor.checks import CHECKS
from tests.support import marked_page
from tests.test_layers import ROOT

PAGE = ROOT / "docs" / "operate" / "doctor.md"
NAME = "checks"


def table() -> str:
    head = [marked_page.row(("check", "question", "if not", "remedy")), "|---|---|---|---|"]
    rows = [
        marked_page.row((f"`{name}`", check.question, check.level, check.remedy))
        for name, check in CHECKS.items()
    ]
    return "\n".join([*head, *rows])


if __name__ == "__main__":
    marked_page.replace(PAGE, NAME, table())
