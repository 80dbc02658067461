"""The report of a GPU, on a CPU with tiny sizes: every stage runs, and a stage that fails or hangs
does not keep the others from their results."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.gpu_report import __main__ as report
from tests.gpu_report.bare_machine import modules_of_packages
from tests.gpu_report.engines import prompts_of
from tests.gpu_report.scale import SHAPES, Scale
from tests.gpu_report.stages.memory import check_card

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stage", report.DEADLINES_S)
def test_a_stage_runs_on_a_cpu(stage):
    earlier = {"ceilings": {"read_gb_per_s": 10.0, "bf16_tflop_per_s": 0.1}}
    module = importlib.import_module(f"tests.gpu_report.stages.{stage}")
    figures = module.run(Scale("cpu", earlier))
    assert figures
    assert json.loads(json.dumps(figures)) == figures


def test_the_stages_need_few_packages_and_no_network():
    """The other stages import no further modules."""
    stages = ["doors", "outputs", "attention", "groups", "sleep", "adapters"]
    command = [sys.executable, "-m", "tests.gpu_report.bare_machine", *stages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == stages
    assert "ray" not in modules_of_packages() and "torch" in modules_of_packages()


def test_the_stages_fit_into_one_run_of_a_machine():
    assert sum(report.DEADLINES_S.values()) <= 500


def test_wrong_results_fail_their_stage(monkeypatch):
    from tests.gpu_report.stages import doors

    module = importlib.import_module("swell.kernels.reference.activation")
    monkeypatch.setattr(module, "gelu", module.silu_and_mul)
    with pytest.raises(AssertionError, match="activation"):
        doors.run(Scale("cpu"))


def test_a_stage_that_fails_or_hangs_leaves_the_results_of_the_others(tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    assert report.run_all(["ceilings"], "cpu", file) == 0
    figures = json.loads(file.read_text())["stages"]["ceilings"]["figures"]
    assert figures["copy_gb_per_s"] > 0
    # without a GPU, a stage for a GPU fails
    failed = report.run_stage("ceilings", "cuda", file)
    assert failed["error"].startswith("exit code 1\n") and "CUDA" in failed["error"]
    hanging = report.run_stage("outputs", "cpu", file, {"outputs": 0.01})
    assert hanging["error"].startswith("not done after 0.1 s")
    outcomes = {"ceilings": {"figures": figures}, "doors": failed, "outputs": hanging}
    monkeypatch.setattr(report, "run_stage", lambda stage, *_: dict(outcomes[stage]))
    assert report.run_all(list(outcomes), "cpu", file) == 1
    stages = json.loads(file.read_text())["stages"]
    assert [name for name, outcome in stages.items() if "error" in outcome] == ["doors", "outputs"]
    assert stages["ceilings"]["figures"] == figures


def test_a_step_that_is_not_the_largest_fails_the_stage_of_memory(monkeypatch):
    from tests.gpu_report.stages import memory

    monkeypatch.setattr(memory, "prompts_of", lambda rows, _, vocab: prompts_of(rows, 3, vocab))
    with pytest.raises(AssertionError, match="no step was the largest"):
        memory.run(Scale("cpu"))


@pytest.mark.parametrize(
    ("free", "refused", "why"),
    [(3, 0, None), (4, 0, "4.0% of the card is unused"), (3, 1, "was refused memory 1 times")],
)
def test_a_card_with_unused_memory_or_too_little_fails_the_stage_of_memory(free, refused, why):
    if why is None:
        assert check_card(free, 100, refused) == {"share unused": 0.03}
        return
    with pytest.raises(AssertionError, match=why):
        check_card(free, 100, refused)


def test_an_unknown_stage_is_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_report", "decod", "--device", "cpu"])
    with pytest.raises(SystemExit):
        report.main()
    assert "there is no stage 'decod'; the stages are ceilings," in capsys.readouterr().err


def test_the_bytes_of_a_step():
    """Qwen3-0.6B has 596 million parameters with its tied head, and 112 KiB of KV for a token."""
    shape = SHAPES["0.6B"]
    assert shape.step_bytes(1, 0) / 2 == pytest.approx(596e6, rel=0.01)
    assert shape.step_bytes(3, 2) - shape.step_bytes(3, 1) == 3 * 112 * 1024


def test_the_parameters_of_the_experts_that_tokens_choose():
    """Qwen3-30B-A3B has 3.3 billion parameters that a token uses, of 30.5 billion."""
    whole = replace(SHAPES["30B-A3B, 6 layers"], layers=48)
    for tokens, parameters in ((1, 3.3e9), (10_000, 30.5e9)):
        outside = whole.head_parameters * 2  # the head, and embeddings of the same size
        assert whole.layer_parameters(tokens) + outside == pytest.approx(parameters, rel=0.02)
