"""Probes the address of a running Ray before Ray itself connects: Ray retries a wrong address for a
minute and fills the screen. The same holds for a token that Ray demands and does not get."""

from __future__ import annotations

import os
import socket

from swell.configs.runtime.hanging_calls import within
from swell.configs.section import ConfigError

_PROBE_S = 5.0
"""How long a host may take to accept a connection and to answer in HTTP/2."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_EMPTY_SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
_FRAME_HEADER_BYTES = 9
_SETTINGS = 4
_MODE = "RAY_AUTH_MODE"
_BY_RAY = ("auto",)
"""Values for which Ray finds the address itself."""


def probe_address(address: str) -> None:
    """Raises ConfigError if there cannot be a Ray at `address`: it is not HOST:PORT, nothing
    listens there, or the server does not speak gRPC as Ray's GCS does. Also if this Ray refuses the
    token of this process."""
    if address in _BY_RAY:
        return
    if "://" in address:
        raise _refusal(address, "has a protocol (Ray Client is not supported)")
    host, _, port_text = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port_text.isdecimal() or not 0 < int(port_text) < 2**16:
        raise _refusal(address, "is not HOST:PORT")
    try:
        with socket.create_connection((host, int(port_text)), timeout=_PROBE_S) as connection:
            connection.settimeout(_PROBE_S)
            if os.environ.get("RAY_USE_TLS", "0") != "1" and not _speaks_http2(connection):
                raise _refusal(
                    address, "is not the address of Ray's GCS: another program answers there"
                )
    except OSError as error:
        reason = "did not answer" if isinstance(error, TimeoutError) else _text(error)
        raise _refusal(address, f"cannot be reached: {reason}") from None
    if _refuses_token(address):
        raise ConfigError(token_refusal(address, os.environ.get(_MODE)))


def _refuses_token(address: str) -> bool:
    """Whether a Ray with token authentication refuses this process. `ray start` turns it on by
    itself if the account has a token, and commands that connect do not."""
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError, RayError

    def connect() -> None:
        ensure_token_if_auth_enabled(None, create_token_if_missing=False)
        GcsClient(address=address)

    try:
        within(_PROBE_S, connect)
    except AuthenticationError:
        return True
    except (TimeoutError, RayError):
        pass  # `ray.init` reports it
    return False


def token_refusal(address: str, mode: str | None) -> str:
    """Returns the message for a Ray that refuses the token of a process with this
    RAY_AUTH_MODE."""
    if mode is not None and mode.lower() == "token":
        return (
            f"the Ray at {address} demands another token than this account's, or this account has "
            "none; copy ~/.ray/auth_token from the account that has started Ray"
        )
    return (
        f"the Ray at {address} demands a token, and this command sends none, because "
        f"RAY_AUTH_MODE is {'not set' if mode is None else mode}: run export RAY_AUTH_MODE=token "
        "here, also for serve deploy, ray status and every other command of Ray; on another host "
        "or account also copy ~/.ray/auth_token"
    )


def _speaks_http2(connection: socket.socket) -> bool:
    """Whether the first frame of the peer is SETTINGS, as RFC 9113, 3.4 requires."""
    try:
        connection.sendall(_PREFACE + _EMPTY_SETTINGS)
        header = b""
        while len(header) < _FRAME_HEADER_BYTES:
            part = connection.recv(_FRAME_HEADER_BYTES - len(header))
            if not part:
                return False
            header += part
    except OSError:
        return False
    return header[3] == _SETTINGS and header[5:] == bytes(4)


def _refusal(address: str, problem: str) -> ConfigError:
    return ConfigError(
        f"--address={address!r} {problem}; specify HOST:PORT of a running Ray's GCS (ray start "
        "--head prints it, usually port 6379), or leave --address out to start Ray on this "
        "machine"
    )


def _text(error: OSError) -> str:
    return error.strerror or str(error)
