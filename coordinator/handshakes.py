"""Who may talk to an inbox, and how much a stranger may cost before that is known.

A handshake is pending from the moment at which its connection is accepted until it has succeeded,
or has had its time (`HANDSHAKE_S`, after which ZeroMQ itself ends the connection). There may be
`MAX_PENDING` at a time: a further connection is shut down as soon as it was accepted, and a peer of
the cluster connects again after a moment. So strangers hold so many file descriptors at most, and
so many times `MAX_MESSAGE_BYTES`, for so long; peers whose handshake is over are not affected.

ZeroMQ does not say of which connection a handshake has succeeded, only that one has: successes are
counted for as long as the handshake that they belong to could be pending. Strangers cannot cause
any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

HANDSHAKE_S = 10.0
"""How long a handshake may take. It needs some milliseconds; a busy host may take seconds."""
MAX_PENDING = 64
"""Handshakes of one inbox at a time."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Of one frame, as its sender announces it: also before the sender is known. Twice the largest
`serve.max_body_bytes`, since the largest frame that peers send is a request of a user: its text is
in it as tokens, of which a model takes far fewer than this."""

ZAP_VERSION = b"1.0"
_MECHANISM = b"CURVE"
_ZAP_FRAMES = 7
"""Version, request id, domain, address, identity, mechanism, public key (RFC 27)."""


def zap_reply(request: Sequence[bytes], allowed: Collection[bytes]) -> list[bytes]:
    """The reply to a request of ZeroMQ's authentication protocol: 200 for a CURVE client whose
    public key, 32 bytes, is in `allowed`, else 400."""
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
    """Those of one inbox. Connections are named by their file descriptors, times are seconds."""

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
        """Whether a new connection may go on; else it is to be shut down."""
        self._forget(now)
        self._pending.pop(connection, None)  # the end of its predecessor was not noticed
        self._pending[connection] = now
        if len(self) <= self._limit:
            return True
        self.refused += 1
        return False

    def succeeded(self, now: float) -> None:
        """The handshake of one of them is over."""
        self._succeeded.append(now)

    def ended(self, connection: int) -> None:
        self._pending.pop(connection, None)

    def _forget(self, now: float) -> None:
        begun = now - self._handshake_s
        while self._pending and next(iter(self._pending.values())) < begun:
            del self._pending[next(iter(self._pending))]
        while self._succeeded and self._succeeded[0] < begun:
            self._succeeded.popleft()
