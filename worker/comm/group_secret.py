"""Secrets that only the members of one group know, because neither torch's store nor gloo
authenticates who connects to it.

Each plan of groups has a secret, which is new with each generation or epoch and reaches the workers
over the encrypted channel. These values derive from it:

- the prefix of the group's keys in the store, which no other plan has;
- a signature of each rank's address, which its peers check before they connect, so that they do not
  accept what an untrusted peer, or an earlier plan, has written into the store;
- a token of each rank, which its peers check through the connections of the group itself before
  anything else is sent through them.
"""

from __future__ import annotations

import hmac

from swell.configs.runtime.secret import SecretBytes

TOKEN_BYTES = 32
_DIGEST = "sha256"


class ForeignAddress(OSError):
    """Raised for an address in the store that no member of the group has written."""


class GroupSecret:
    """The secrets of one group of a plan; `name` distinguishes the groups of the plan."""

    def __init__(self, secret: SecretBytes, name: str) -> None:
        self._secret = secret
        self._name = name

    @property
    def prefix(self) -> str:
        """The prefix of the group's keys."""
        return self._derive("prefix").hex()

    def sign(self, rank: int, topic: str, text: str) -> str:
        """Returns what a rank says about a topic, with its signature."""
        return f"{text} {self._derive(topic, str(rank), text).hex()}"

    def open(self, rank: int, topic: str, signed: str) -> str:
        """Returns the text without its signature. Raises `ForeignAddress` if the signature is
        wrong."""
        text = signed.rpartition(" ")[0]
        if not hmac.compare_digest(self.sign(rank, topic, text).encode(), signed.encode()):
            raise ForeignAddress(
                f"the {topic} of rank {rank} was not written by a member of this group: a "
                "untrusted peer reaches the store, see docs/operate/security.md"
            )
        return text

    def token(self, rank: int) -> SecretBytes:
        """[TOKEN_BYTES] proves that the sender is a member with this rank."""
        return self._derive("token", str(rank))

    def _derive(self, *parts: str) -> bytes:
        text = "\0".join((self._name, *parts)).encode()
        return hmac.digest(self._secret, text, _DIGEST)
