"""One ingress's connection to one engine. Nothing is lost in it without being noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from swell.configs.log import StructuredLogger
from swell.coordinator.channel import AsyncOutlet, ChannelKeys
from swell.coordinator.ground import Ground
from swell.coordinator.roster import Member
from swell.engine.wire import (
    EngineAnswer,
    EngineCoreOutputs,
    KeepAlive,
    KeepAliveReply,
    ReplaceClient,
)

_MAX_REPLACED = 64
"""Lost connections that are named to the engine; it forgets silent ones by itself."""


class EngineId(NamedTuple):
    """One incarnation of the engine of a rank: its successor at the same rank is another engine."""

    rank: int
    incarnation: int

    @classmethod
    def of(cls, member: Member) -> EngineId:
        return cls(member.rank, member.incarnation)


OnOutputs = Callable[[EngineCoreOutputs], None]
OnMessagesLost = Callable[[EngineId], None]


class EngineConnection:
    """Counts the messages in both directions, and opens a new connection where some were lost.

    An engine numbers its messages with outputs, so that the next one shows the loss of those before
    it; and it answers each keep-alive with its counts, so that the loss of the last one is seen,
    and that of messages to the engine. Frames of one connection keep their order: whatever was sent
    before a keep-alive, or before its reply, has come before it, or is lost.

    The new connection has another identity. The engine forgets the lost one and its requests; the
    caller sends its requests again.
    """

    def __init__(
        self,
        ground: Ground,
        member: Member,
        keys: ChannelKeys,
        on_outputs: OnOutputs,
        on_messages_lost: OnMessagesLost,
    ) -> None:
        self._ground = ground
        self._engine = EngineId.of(member)
        self._address = member.address
        self._keys = keys
        self._on_outputs = on_outputs
        self._on_messages_lost = on_messages_lost
        self._replaced: list[bytes] = []
        """Identities of lost connections, until the engine surely knows."""
        self._reached_at = ground.now()
        """When the newest keep-alive that is known to have come was sent, or a later one."""
        self._asked_at = -float("inf")
        """When the last keep-alive was sent."""
        self.num_unanswered = 0
        """Keep-alives in a row without an answer: the engine is out of reach, or inside a step or
        the forming of a group."""
        self.waits_for_coordinator = False
        """By its newest answer the engine computes nothing, and its coordinator is silent."""
        self._log = StructuredLogger("cluster.link", rank=member.rank)
        self._open()

    def send(self, message: Any) -> None:
        self._sent += 1
        self._outlet.send(message)

    def check(self, now: float, interval_s: float = 0.0) -> float:
        """Send a keep-alive, if there is a connection: it ends when the engine's host was silent
        for some time. Else returns for how long the engine was not reached, in seconds; that time
        counts, too. It was reached if it has answered: what it sends by itself may come although
        nothing comes to it. `interval_s`: to the next keep-alive, if all that was sent and
        received is known to have come."""
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
        """Of the newest reply: what was sent, and the number of the last output."""
        self._outlet: AsyncOutlet[EngineAnswer] = self._ground.async_outlet(
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
            self._on_outputs(message)
        except Exception as error:  # handled like a lost message
            self._log.exception("outputs not handled", error)
            self._replace("outputs were not handled")

    def _replace(self, reason: str) -> None:
        self._log.warning("messages were lost", reason=reason)
        self._replaced = [*self._replaced, self._outlet.identity][-_MAX_REPLACED:]
        self._outlet.close()
        self._open()
        self.send(ReplaceClient(list(self._replaced)))
        self._on_messages_lost(self._engine)
