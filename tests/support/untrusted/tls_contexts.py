"""The TLS contexts of HTTP clients, which read all certificates of the machine's authorities."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


def share() -> None:
    """Lets all clients of httpx in this process share their contexts. Otherwise each client, also
    those of the SDKs, reads all certificates when it is created: 20 ms of processor time."""
    if find_spec("httpx") is None:  # machines with a GPU run `tests/gpu` without it
        return
    from httpx._transports import default

    default.create_ssl_context = cache(default.create_ssl_context)
