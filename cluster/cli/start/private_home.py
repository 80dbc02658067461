"""Moves files that Ray, kernels and their libraries keep in the home folder of the account, if
there is none or it cannot be written: containers with any user id (OpenShift), `setpriv`, systemd's
`ProtectHome`.

They go to a private folder of the start, which is removed with it. Variables that the user has set
are kept.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
"""If one of these is set, the user has decided about Ray's token."""
_TOKEN_BYTES = 32
_CACHES = {
    "SWELL_CACHE": "kernels",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variable -> its folder below the private one."""
_USER = "USER"
"""Read by `getpass`, which would otherwise fail for a user id without a name."""


def home_problem() -> str | None:
    """Returns why the home folder cannot hold files; None: it can."""
    try:
        home = Path.home()
    except RuntimeError:
        return "this account has no home folder"
    return write_problem(home)


def use_private_files(folder: Path, line: Callable[[str], None]) -> None:
    """Lets this process and its children keep files in `folder` if the home folder cannot hold
    them, and say so with `line`. The folder must exist and be private."""
    _name_user()
    problem = home_problem()
    if problem is None:
        return
    if not os.environ.get("HOME") or not os.path.isdir(os.environ["HOME"]):
        home = folder / "home"
        home.mkdir(mode=0o700, exist_ok=True)
        os.environ["HOME"] = str(home)
    if not any(os.environ.get(name) for name in _TOKEN) and not _has_token():
        token = folder / "auth_token"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(token, flags, 0o600), "w") as file:
            file.write(secrets.token_hex(_TOKEN_BYTES))
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    kept = "SWELL_CACHE" in os.environ
    for name, part in _CACHES.items():
        os.environ.setdefault(name, str(folder / part))
    line(
        f"{problem}: Ray's token {'is' if kept else 'and compiled kernels are'} in {folder}, which "
        "is removed at the end"
        + (
            ""
            if kept
            else "; set SWELL_CACHE to a permanent folder to compile the kernels only once"
        )
    )


def check_temporary_files() -> None:
    """Raises OSError with one line if Ray's session folder cannot be written."""
    if problem := write_problem(Path("/tmp")):
        raise OSError(f"{problem}; Ray keeps its sockets there: mount a tmpfs at /tmp")


def _has_token() -> bool:
    """Whether Ray finds a token in a readable home folder."""
    with contextlib.suppress(OSError, RuntimeError):
        return os.access(Path.home() / ".ray" / "auth_token", os.R_OK)
    return False


def _name_user() -> None:
    import getpass

    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ[_USER] = f"uid-{os.getuid()}"


def write_problem(folder: Path) -> str | None:
    """Returns why no file can be written in the folder; None: it can. Writes a file, because
    permissions do not tell."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror or error})"
