"""`swell run-batch` answers as the HTTP server does, and continues after it was killed."""

from __future__ import annotations

import fcntl
import io
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai.types import BatchError, Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from swell.cluster.cli.main import main
from tests.conformance.in_process_server import start_in_process_server
from tests.support.paths import NANO, ROOT
from tests.support.weights.pooled_models import TEXTS, make

pytestmark = pytest.mark.slow

SET = ("--set", "model.dtype=float32", "--set", "cache.memory_bytes=50000000")
TIMEOUT_S = 400
ONE_RUN_ONLY = ("id", "created", "request_id", "system_fingerprint")
"""Fields that differ between two answers to the same request."""


def request(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return request(
        custom_id,
        "/v1/chat/completions",
        **{"model": "nano", "messages": messages, "temperature": 0, **body},
    )


def write(path: Path, lines: Sequence[Any]) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(model: Path, source: Path, out: Path, *options: str) -> int:
    return main(["run-batch", str(model), str(source), str(out), *SET, *options])


def plain(body: Any) -> Any:
    """Returns an answer without the fields of one run."""
    if isinstance(body, dict):
        return {key: plain(value) for key, value in body.items() if key not in ONE_RUN_ONLY}
    if isinstance(body, list):
        return [plain(value) for value in body]
    return pytest.approx(body, abs=1e-5) if isinstance(body, float) else body


def answers_of_server(model: Path, lines: Sequence[dict[str, Any]], **settings: Any) -> Any:
    with start_in_process_server(model, **settings) as server:
        got = {}
        for line in lines:
            answer = server.client.post(line["url"], json=line["body"])
            got[line["custom_id"]] = (answer.status_code, plain(answer.json()))
        return got


GENERATED = [
    chat("greedy", "upper: hello"),
    chat("logprobs", "reverse: kitten", logprobs=True, top_logprobs=2),
    chat("several", "upper: abc", n=3, temperature=1.0, seed=5),
    chat("schema", "a", max_tokens=20, response_format={"type": "json_object"}),
    request("text", "/v1/completions", prompt=["count", "upper: a"], temperature=0, max_tokens=5),
    chat("wrong value", "a", temperature=-1),
    chat("wrong field", "a", temprature=1),
    chat("wrong model", "a", model="other"),
    chat("too long", "a b " * 600),
    request("no pooling", "/v1/embeddings", input="a"),
    request("no object", "/v1/completions") | {"body": 7},
]


def test_answers_equal_the_server_and_openai_reads_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # `rich` then takes standard error for a terminal
    bad = ["{bad", json.dumps(chat("no route", "a") | {"url": "/v1/chat"})]
    source = write(tmp_path / "in", [*GENERATED[:3], *bad, *GENERATED[3:]])
    limits = ("--set", "model.max_model_len=512", "--in-flight", "4")
    assert run(NANO, source, tmp_path / "out", *limits) == 3
    got = read(tmp_path / "out")
    assert "13 lines: 5 answered, 8 failed" in (shown := capfd.readouterr().err)
    assert "8 failed" in shown and "13/13" in shown
    errors = [line for line in got if line["error"] is not None]
    assert {(line["custom_id"], line["error"]["line"]) for line in errors} == {
        (None, 4),
        ("no route", 5),
    }
    for line in errors:
        assert line["response"] is None
        BatchError.model_validate(line["error"], extra="forbid")
    answered = {line["custom_id"]: line["response"] for line in got if line["error"] is None}
    assert answers_of_server(NANO, GENERATED, **{"serve.request_chat_template": False}) == {
        id: (response["status_code"], plain(response["body"])) for id, response in answered.items()
    }
    kinds = {line["custom_id"]: line["url"] for line in GENERATED}
    for id, response in answered.items():
        assert response["request_id"]
        if response["status_code"] == 200:
            kind = ChatCompletion if "chat" in kinds[id] else Completion
            kind.model_validate(response["body"])
    assert len({line["id"] for line in got}) == len(got) == 13


def test_pooling_models_answer_as_the_server_does(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make(model, "bert", modes={"pooling_mode_mean_tokens": True}, normalizes=True)
    documents = {"query": TEXTS[0], "documents": TEXTS[1:]}
    lines = [
        request("one", "/v1/embeddings", input=TEXTS[0]),
        request("several", "/v1/embeddings", input=TEXTS, dimensions=8),
        request("rerank", "/v1/rerank", **documents),
        request("score", "/v1/score", text_1=TEXTS[0], text_2=TEXTS[1:]),
        request("wrong", "/v1/embeddings", input=[]),
    ]
    source, out = write(tmp_path / "in", lines), tmp_path / "out"
    settings = {"model.max_model_len": 100, "cache.memory_bytes": 10_000_000}
    options = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    assert run(model, source, out, *options) == 3
    got = {line["custom_id"]: line["response"] for line in read(out)}
    assert answers_of_server(model, lines, **settings) == {
        id: (response["status_code"], plain(response["body"])) for id, response in got.items()
    }
    assert [id for id, response in got.items() if response["status_code"] != 200] == ["wrong"]
    CreateEmbeddingResponse.model_validate(got["several"]["body"])


WORDS = (
    *("hello", "kitten", "planet", "garden", "upper"),
    *("yellow", "table", "market", "silver", "window"),
)
KILLED = """
import os, signal
from swell.cluster.cli import main, run_batch

write, whole = run_batch._Output.write, []

def write_some(self, line):
    if len(whole) == {whole}:
        os.write(self._fd, b'{{"id":"batch_req_')
        os.kill(os.getpid(), signal.SIGKILL)
    whole.append(line)
    write(self, line)

run_batch._Output.write = write_some
main.main({arguments})
"""
"""Is killed within its fourth line."""


def test_a_killed_run_continues_with_the_missing_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [chat(word, f"upper: {word}") for word in WORDS]
    source, out = write(tmp_path / "in", ["{bad", *lines]), tmp_path / "out"
    arguments = ["run-batch", str(NANO), str(source), str(out), *SET]
    code = KILLED.format(whole=3, arguments=arguments)
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=TIMEOUT_S, check=False)
    assert killed.returncode == -signal.SIGKILL
    before = out.read_bytes()
    assert before.count(b"\n") == 3 and not before.endswith(b"\n")
    kept = before[: before.rindex(b"\n") + 1]
    assert run(NANO, source, out) == 3
    assert out.read_bytes().startswith(kept)
    assert "11 lines, 3 of them by earlier runs: 10 answered, 1 failed" in capfd.readouterr().err
    got = read(out)
    answers = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in got
        if line["response"]
    }
    assert answers == {word: word.upper() for word in WORDS}
    assert len(got) == 11
    finished = out.read_bytes()
    # Nothing is left, so no model is loaded: a missing one would be an error.
    assert run(NANO, source, out, "--set", "model.load_format=sharded") == 1
    assert run(NANO, source, out) == 3
    assert out.read_bytes() == finished


def test_standard_input_and_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps(chat("a", "upper: hello")).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert main(["run-batch", str(NANO), "-", "-", *SET]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    assert json.loads(line)["response"]["body"]["choices"][0]["message"]["content"] == "HELLO"


def test_wrong_files_are_refused_before_anything_is_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("swell.cluster.cli.run_batch.LocalCluster", load)
    one, out = chat("a", "a"), tmp_path / "out"

    def refusal(lines: Sequence[Any], to: Path = out, *options: str) -> str:
        assert run(NANO, write(tmp_path / "in", lines), to, *options) == 1
        return capfd.readouterr().err

    assert "line 2 of the input has the custom_id='a' of line 1" in refusal([one, one])
    assert not out.exists()
    assert "is the input; name another file" in refusal([one], tmp_path / "in")
    write(out, [chat("b", "b")])
    assert "line 1 of" in refusal([one]) and out.read_text().count("\n") == 1
    assert "parallel.expert" in refusal([one], out, "--set", "parallel.expert=true")
    out.write_text("")
    with out.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another process writes" in refusal([one])
    assert run(NANO, tmp_path / "missing", out) == 1
    assert "No such file" in capfd.readouterr().err
    assert run(NANO, write(tmp_path / "in", []), out) == 0


def test_a_failed_engine_ends_the_run_and_keeps_what_is_complete(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from swell.engine.core import EngineCore
    from swell.engine.executor import ExecutorError

    step, steps = EngineCore.step_on, []

    async def step_on(self: EngineCore, *args: Any) -> Any:
        steps.append(args)
        if len(steps) > 20:
            raise ExecutorError("the worker is gone")
        return await step(self, *args)

    monkeypatch.setattr(EngineCore, "step_on", step_on)
    lines = [chat("short", "upper: a"), chat("long", "a", max_tokens=200, ignore_eos=True)]
    source, out = write(tmp_path / "in", lines), tmp_path / "out"
    assert run(NANO, source, out, "--in-flight", "1") == 1
    assert capfd.readouterr().err.strip().endswith("swell: the worker is gone")
    assert [line["custom_id"] for line in read(out)] == ["short"]
    monkeypatch.undo()
    assert run(NANO, source, out) == 0
    assert [line["custom_id"] for line in read(out)] == ["short", "long"]


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "guide" / "batch.md").read_text()
    source, want = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    program, *arguments = shlex.split(command)
    assert program == "swell"
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.jsonl").write_text(source)
    assert main(arguments) == 3
    got = {line["custom_id"]: line for line in read(tmp_path / "answers.jsonl")}
    shown = [json.loads(line) for line in want.splitlines()]
    assert len(got) == len(shown)
    for line in shown:
        assert_shortened(line, got[line["custom_id"]])


def assert_shortened(shown: Any, whole: Any) -> None:
    """Raises AssertionError unless `shown` is `whole` with parts left out."""
    if isinstance(shown, dict):
        for key, value in shown.items():
            assert_shortened(value, whole[key])
    elif isinstance(shown, list):
        for one, other in zip(shown, whole, strict=True):
            assert_shortened(one, other)
    elif isinstance(shown, str):
        assert re.fullmatch(".*".join(map(re.escape, shown.split("..."))), whole), (shown, whole)
    else:
        assert shown == whole
