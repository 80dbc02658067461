"""The protections in the table of `docs/operate/security.md`, and attempts of another account of
the host to break each of them. Each protection has a function that yields one line for every
attempt that was not refused.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ray

from tests.support.untrusted.untrusted_account import Refused, UntrustedAccount
from tests.support.untrusted.untrusted_peers import Door, knocks

DENIED = "PermissionError"
NOT_ASKED = ("UNAUTHENTICATED", "UNIMPLEMENTED")
"""Status codes with which a gRPC server refuses a call before it reads the message."""
_OTHER_TOKEN = "0" * 64
_PATHS = {
    "ray::DashboardAgent": ("/api/job_agent/jobs/", "/metrics", "/nowhere"),
    "ray::RuntimeEnvAgent": ("/get_or_create_runtime_env", "/get_runtime_envs_info", "/nowhere"),
}
_WITHOUT_MODULE = (
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.syncer.RaySyncer/StartSync",
)
_HUGE_HEADER = {"x-filler": "x" * (1 << 20)}


@dataclass(frozen=True)
class Site:
    """A running cluster, the account that attacks it, and secrets that it must not learn."""

    account: UntrustedAccount
    url: str
    token: str
    channel_key: str
    """The public key of the cluster's channels."""
    user_key: str
    key_files: tuple[Path, ...]
    secrets: tuple[str, ...]
    """Texts that must not be visible to an untrusted peer."""


@dataclass(frozen=True)
class Place:
    """A socket, and the cells of its row in the table."""

    process: str
    protocol: str
    door: Door

    @property
    def arguments(self) -> tuple[str, str, int]:
        return self.door.family, self.door.address, self.door.port

    @property
    def host(self) -> str:
        """The address at which processes of the same host reach the socket."""
        everywhere = self.door.address in ("0.0.0.0", "::")
        return "127.0.0.1" if everywhere else self.door.address


def complaints(site: Site, place: Place, protection: str) -> list[str]:
    """Returns a line for every attempt at a socket that was not refused, or one line if the
    protection is unknown."""
    if protection not in PROTECTIONS:
        return [f"{place.process}: no attempt is known for the protection {protection!r}"]
    lines = [*_taken_over(site, place), *PROTECTIONS[protection](site, place)]
    return [f"{place.process}, {place.door}: {line}" for line in lines]


def refusal(account: UntrustedAccount, name: str, *arguments: Any) -> tuple[str, Any]:
    """Returns the class and text of the error of an attempt, or "" and its value without one."""
    try:
        return "", account.attempt(name, *arguments)
    except Refused as error:
        return error.kind, str(error)


def not_denied(account: UntrustedAccount, *attempts: tuple[Any, ...]) -> Iterator[str]:
    """Yields a line for every attempt that did not fail with PermissionError."""
    for attempt in attempts:
        kind, value = refusal(account, *attempt)
        if kind != DENIED:
            yield f"{attempt}: {str(value)[:200]}"


def _taken_over(site: Site, place: Place) -> Iterator[str]:
    """Yields a line for every address of the socket at which another account can listen as well."""
    if place.door.address.startswith("/"):
        return
    for address in {place.door.address, place.host}:
        family, _, port = place.arguments
        if not refusal(site.account, "listen", family, address, port)[0]:
            yield f"another account listens at {address} as well"


def _keys_of_the_cluster(site: Site, place: Place) -> Iterator[str]:
    for name, knock in knocks().items():
        if not name.startswith("zmtp"):
            continue
        sent = base64.b64encode(knock).decode()
        answer = base64.b64decode(refusal(site.account, "send", *place.arguments, sent)[1])
        if b"READY" in answer[64:] or b"\x07WELCOME" in answer[64:]:
            yield f"{name!r} opens a channel: {answer[:200]!r}"
    if refusal(site.account, "join", *place.arguments, site.channel_key) != ("", False):
        yield "keys of another account open a channel"


def _names_from_the_secret(site: Site, place: Place) -> Iterator[str]:
    """Reads the store and overwrites its values, which is not refused. The store must not contain a
    secret, and ranks must not trust its values: the test checks later answers of the cluster."""
    kind, found = refusal(site.account, "fill store", place.host, place.door.port)
    if kind:
        yield f"the store cannot be asked: {found}"
    elif any(secret in text for secret in site.secrets for text in found):
        yield "a secret is in the store"


def _closed_once_formed(site: Site, place: Place) -> Iterator[str]:
    if not refusal(site.account, "connect", *place.arguments)[0]:
        yield "it accepts connections"


def _keys_of_http(site: Site, place: Place) -> Iterator[str]:
    body = '{"model": "nano-moe", "prompt": "hi", "max_tokens": 1}'
    user = {"authorization": f"Bearer {site.user_key}"}
    other = {"authorization": f"Bearer {_OTHER_TOKEN}"}
    requests = [
        ("POST", "/v1/completions", {}, body, (401,)),
        ("POST", "/v1/completions", other, body, (401,)),
        ("GET", "/v1/models", {}, "", (401,)),
        ("GET", "/admin/cluster", {}, "", (401,)),
        ("POST", "/admin/scale", other, '{"engines": 1}', (401,)),
        ("POST", "/admin/scale", user, '{"engines": 1}', (401, 403)),
        ("POST", "/v1/load_lora_adapter", user, "{}", (401, 403)),
    ]
    for method, path, headers, sent, expected in requests:
        headers = {"content-type": "application/json", **headers}
        status = refusal(site.account, "request", method, site.url + path, headers, sent)[1]
        if status not in expected:
            yield f"{method} {path} is answered with {status}"
    kind, status = refusal(site.account, "request", "GET", f"{site.url}/health", _HUGE_HEADER, "")
    if not kind and status not in (400, 413, 431):  # the connection may be closed instead
        yield f"a header of 1 MiB is answered with {status}"
    attempts = [(name, str(path)) for path in site.key_files for name in ("read", "write")]
    yield from not_denied(site.account, *attempts)


def _rays_token(site: Site, place: Place) -> Iterator[str]:
    if place.protocol.endswith("HTTP"):
        yield from _rays_token_of_http(site, place)
        return
    address = f"{place.host}:{place.door.port}"
    methods = ray_methods()
    answers = site.account.attempt("call", address, methods, "")
    taken = {name: status for name, status in answers.items() if status not in NOT_ASKED}
    if taken:
        yield f"calls are taken without a token: {taken}"
    served = [name for name, status in answers.items() if status == "UNAUTHENTICATED"]
    if not served:
        yield "no call is refused: the test knows none that is served here"
        return
    answers = site.account.attempt("call", address, served, _OTHER_TOKEN)
    if set(answers.values()) != {"UNAUTHENTICATED"}:
        yield f"calls are taken with another token: {answers}"


def _rays_token_of_http(site: Site, place: Place) -> Iterator[str]:
    token = {"authorization": f"Bearer {_OTHER_TOKEN}"}
    for path in _PATHS[place.process]:
        url = f"http://{place.host}:{place.door.port}{path}"
        for method in ("GET", "POST"):
            for headers, expected in (({}, 401), (token, 403)):
                kind, status = refusal(site.account, "request", method, url, headers, "{}")
                if kind or status != expected:
                    yield f"{method} {path} is answered with {status}"


def _folder_is_private(site: Site, place: Place) -> Iterator[str]:
    yield from not_denied(site.account, ("connect", *place.arguments))
    yield from not_denied(site.account, *attempts_at_folder(Path(place.door.address)))


def attempts_at_folder(socket: Path) -> list[tuple[str, str]]:
    """Returns attempts at all folders on the path to a socket of Ray, and at Ray's logs."""
    session = socket.parents[1]
    private = next(path for path in socket.parents if path.parent == Path("/tmp"))
    folders = [path for path in socket.parents if path == private or private in path.parents]
    log = next(path for path in (session / "logs").iterdir() if path.is_file())
    names = ("list", "enter", "create")
    return [
        *((name, str(folder)) for folder in [*folders, session / "logs"] for name in names),
        *((name, str(log)) for name in ("read", "write", "rename")),
        ("rename", str(socket)),
        ("rename", str(private)),
    ]


@cache
def ray_methods() -> list[str]:
    """Returns the methods of all gRPC services of Ray: those in its Python modules, and
    `_WITHOUT_MODULE`."""
    top = Path(ray.__file__).parent
    texts = [path.read_text() for path in top.glob("*/generated/*_pb2_grpc.py")]
    found = {name for text in texts for name in re.findall(r"'(/ray\.[\w.]+/\w+)'", text)}
    return sorted({*found, *_WITHOUT_MODULE})


PROTECTIONS: dict[str, Callable[[Site, Place], Iterator[str]]] = {
    "keys of the cluster": _keys_of_the_cluster,
    "names and signatures from the secret of the group": _names_from_the_secret,
    "tokens of the group; closed once it is formed": _closed_once_formed,
    "`serve.api_keys_file`, `serve.admin_keys_file`, limits": _keys_of_http,
    "Ray's token": _rays_token,
    "only its owner may enter the folder": _folder_is_private,
}


# -------------------------------------------------------------------------------- processes, files


def open_processes(site: Site, pids: list[int]) -> Iterator[str]:
    """Yields a line for each process whose memory, files or environment another account can read,
    or that it can signal, and for each command line that contains a secret."""
    for pid in pids:
        names = ("environ", "mem", "maps", "stack")
        attempts = [("signal", pid), ("list", f"/proc/{pid}/fd")]
        attempts += [("read", f"/proc/{pid}/{name}") for name in names]
        left = [*not_denied(site.account, *attempts)]
        kind, line = refusal(site.account, "read", f"/proc/{pid}/cmdline")
        if kind:  # the process has exited
            continue
        yield from left
        words = base64.b64decode(line).decode(errors="replace")
        if any(secret in words for secret in site.secrets):
            yield f"a secret is in the command line of {pid}: {words[:80]}"


def written_files(pids: list[int]) -> set[str]:
    """Returns the files that these processes have open for writing or mapped as shared memory."""
    found = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                flags = Path(f"/proc/{pid}/fdinfo/{path.name}").read_text().partition("flags:")[2]
                if int(flags.split()[0], 8) & os.O_ACCMODE != os.O_RDONLY:
                    found.add(os.readlink(path))
        found |= _mapped(pid, "w", "s")
    return {path for path in found if _is_file(path)}


def code_files(pids: list[int]) -> set[str]:
    """Returns the files whose code these processes execute."""
    return {path for pid in pids for path in _mapped(pid, "x") if _is_file(path)}


def _is_file(path: str) -> bool:
    return not path.startswith("/proc/") and Path(path).is_file()


def _mapped(pid: int, *rights: str) -> set[str]:
    """Returns the files that a process maps with all these permissions, as letters of `proc(5)`."""
    lines = [line.split(None, 5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {line[5] for line in lines if len(line) == 6 and set(rights) <= set(line[1])}
