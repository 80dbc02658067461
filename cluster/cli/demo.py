"""Demo (`make demo`): a cluster on this machine that grows while it generates, and a summary.

It starts `swell serve` as a child process, streams prompts to its model over HTTP, requests a
second engine meanwhile, continues until that engine has served too, stops the child and checks that
no process is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

import msgspec
from rich import box
from rich.live import Live
from rich.table import Table

from swell.cluster.api.admin.change_requests import ScaleRequest
from swell.cluster.api.admin.protocol import ClusterState, ModelList
from swell.cluster.api.chat.protocol import ChatChunk
from swell.cluster.cli.admin_commands import change_engines
from swell.cluster.cli.child_process import ServerProcess
from swell.cluster.cli.console import plain, print_table, short
from swell.cluster.cli.http_client import Client, ServerError, read_events

_CONFIG = Path(__file__).parents[2] / "configs" / "demo.yaml"
_ENGINES = 2
_READY_S = 150.0
_TOTAL_S = 165.0
"""Limit of the whole demo without the shutdown."""
_GROW_S = 90.0
_SERVED_S = 45.0
_ENOUGH = 4
"""Responses of the new engine after which the demo stops."""
_PAUSE_S = 0.25
"""Delay between the prompts of one client: the new engine loads on the same cores."""
_REFRESH_S = 0.05
_MAX_TOKENS = 120
_WIDTH = 60
"""Characters of a prompt or a response in the summary."""
_SHOWN_ANSWERS = 12
"""Responses that are printed without a terminal; later ones are only counted."""
_LINE_CHARS = 100
"""Characters of such a response."""

PROMPTS = (
    ("count from 12 to 30", ", ".join(map(str, range(12, 31)))),
    ("reverse: kitten", "nettik"),
    ("sort: kitten", "eikntt"),
    ("upper: kitten", "KITTEN"),
    ("add: 47+85", "132"),
    ("say hello to Anna", "Hello, Anna!"),
    ("repeat 5 times: mole", "mole mole mole mole mole"),
    ("json name, age: Anna is 31 years old and lives in Oslo.", '{"name": "Anna", "age": 31}'),
)
"""Prompts that the model was trained on (configs/models/train.py), and their correct responses."""


class DemoFailed(RuntimeError):
    """Raised if the demo failed; the message names the step."""


@dataclass
class Answer:
    """One prompt and its response so far."""

    prompt: str
    right: str
    text: str = ""
    engines: str = ""
    """Ranks of the engines that served it, from `x-swell-engine`."""
    tokens: int = 0
    ttft_s: float = 0.0
    began: float = 0.0
    """Start time on the monotonic clock."""
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second after the first token."""
        return (self.tokens - 1) / max(self.seconds - self.ttft_s, 1e-9) if self.tokens > 1 else 0.0


@dataclass
class DemoRecord:
    """The events of the demo, in seconds since the first prompt."""

    started: float = field(default_factory=time.monotonic)
    answers: list[Answer] = field(default_factory=list)
    open: dict[int, Answer] = field(default_factory=dict)
    """The response that each client is waiting for."""
    epochs: tuple[int, int] = (0, 0)
    requested_s: float = 0.0
    grown_s: float = 0.0
    old_ranks: set[str] = field(default_factory=set)

    def now_s(self) -> float:
        return time.monotonic() - self.started

    def answered_by_new_engines(self) -> int:
        """Returns the number of responses that new engines have started."""
        known = self.old_ranks | {""}
        begun = [*self.answers, *(a for a in self.open.values() if not a.seconds)]
        return sum(bool(set(answer.engines.split(",")) - known) for answer in begun)

    def answered_during_scale_up(self) -> int:
        """Returns the number of responses that streamed, at least partly, while the engine was
        added."""
        first, last = self.started + self.requested_s, self.started + self.grown_s
        return sum(a.began < last and a.began + a.seconds > first for a in self.answers)


class Screen:
    """Shows the running responses (`open`) in a table on a terminal, else the finished ones
    (`answers`) as lines. Other output appears above the table."""

    def __init__(
        self, live: Live | None, open: Mapping[int, Answer], answers: Sequence[Answer]
    ) -> None:
        self._live = live
        self._open = open
        self._answers = answers
        self._printed = 0

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        for answer in self._answers[self._printed : _SHOWN_ANSWERS]:
            prompt, text = plain(answer.prompt), short(plain(answer.text), _LINE_CHARS)
            print(f"engine {answer.engines}: {prompt} -> {text}", flush=True)
            self._printed += 1

    def _table(self) -> Table:
        caption = f"{len(self._answers)} answers so far"
        table = Table(box=box.SIMPLE_HEAD, expand=True, caption=caption)
        for name in ("prompt", "answer"):
            table.add_column(name, no_wrap=True, ratio=1)
        table.add_column("engine", justify="right", width=6)
        for _, answer in sorted(self._open.items()):
            table.add_row(answer.prompt, answer.text, answer.engines)
        return table


@contextlib.contextmanager
def open_screen(open: Mapping[int, Answer], answers: Sequence[Answer]) -> Iterator[Screen]:
    """Opens the screen that suits standard output."""
    terminal = sys.stdout.isatty()
    live = Live(auto_refresh=False, transient=True) if terminal else contextlib.nullcontext()
    with live as table:
        yield Screen(table, open, answers)


async def stream_answer(client: Client, model: str, answer: Answer) -> None:
    """Streams one response into `answer`. Raises DemoFailed."""
    body = msgspec.json.encode(
        {
            "model": model,
            "messages": [{"role": "user", "content": answer.prompt}],
            "max_tokens": _MAX_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    answer.began = started = time.monotonic()
    try:
        async with client.open("POST", "/v1/chat/completions", body) as response:
            answer.engines = response.headers.get("x-swell-engine", "?")
            async for data in read_events(response):
                chunk = msgspec.json.decode(data, type=ChatChunk)
                for choice in chunk.choices:
                    if isinstance(choice.delta.content, str) and choice.delta.content:
                        answer.ttft_s = answer.ttft_s or time.monotonic() - started
                        answer.text += choice.delta.content
                if chunk.usage:
                    answer.tokens = chunk.usage.completion_tokens
    except ServerError as error:
        raise DemoFailed(f"{answer.prompt!r} failed: {error}") from None
    answer.seconds = time.monotonic() - started


async def send_prompts(
    client: Client, model: str, place: int, record: DemoRecord, stop: asyncio.Event
) -> None:
    """Runs one client: it sends its own prompt first, then all others in turn until `stop`."""
    for prompt, right in islice(cycle(PROMPTS), place, None):
        if stop.is_set():
            break
        answer = record.open[place] = Answer(prompt, right)
        await stream_answer(client, model, answer)
        record.answers.append(answer)
        await asyncio.sleep(_PAUSE_S)


async def grow(client: Client, record: DemoRecord) -> None:
    """Requests one more engine once tokens stream, and waits until it has served. Raises
    DemoFailed."""
    before = await client.get("/admin/cluster", ClusterState)
    record.old_ranks = {str(engine.rank) for engine in before.engines}
    while not any(answer.text for answer in record.open.values()):
        await asyncio.sleep(0.01)
    record.requested_s = record.now_s()
    async with _limit(_GROW_S, "the cluster did not grow"):
        request = ScaleRequest(engines=_ENGINES)
        after = await change_engines(client, "/admin/scale", request)
    record.grown_s = record.now_s()
    record.epochs = (before.epoch, after.epoch)
    async with _limit(_SERVED_S, f"the new engine served fewer than {_ENOUGH} answers"):
        while record.answered_by_new_engines() < _ENOUGH:
            await asyncio.sleep(_REFRESH_S)


@contextlib.asynccontextmanager
async def _limit(limit_s: float, failure: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise DemoFailed(f"{failure} in {limit_s:g} s") from None


async def run_demo(url: str) -> DemoRecord:
    """Runs the part of the demo between `ready` and the shutdown."""
    client = Client(url, timeout_s=60)
    model = (await client.get("/v1/models", ModelList)).data[0].id
    record, stop = DemoRecord(), asyncio.Event()
    with open_screen(record.open, record.answers) as screen:

        async def refresh() -> None:
            while not stop.is_set():
                screen.refresh()
                await asyncio.sleep(_REFRESH_S)

        try:
            async with asyncio.TaskGroup() as tasks:
                for place in range(len(PROMPTS)):
                    tasks.create_task(send_prompts(client, model, place, record, stop))
                tasks.create_task(refresh())
                await grow(client, record)
                stop.set()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            screen.refresh()
    return record


def print_summary(record: DemoRecord) -> None:
    """Prints the first response to each prompt, then the counts."""
    rows = []
    for prompt, _ in PROMPTS:
        answer = next(answer for answer in record.answers if answer.prompt == prompt)
        cells = (prompt, answer.text, answer.engines)
        ttft = f"{1000 * answer.ttft_s:.0f}" if answer.ttft_s else "-"
        numbers = (ttft, f"{answer.rate:.0f}")
        rows.append((*(short(plain(cell), _WIDTH) for cell in cells), *numbers))
    columns = ("prompt", "answer", "engine", "TTFT ms", "tok/s")
    print_table("first answers", columns, rows, left=2)
    answers = record.answers
    right = sum(answer.text == answer.right for answer in answers)
    tokens = sum(answer.tokens for answer in answers)
    served = Counter(answer.engines for answer in answers)
    shares = ", ".join(f"engine {rank}: {count}" for rank, count in sorted(served.items()))
    print(f"answers      {len(answers)}, none failed; {right} right, {tokens} tokens")
    print(f"served by    {shares}")
    print(
        f"the cluster  grew to {_ENGINES} engines {record.grown_s:.1f} s after the first prompt "
        f"(requested at {record.requested_s:.1f} s), "
        f"epoch {record.epochs[0]} -> {record.epochs[1]}; "
        f"{record.answered_during_scale_up()} answers streamed meanwhile"
    )


async def run_with_server(config: str, port: int) -> None:
    """Starts the server, runs the demo, stops and checks. Raises DemoFailed; the child never
    outlives this."""
    began = time.monotonic()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    server = ServerProcess(config, port)
    try:
        async with asyncio.timeout(_TOTAL_S):
            url = await server.start(_READY_S)
            print(f"ready after {time.monotonic() - began:.1f} s; sending {len(PROMPTS)} prompts")
            record = await run_demo(url)
    except TimeoutError:
        raise DemoFailed(f"not done after {_TOTAL_S:g} s") from None
    except (DemoFailed, ServerError) as error:
        lines = "\n".join(f"  | {line}" for line in server.last_lines)
        raise DemoFailed(f"{error}; the server's last lines:\n{lines}") from None
    finally:
        failure = await server.stop()
    print_summary(record)
    if failure:
        raise DemoFailed(failure)
    print("shutdown     clean: exit code 0, and no process is left")
    print(f"all steps succeeded, in {time.monotonic() - began:.0f} s")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m swell.cluster.cli.demo", description=__doc__)
    parser.add_argument("--config", default=str(_CONFIG), help="default: configs/demo.yaml")
    parser.add_argument("--port", type=int, default=0, help="default: a free port")
    args = parser.parse_args(argv)
    try:
        asyncio.run(run_with_server(args.config, args.port))
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except (DemoFailed, ServerError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
