"""Files that Ray, kernels and their libraries keep in the home of the account, where there is no
home or it cannot be written: containers with any user id (OpenShift), `setpriv`, systemd's
`ProtectHome`.

They go to a private folder of the start, which ends with it. What the user has set stays.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
"""With any of them the user has decided about Ray's token."""
_TOKEN_BYTES = 32
_CACHES = {
    "SWELL_CACHE": "kernels",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variable -> the folder below the private one."""
_USER = "USER"
"""Read by `getpass`, which else fails for a user id without a name."""


def home_problem() -> str | None:
    """Why no file can be kept in the home; None: one can."""
    try:
        home = Path.home()
    except RuntimeError:
        return "this account has no home"
    return write_problem(home)


def use_private_files(folder: Path, line: Callable[[str], None]) -> None:
    """Let this process and those that it starts keep in `folder` what they cannot keep in the home,
    and say so with `line`. The folder exists, and nobody else enters it."""
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
        f"{problem}: Ray's token{'' if kept else ' and compiled kernels'} are in {folder} and end "
        "with this start"
        + ("" if kept else "; set SWELL_CACHE to a folder that stays, to compile them once")
    )


def check_temporary_files() -> None:
    """Raises OSError with one line if no file can be written where Ray has its session."""
    if problem := write_problem(Path("/tmp")):
        raise OSError(f"{problem}; Ray keeps its sockets there: mount a tmpfs at /tmp")


def _has_token() -> bool:
    """Whether Ray finds a token in a home that can be read."""
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
    """Why no file can be written in it, as tried: permissions alone do not say it."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror or error})"
