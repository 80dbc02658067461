"""`swell run-batch`: answers the requests of a file in this process, without Ray or a server.

The requests go through the routes of an ingress, so they are checked and answered as over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import BinaryIO, cast

from msgspec import Raw
from msgspec.json import encode
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from starlette.types import ASGIApp, Message

from swell.cluster.api.bodies.body_reader import HELD_BODIES
from swell.cluster.api.ingress import build_ingress
from swell.cluster.api.request_context import REQUEST_ID
from swell.cluster.cli.batch_file import (
    ENVELOPE_BYTES,
    BatchResponse,
    EarlierOutput,
    InputLine,
    OutputLine,
    check_input,
    read_input,
    read_output,
)
from swell.cluster.cli.generate import quiet_transformers
from swell.cluster.local_cluster import LocalCluster
from swell.cluster.local_engine import load_local
from swell.configs.runtime.process import freeze_gc, prepare_for_torch
from swell.configs.schema import Config
from swell.configs.section import MAX_INTEGER, MAX_SECONDS, ConfigError

SOME_FAILED = 3
"""Exit code if every line has its output line, and some of them have failed."""
STANDARD = "-"
"""Stands for standard input or output."""
_ALONE: dict[str, object] = {
    "parallel.data": 1,
    "parallel.prefill_engines": 0,
    "cluster.min_engines": 1,
    "cluster.stall_timeout_s": MAX_SECONDS,
    "serve.api_keys_file": None,
    "serve.admin_keys_file": None,
    "serve.otlp_endpoint": None,
    "serve.sessions": 0,
    "serve.stored_responses": 0,
    "serve.max_waiting_requests": MAX_INTEGER,
    "serve.max_waiting_tokens": MAX_INTEGER,
}
"""The keys that concern a server and its clients. Nobody would replace a stalled engine, and the
requests in flight are limited by the command."""


def run_batch(args: argparse.Namespace) -> int:
    quiet_transformers()
    prepare_for_torch()
    config = load_local(args.config, {**dict(args.set), **_ALONE}, "run-batch")
    max_line_bytes = config.serve.max_body_bytes + ENVELOPE_BYTES
    with ExitStack() as opened:
        file = opened.enter_context(_opened_input(args.input))
        ids = check_input(read_input(file, max_line_bytes))
        output = opened.enter_context(_opened_output(args.output))
        if args.output != STANDARD and os.path.samestat(os.fstat(file.fileno()), output.stat()):
            raise ConfigError(f"{args.output} is the input; name another file for the output")
        earlier = output.resume(ids)
        failed = earlier.failed
        if todo := len(ids) - len(earlier.ids):
            file.seek(0)
            lines = (one for one in read_input(file, max_line_bytes) if one.id not in earlier.ids)
            with _progress() as bars:
                work = _answer_all(config, lines, todo, args.in_flight, output, bars)
                failed += asyncio.run(work)
    kept = f", {len(earlier.ids)} of them by earlier runs" if earlier.ids else ""
    print(f"{len(ids)} lines{kept}: {len(ids) - failed} answered, {failed} failed", file=sys.stderr)
    return SOME_FAILED if failed else 0


@contextmanager
def _opened_input(name: str) -> Iterator[BinaryIO]:
    """Yields a file that can be read twice."""
    with tempfile.TemporaryFile() if name == STANDARD else open(name, "rb") as file:
        if name == STANDARD:
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.seek(0)
        yield cast(BinaryIO, file)


class _Output:
    """The output. Each line is written at once, so a killed process loses no complete line."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._name = name

    def stat(self) -> os.stat_result:
        return os.fstat(self._fd)

    def resume(self, ids: set[str]) -> EarlierOutput:
        """Drops an incomplete last line, and returns what is there. Raises ConfigError if another
        process writes the file, or if it is the output of another input."""
        if self._name == STANDARD:
            return EarlierOutput(set(), 0, 0)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process writes {self._name}") from None
        with open(self._fd, "rb", closefd=False) as file:
            earlier = read_output(file, ids, self._name)
        if self.stat().st_size > earlier.size_bytes:
            os.ftruncate(self._fd, earlier.size_bytes)
        return earlier

    def write(self, line: OutputLine) -> None:
        left = memoryview(encode(line) + b"\n")
        while left:
            left = left[os.write(self._fd, left) :]


@contextmanager
def _opened_output(name: str) -> Iterator[_Output]:
    if name == STANDARD:
        yield _Output(sys.stdout.fileno(), name)
        return
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        yield _Output(fd, name)
    finally:
        os.close(fd)


def _progress() -> Progress:
    """Returns a bar on standard error, if that is a terminal."""
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal)


async def _answer_all(
    config: Config,
    lines: Iterator[InputLine],
    todo: int,
    in_flight: int | None,
    output: _Output,
    bars: Progress,
) -> int:
    """Writes the output of each line when it is known. Returns how many have failed. Raises the
    exception of the engine if that fails."""
    bar = bars.add_task("loading the model", total=None)
    limit = in_flight or 2 * config.scheduler.max_rows
    limit_bytes = HELD_BODIES * config.serve.max_body_bytes
    cluster = await asyncio.to_thread(LocalCluster, config)
    running: dict[asyncio.Future[None], int] = {}
    failed = 0
    try:
        ingress = await build_ingress(config, cluster.connect, None)
        freeze_gc()
        ended = asyncio.wrap_future(cluster.ended)

        async def answer(line: InputLine) -> None:
            nonlocal failed
            done = await _output_line(ingress.app, line)
            if ended.done():
                return
            output.write(done)
            failed += done.failed
            bars.update(bar, advance=1, description=f"{failed} failed" if failed else "answers")

        async def wait_for_one() -> None:
            done, _ = await asyncio.wait((*running, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
            for task in done:
                running.pop(task)
                task.result()

        bars.update(bar, description="answers", total=todo)
        for line in lines:
            size = len(line.body)
            while running and (len(running) >= limit or sum(running.values()) + size > limit_bytes):
                await wait_for_one()
            running[asyncio.ensure_future(answer(line))] = size
        while running:
            await wait_for_one()
        await ingress.stop()
    finally:
        for task in running:
            task.cancel()
        await asyncio.to_thread(cluster.close)
    return failed


async def _output_line(app: ASGIApp, line: InputLine) -> OutputLine:
    if line.error is not None:
        return OutputLine(line.id, line.custom_id, error=line.error)
    return OutputLine(line.id, line.custom_id, await _post(app, line.url, line.body))


async def _post(app: ASGIApp, url: str, body: bytes) -> BatchResponse:
    """Returns the answer of the application to a request, as a server would pass it on."""
    sent: list[Message] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await never  # this client never disconnects

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    head, *parts = sent
    headers = dict(head["headers"])
    content = b"".join(part.get("body", b"") for part in parts)
    return BatchResponse(head["status"], headers[REQUEST_ID.encode()].decode(), Raw(content))
