"""Groups on GPUs need the NCCL that torch requires: a start without it is refused with a fix."""

from __future__ import annotations

import tomllib

import pytest

from swell.configs.runtime import nccl
from swell.configs.runtime.nccl import PACKAGES, check_nccl, nccl_refusal
from swell.configs.schema import ConfigError, load
from swell.engine.executor import build_executor
from tests.support.paths import NANO, ROOT

LINUX = ' ; platform_system == "Linux"'
CU12 = ["filelock", f"nvidia-nccl-cu12==2.27.5{LINUX}"]
CU13 = ["filelock", f"nvidia-nccl-cu13==2.28.9{LINUX}"]


@pytest.mark.parametrize(
    ("required", "installed"),
    [
        ([], {}),
        ([], {"nvidia-nccl-cu12": "2.30.7", "nvidia-nccl-cu13": "2.30.7"}),
        (["filelock", 'nvidia-nccl-cu13==2.28.9 ; platform_system == "Windows"'], {}),
        (CU12, {"nvidia-nccl-cu12": "2.27.5"}),
        (CU13, {"nvidia-nccl-cu13": "2.28.9"}),
        (CU13, {"nvidia-nccl-cu13": "2.32.3"}),
        (["nvidia-nccl-cu13==2.28.*"], {"nvidia-nccl-cu13": "2.28.9"}),
        (["nvidia-nccl-cu13"], {"nvidia-nccl-cu13": "2.28.9"}),
    ],
)
def test_the_required_package_or_a_newer_one_is_accepted(
    required: list[str], installed: dict[str, str]
) -> None:
    assert nccl_refusal(required, installed) is None


def test_a_missing_package_is_refused_unless_the_system_has_the_library() -> None:
    assert nccl_refusal(CU13, {}) == (
        "torch needs nvidia-nccl-cu13==2.28.9 for groups on GPUs, and it is not installed; run "
        "pip install 'swell[cuda13]' 'nvidia-nccl-cu13==2.28.9'"
    )
    assert "pip install 'swell[cuda12]'" in (nccl_refusal(CU12, {}) or "")
    assert nccl_refusal(CU13, {}, is_in_system=True) is None


def test_an_older_package_is_refused() -> None:
    for required in (CU13, ["nvidia-nccl-cu13>=2.28,<3"], ["nvidia-nccl-cu13~=2.28.3"]):
        refusal = nccl_refusal(required, {"nvidia-nccl-cu13": "2.27.7"}, is_in_system=True)
        assert refusal is not None
        assert "nvidia-nccl-cu13 2.27.7 is older than torch needs; run pip install" in refusal


@pytest.mark.parametrize("also", [{}, {"nvidia-nccl-cu13": "2.28.9"}])
def test_the_package_of_another_cuda_version_is_refused(also: dict[str, str]) -> None:
    refusal = nccl_refusal(CU13, {"nvidia-nccl-cu12": "2.27.5", **also}, is_in_system=True)
    assert refusal == (
        "nvidia-nccl-cu12 2.27.5 is installed, but torch needs nvidia-nccl-cu13, and both write "
        "the same library; run pip uninstall -y nvidia-nccl-cu12, then pip install "
        "--force-reinstall --no-deps 'nvidia-nccl-cu13==2.28.9'"
    )


def test_a_start_is_refused_only_if_groups_on_gpus_are_formed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl.metadata, "requires", lambda _name: CU13)
    monkeypatch.setattr(nccl, "_version", lambda _package: None)
    monkeypatch.setattr(nccl, "_is_in_system", lambda: False)
    monkeypatch.setattr(nccl, "has_gpu", lambda: True)
    two = {"parallel.tensor": 2, "parallel.executor": "inproc"}
    with pytest.raises(ConfigError, match=r"swell\[cuda13\]"):
        build_executor(load(str(NANO), two))
    check_nccl(load(str(NANO)))
    check_nccl(load(str(NANO), two | {"model.device": "cpu"}))
    monkeypatch.setattr(nccl, "has_gpu", lambda: False)
    check_nccl(load(str(NANO), two))


def test_the_extras_name_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {extra: extras[extra] for extra in PACKAGES.values()} == {
        extra: [package] for package, extra in PACKAGES.items()
    }
