"""Connection of one ingress to one engine, which detects every lost message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

from swell.configs.runtime.log import StructuredLogger
from swell.coordinator.roster import Member
from swell.coordinator.transport.channel import AsyncOutlet, ChannelKeys
from swell.coordinator.transport.runtime import Runtime
from swell.coordinator.wire import ClusterView, EngineLoad
from swell.engine.wire import (
    EngineAnswer,
    EngineCoreOutputs,
    KeepAlive,
    KeepAliveReply,
    ReplaceClient,
)

_MAX_REPLACED = 64
"""Limit on lost connections that are named to the engine; it forgets silent ones by itself."""


class EngineId(NamedTuple):
    """One incarnation of the engine with a rank: its successor with the same rank is another
    engine."""

    rank: int
    incarnation: int

    @classmethod
    def of(cls, member: Member) -> EngineId:
        return cls(member.rank, member.incarnation)


class EngineListener(Protocol):
    """Receives what the connections of an ingress learn, and tells them which engines and versions
    it uses. `AsyncLLM` implements it. All methods are called in the event loop, one at a time."""

    def on_view(self, view: ClusterView, lost: list[EngineId]) -> None:
        """Receives each view of the coordinator, with the engines that have left since the last
        one. No message of these arrives afterwards."""

    def on_loads(self, loads: Sequence[EngineLoad]) -> None:
        """Receives loads that changed after the newest view, of engines of that view."""

    def on_outputs(self, message: EngineCoreOutputs) -> None:
        """Receives each message of an engine. A message for which this raises counts as lost."""

    def on_messages_lost(self, engine: EngineId) -> None:
        """Is called when messages to or from an engine were lost. The engine has dropped the
        requests of this ingress, or does so as soon as it can be reached."""

    def on_unreachable(self, engines: Mapping[EngineId, str]) -> None:
        """Receives all engines that this ingress cannot use, with the reasons: with each heartbeat
        while there are any, or while one replaces a worker. Meanwhile more of their requests may
        become able to continue elsewhere, for example after the first token."""

    def engines_in_use(self) -> Set[EngineId]:
        """Returns the engines that run requests of this ingress."""

    def versions_in_use(self) -> list[str]:
        """Returns the versions that the running answers of this ingress require."""


class EngineConnection:
    """Counts the messages in both directions, and opens a new connection if some were lost.

    An engine numbers its messages with outputs, so a gap shows that earlier ones were lost. It
    answers each keep-alive with its counts, which shows the loss of the last output and of messages
    to the engine. A connection delivers frames in order: everything sent before a keep-alive, or
    before its reply, has arrived before it or is lost.

    The new connection has another identity. The engine forgets the old one and its requests; the
    caller sends its requests again.
    """

    def __init__(
        self,
        runtime: Runtime,
        member: Member,
        keys: ChannelKeys,
        listener: EngineListener,
    ) -> None:
        self._runtime = runtime
        self._engine = EngineId.of(member)
        self._address = member.address
        self._keys = keys
        self._listener = listener
        self._replaced: list[bytes] = []
        """Identities of lost connections, until the engine is known to have read them."""
        self._reached_at = runtime.now()
        """A lower bound of the engine's last contact: when the last keep-alive before its newest
        reply was sent."""
        self._asked_at = -float("inf")
        """When the last keep-alive was sent."""
        self.num_unanswered = 0
        """Number of keep-alives in a row without an answer: the engine is unreachable, runs a step,
        or forms a process group."""
        self.waits_for_coordinator = False
        """Whether the engine's newest answer says that it computes nothing now:
        `KeepAliveReply.waits_for_coordinator`."""
        self._log = StructuredLogger("cluster.link", rank=member.rank)
        self._open()

    def send(self, message: Any) -> None:
        self._sent += 1
        self._outlet.send(message)

    def check(self, now: float, interval_s: float = 0.0) -> float:
        """Sends a keep-alive if the connection is open, and returns 0. Otherwise returns for how
        many seconds the engine was not reached, counted from its last answer. Only answers count:
        outputs that the engine sends by itself may arrive although no message reaches it. The
        connection closes when the engine's host was silent for some time. `interval_s` is the time
        to the next keep-alive if all that was sent and received is confirmed."""
        if not self._outlet.is_connected():
            return now - self._reached_at
        is_all_known = self._confirmed == (self._sent, self._last_seq) and not self.num_unanswered
        if not is_all_known or now >= self._asked_at + interval_s:
            self._asked_at = now
            self.num_unanswered += 1
            self._outlet.send(KeepAlive(self._sent))
        return 0.0

    def close(self) -> None:
        self._outlet.close()

    def _open(self) -> None:
        self._sent = self._last_seq = 0
        self._confirmed = (-1, -1)
        """The counts in the newest reply: messages sent to the engine, and the number of its last
        output."""
        self._outlet: AsyncOutlet[EngineAnswer] = self._runtime.async_outlet(
            self._address, EngineAnswer, self._keys, self._on_message
        )

    def _on_message(self, message: EngineAnswer) -> None:
        if isinstance(message, KeepAliveReply):
            self._reached_at, self.num_unanswered = self._asked_at, 0
            self.waits_for_coordinator = message.waits_for_coordinator
            if (message.sent, self._last_seq) != (message.received, message.seq):
                self._replace("the counts differ")
            else:
                self._replaced.clear()
                self._confirmed = (message.sent, message.seq)
            return
        if message.seq:
            if message.seq != self._last_seq + 1:
                self._replace("outputs are missing")
                return
            self._last_seq = message.seq
        try:
            self._listener.on_outputs(message)
        except Exception as error:  # handled like a lost message
            self._log.exception("outputs not handled", error)
            self._replace("outputs were not handled")

    def _replace(self, reason: str) -> None:
        self._log.warning("messages were lost", reason=reason)
        self._replaced = [*self._replaced, self._outlet.identity][-_MAX_REPLACED:]
        self._outlet.close()
        self._open()
        self.send(ReplaceClient(list(self._replaced)))
        self._listener.on_messages_lost(self._engine)
