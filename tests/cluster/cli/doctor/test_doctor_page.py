"""`docs/operate/doctor.md` lists every check with its remedy, and every field of the JSON."""

from __future__ import annotations

import re

import pytest

from swell.cluster.cli.doctor import check_cluster, check_hosts
from swell.cluster.cli.doctor.checks import CHECKS, Finding
from swell.cluster.cli.doctor.doctor_command import Report
from swell.cluster.cli.doctor.facts import Link
from tests.cluster.cli.doctor.doctor_page import NAME, PAGE, table
from tests.support import marked_page
from tests.test_layers import ROOT


def test_the_table_on_the_page_lists_the_checks() -> None:
    text = f"{marked_page.marker(NAME)}{table()}\n{marked_page.END}"
    assert text in PAGE.read_text(), "python -m tests.cluster.cli.doctor.doctor_page"


@pytest.mark.parametrize("kind", [Report, Finding, Link])
def test_every_field_of_the_json_is_on_the_page(kind: type) -> None:
    of_json = PAGE.read_text().partition("## JSON")[2]
    assert {f"`{field}`" for field in kind.__struct_fields__} <= set(re.findall("`[^`]+`", of_json))


def test_the_page_has_the_limits_of_the_checks() -> None:
    text = " ".join(PAGE.read_text().split())
    mib = check_hosts.MIB
    for limit in (
        f"`memory`: {check_hosts.MEMORY_FREE_BYTES // mib} MiB free",
        f"`shared-memory`: {check_hosts.SHM_FREE_BYTES // mib} MiB free",
        f"`disk`: {check_hosts.DISK_FREE_BYTES // mib} MiB and "
        f"{check_hosts.DISK_FREE_PART:.0%} free",
        f"`serve.max_connections` and {check_hosts.RESERVED_FILES}",
        f"`gpu-memory`: {check_hosts.USED_GPU_PART:.0%} used",
        f"and {check_cluster.SLOWEST_CHECKS_S:g} s at the latest",
        f"The limit is {check_cluster.CLOCK_LIMIT_S:g} s.",
    ):
        assert limit in text


def test_the_files_that_remedies_name_exist() -> None:
    for check in CHECKS.values():
        for name in re.findall(r"docs/[a-z/]+\.md", check.remedy):
            assert (ROOT / name).is_file()
