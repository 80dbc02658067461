"""Accessibility rules of axe-core, run inside the page."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import ROOT
from tests.support.web.browser import Browser

AXE = ROOT / "build" / "axe-core" / "axe.min.js"
needs_axe = pytest.mark.skipif(
    not AXE.is_file(),
    reason=f"{AXE} is missing; CONTRIBUTING.md has the commands that get it",
)


def violations(browser: Browser) -> list[str]:
    """Returns the rule and the elements of each violation on the page."""
    browser.run(AXE.read_text())
    found = browser.run("return axe.run(document).then((result) => result.violations)")
    return [f"{one['id']}: {[node['html'] for node in one['nodes']]}" for one in found]
