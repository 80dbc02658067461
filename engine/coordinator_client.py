"""The engine's line to the coordinator, on a thread of its own.

A step may take long, and one whose peer has died may never end; the engine's loop hears nothing
meanwhile. This thread goes on: it repeats the newest report with fresh progress, so that an engine
at work is never taken for a stopped one, and it hears the command that tears the loop out of a
step. Without this thread an engine would wait for commands that it never hears: what ends the
thread ends the process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from swell.configs.process import exit_on_error
from swell.configs.schema import ClusterConfig
from swell.coordinator.channel import ChannelAddress, ChannelKeys, Outlet, Waker
from swell.coordinator.wire import (
    CoordinatorMessage,
    EngineCommand,
    EngineHello,
    EngineReport,
    Introduce,
)


class CoordinatorClient:
    """Says what the engine's loop tells it to say, beats in between, hands over commands.

    `hello` introduces the engine, `progress_counter` is its progress, `on_heartbeat` is called when
    the loop has said nothing for a while; these and `on_command` run on this thread and must not
    wait.
    """

    def __init__(
        self,
        config: ClusterConfig,
        coordinator: ChannelAddress,
        keys: ChannelKeys,
        *,
        hello: Callable[[], EngineHello],
        progress_counter: Callable[[], int],
        on_command: Callable[[EngineCommand], None],
        on_heartbeat: Callable[[], None],
    ) -> None:
        self._heartbeat_s = min(config.heartbeat_s, config.stall_timeout_s / 4)
        self._outlet: Outlet[EngineCommand] = Outlet(coordinator, EngineCommand, keys)
        self._hello, self._progress_counter = hello, progress_counter
        self._on_command, self._on_heartbeat = on_command, on_heartbeat
        self._messages: queue.SimpleQueue[CoordinatorMessage] = queue.SimpleQueue()
        self._report: EngineReport | None = None
        self._reported_at = time.monotonic()
        self._waker = Waker()
        self._stopping = threading.Event()
        run = exit_on_error(self._run, "engine beacon")
        self._thread = threading.Thread(target=run, name="swell-beacon", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, messages: Iterable[CoordinatorMessage]) -> None:
        """Send in order; from any thread."""
        for message in messages:
            self._messages.put(message)
        self._waker.wake()

    def stop(self) -> None:
        self._stopping.set()
        self._waker.wake()
        self._thread.join()
        self._outlet.close()
        self._waker.close()

    def _run(self) -> None:
        self._outlet.send(self._hello())
        while not self._stopping.is_set():
            wait_s = max(0.0, self._reported_at + self._heartbeat_s - time.monotonic())
            command = self._outlet.receive(wait_s, self._waker)
            self._send_messages()
            if time.monotonic() >= self._reported_at + self._heartbeat_s:
                self._send_heartbeat()
            if command is not None:
                self._handle_command(command)
        self._send_messages()

    def _send_messages(self) -> None:
        while not self._messages.empty():
            message = self._messages.get()
            if isinstance(message, EngineReport):
                self._report, self._reported_at = message, time.monotonic()
            self._outlet.send(message)

    def _send_heartbeat(self) -> None:
        """The loop has said nothing for a while."""
        self._reported_at = time.monotonic()
        self._on_heartbeat()
        if self._report is not None:
            self._outlet.send(
                msgspec.structs.replace(self._report, progress_counter=self._progress_counter())
            )

    def _handle_command(self, command: EngineCommand) -> None:
        if isinstance(command, Introduce):
            self._outlet.send(self._hello())
            return
        self._on_command(command)
