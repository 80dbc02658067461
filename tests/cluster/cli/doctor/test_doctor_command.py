"""`swell doctor` on this machine: table, JSON, exit codes."""

from __future__ import annotations

import importlib.metadata
import socket
from pathlib import Path

import msgspec
import pytest

from swell.cluster.cli.doctor import doctor_command
from swell.cluster.cli.doctor.checks import CHECKS, Finding, passed, problem
from swell.cluster.cli.doctor.doctor_command import Report, examine, print_report
from swell.cluster.cli.doctor.facts import Requirements, read_requirements
from swell.cluster.cli.doctor.probes import host_facts, ray_hosts
from swell.cluster.cli.doctor.serve_file import read_source
from swell.cluster.cli.main import main
from swell.configs.schema import Config
from tests.cluster.cli.doctor.surveys import changed, name, survey, with_host
from tests.test_layers import ROOT

Capture = pytest.CaptureFixture[str]
NANO = str(ROOT / "configs" / "models" / "nano")


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the import of torch, which takes seconds."""
    monkeypatch.setattr(host_facts, "_TORCH_PROBE", 'print(\'{"version": "2.13.0"}\')')


def run(capsys: Capture, *words: str) -> tuple[int, Report]:
    code = main(["doctor", "--json", *words])
    report = msgspec.json.decode(capsys.readouterr().out, type=Report)
    assert report.exit_code == code
    return code, report


def levels(report: Report) -> dict[str, str]:
    return {finding.check: finding.level for finding in report.findings}


def test_a_suitable_machine_passes(capsys: Capture) -> None:
    assert main(["doctor", NANO, "--set", "serve.port=0"]) == 0
    text = capsys.readouterr().out
    assert "this machine can serve" in text and "| ok " in text
    code, report = run(capsys, NANO, "--set", "serve.port=0")
    assert code == report.errors == 0 and report.address is None
    assert {"configuration", "python", "ports", "model", "room"} <= levels(report).keys()
    assert list(report.hosts) == ["127.0.0.1"]


SERVE_FILE = """
proxy_location: Disabled
applications:
  - import_path: other:build
    args: {config: nowhere}
  - name: swell
    import_path: swell.cluster.app:build
    args: {config: %s, serve.port: 0, cluster.start_timeout_s: 7}
"""


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "text",
    [SERVE_FILE, "kind: RayService\nspec:\n  serveConfigV2: |\n" + indented(SERVE_FILE)],
    ids=["serve", "kuberay"],
)
def test_a_serve_file_names_its_configuration(text: str, tmp_path: Path) -> None:
    source = tmp_path / "app.yaml"
    source.write_text(text % NANO)
    name, overrides = read_source(str(source))
    assert name == NANO
    assert overrides == {"serve.port": 0, "cluster.start_timeout_s": 7}
    report = examine(str(source), {"cluster.start_timeout_s": 1}, None, 10)
    assert levels(report)["configuration"] == "ok"


@pytest.mark.parametrize("path", ["configs/ray/app.yaml", "configs/ray/app-gpu.yaml"])
def test_ray_up_files_can_be_checked(path: str) -> None:
    config, overrides = read_source(str(ROOT / path))
    assert config and overrides["cluster.ports"] == "20000-20255"


@pytest.mark.parametrize(
    "text",
    [
        "applications: []",
        "applications: [{import_path: other:build}]",
        "applications: [{import_path: swell.cluster.app:build}]",
        "applications: [{import_path: swell.cluster.app:build, args: {config: }}]",
    ],
)
def test_a_serve_file_without_our_application_is_refused(
    text: str, capsys: Capture, tmp_path: Path
) -> None:
    source = tmp_path / "app.yaml"
    source.write_text(text)
    code, report = run(capsys, str(source))
    assert code == 1
    (found,) = [finding for finding in report.findings if finding.check == "configuration"]
    assert "is a file of Ray Serve" in found.value and "`args` have `config`" in found.value


@pytest.mark.parametrize(
    "text", ["", "[]", "applications: 3", "spec: {serveConfigV2: 1}", "\xff:{"]
)
def test_other_files_are_read_as_configurations(text: str, capsys: Capture, tmp_path: Path) -> None:
    source = tmp_path / "app.yaml"
    source.write_bytes(text.encode("latin-1"))
    assert read_source(str(source)) == (str(source), {})
    assert run(capsys, str(source))[0] == 1


def test_each_problem_has_its_remedy_below_the_table(capsys: Capture, tmp_path: Path) -> None:
    source = tmp_path / "c.yaml"
    source.write_text("model: {path: ./nowhere}\nserve: {port: 0}\n")
    assert main(["doctor", str(source)]) == 1
    text = capsys.readouterr().out
    assert "error: model (here): model.path='./nowhere' is not a folder" in text
    assert f"  -> {CHECKS['model'].remedy}" in text
    assert "1 error" in text and "this machine cannot serve" in text


def test_the_machine_is_checked_although_the_configuration_is_invalid(capsys: Capture) -> None:
    code, report = run(capsys, "/no/such.yaml")
    assert code == 1
    assert levels(report)["configuration"] == "error" and levels(report)["python"] == "ok"


def test_a_port_in_use_is_reported(capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, report = run(capsys, NANO, "--set", f"serve.port={port}")
    assert code == 1 and levels(report)["http-port"] == "error"


def test_more_engines_than_cpus_are_reported(capsys: Capture) -> None:
    words = ("--set", "cluster.cpus_per_worker=10000", "--set", "serve.port=0")
    code, report = run(capsys, NANO, *words)
    assert code == 1 and levels(report)["room"] == "error"


def test_warnings_do_not_fail_the_command(capsys: Capture) -> None:
    words = ("--set", "serve.max_connections=1000000000", "--set", "serve.port=0")
    code, report = run(capsys, NANO, *words)
    assert (code, levels(report)["open-files"], report.warnings) == (0, "warning", 1)


@pytest.mark.parametrize("timeout", ["0", "601", "soon", "nan"])
def test_an_invalid_timeout_is_refused(timeout: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--timeout", timeout])
    assert ended.value.code == 2


def test_an_unreachable_cluster_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def silent(*_: object) -> None:
        raise ray_hosts.ClusterSilent("10.0.0.1:6379: no answer after 20 s")

    monkeypatch.setattr(ray_hosts, "ask_cluster", silent)
    code, report = run(capsys, NANO, "--address", "10.0.0.1:6379")
    assert code == 2
    assert levels(report) == {"configuration": "ok", "cluster": "error"}
    assert main(["doctor", "--address", "10.0.0.1:6379"]) == 2
    assert "the Ray cluster does not answer" in capsys.readouterr().out


def test_all_hosts_of_a_cluster_are_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def ask(address: str, config: Config | None, *_: object) -> object:
        worse = with_host(survey(5), 3, python="3.11.9")
        return changed(worse, address=address)

    monkeypatch.setattr(ray_hosts, "ask_cluster", ask)
    code, report = run(capsys, "--address", "10.0.0.1:6379")
    assert code == 1 and report.errors == 1
    (found,) = [finding for finding in report.findings if finding.level == "error"]
    assert (found.check, found.hosts) == ("python", (name(3),))
    assert main(["doctor", "--address", "10.0.0.1:6379"]) == 1
    text = capsys.readouterr().out
    assert f"error: python ({name(3)}): 3.11.9; expected: 3.11.7, as on {name(0)}" in text
    assert "all 5 hosts" in text and "10.0.0.1:6379, 5 hosts" in text


def test_many_hosts_are_not_all_named(capsys: Capture) -> None:
    hosts = [name(host) for host in range(9)]
    findings = [problem("cores", hosts, "1", "2"), passed("swell", hosts[:4], "x")]
    print_report(
        Report(
            address="a",
            exit_code=0,
            errors=0,
            warnings=1,
            findings=findings,
            links=[],
            hosts={},
        )
    )
    text = capsys.readouterr().out
    assert f"warning: cores ({hosts[0]}, {hosts[1]}, {hosts[2]} and 6 more)" in text
    assert "1 warning: the cluster can serve" in text


def test_text_from_a_host_is_printed_as_plain_text(capsys: Capture) -> None:
    """Control characters from another machine do not reach the terminal."""
    finding = problem("torch", ["a"], "\x1b[31mred\nline", "x")
    report = doctor_command._report(survey(1), [finding])
    print_report(report)
    assert "\x1b" not in capsys.readouterr().out


def test_the_version_ranges_come_from_the_package() -> None:
    found = read_requirements()
    assert found.python == ">=3.11"
    assert {"ray", "torch", "msgspec", "pyzmq"} <= found.libraries.keys()
    assert set(found.libraries["torch"].split(",")) == {">=2.11", "<2.14"}
    assert "pytest" not in found.libraries and "nvidia-nccl-cu12" not in found.libraries


def test_a_package_that_is_not_installed_has_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> object:
        raise importlib.metadata.PackageNotFoundError("swell")

    monkeypatch.setattr("importlib.metadata.metadata", absent)
    assert read_requirements() == Requirements(python="", libraries={})


def test_every_problem_has_a_remedy() -> None:
    assert all(check.question.endswith("?") and check.remedy for check in CHECKS.values())
    assert Finding(check="a", level="ok", hosts=(), value="b").remedy == ""
