"""Rules about who may connect to an inbox, and how many resources an unauthenticated peer may use.

A handshake is pending from the moment its connection is accepted until it has succeeded or
`HANDSHAKE_S` has passed, after which ZeroMQ itself closes the connection. At most `MAX_PENDING`
handshakes may be pending: a further connection is shut down as soon as it is accepted, and a peer
of the cluster reconnects after a moment. Therefore untrusted peers hold at most this many file
descriptors and this many times `MAX_MESSAGE_BYTES`, for at most this long. Authenticated peers are
not affected.

ZeroMQ does not report which connection's handshake has succeeded, only that one has. Successes are
therefore counted for as long as their handshake could be pending. Untrusted peers cannot cause
successes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

HANDSHAKE_S = 10.0
"""Timeout of a handshake. It needs some milliseconds, but seconds on a busy host."""
MAX_PENDING = 64
"""Maximum number of pending handshakes of one inbox."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Maximum size of a frame, as its sender announces it, also before the sender is authenticated.
Twice the largest `serve.max_body_bytes`, because the largest frame of a peer is a user's request,
whose text it contains as tokens: a model accepts far fewer than this."""

ZAP_VERSION = b"1.0"
_MECHANISM = b"CURVE"
_ZAP_FRAMES = 7
"""Version, request id, domain, address, identity, mechanism, public key (RFC 27)."""


def zap_reply(request: Sequence[bytes], allowed: Collection[bytes]) -> list[bytes]:
    """Returns the reply to a request of ZeroMQ's authentication protocol: 200 for a CURVE client
    whose public key, 32 bytes, is in `allowed`, else 400."""
    is_allowed = (
        len(request) == _ZAP_FRAMES
        and request[0] == ZAP_VERSION
        and request[5] == _MECHANISM
        and request[6] in allowed
    )
    number = request[1] if len(request) > 1 else b""
    status = (b"200", b"OK") if is_allowed else (b"400", b"this key is not of the cluster")
    return [ZAP_VERSION, number, *status, b"", b""]


class PendingHandshakes:
    """Pending handshakes of one inbox. File descriptors identify connections; times are in
    seconds."""

    def __init__(self, limit: int = MAX_PENDING, handshake_s: float = HANDSHAKE_S) -> None:
        self._limit = limit
        self._handshake_s = handshake_s
        self._pending: dict[int, float] = {}
        """Connection -> when it was accepted, in this order."""
        self._succeeded: deque[float] = deque()
        self.refused = 0

    def __len__(self) -> int:
        return max(0, len(self._pending) - len(self._succeeded))

    def accepted(self, connection: int, now: float) -> bool:
        """Records a new connection. Returns whether it may continue; otherwise it must be shut
        down."""
        self._forget(now)
        self._pending.pop(connection, None)  # the end of an earlier connection was missed
        self._pending[connection] = now
        if len(self) <= self._limit:
            return True
        self.refused += 1
        return False

    def succeeded(self, now: float) -> None:
        """Records that one of the pending handshakes has succeeded."""
        self._succeeded.append(now)

    def ended(self, connection: int) -> None:
        self._pending.pop(connection, None)

    def _forget(self, now: float) -> None:
        begun = now - self._handshake_s
        while self._pending and next(iter(self._pending.values())) < begun:
            del self._pending[next(iter(self._pending))]
        while self._succeeded and self._succeeded[0] < begun:
            self._succeeded.popleft()
