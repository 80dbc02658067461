"""Hosts on one machine that are only reachable by SSH, as the hosts of a user are.

Each host has its own network, process and mount namespaces, and a real `sshd`. So `ray stop` on it
stops no process of the machine or of another host, and each host has its own /tmp, /run, /dev/shm
and home folder; /tmp and the home folder are inside the folder of `Namespaces`. `sshd` is the first
process of its process namespace: when it exits, all other processes of the host are killed. Every
host can read the Python installation of the tests.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from tests.faults.hosts import namespaces
from tests.faults.hosts.namespaces import HostsFailed, Namespaces, run, wait_until
from tests.faults.process import alive, title
from tests.support import reaper

HOME = Path("/tmp/home")
"""The home folder of the user of every host, as the host sees it."""
_SSHD = "/usr/sbin/sshd"
_NEEDED = {"unshare": "util-linux", _SSHD: "openssh-server", "ssh": "openssh-client"}
_OWN_NAMESPACES = "unshare --mount --pid --fork --mount-proc"
_CONFIG = """
ListenAddress {address}
HostKey /tmp/sshd/key
AuthorizedKeysFile /tmp/sshd/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PrintMotd no
Subsystem sftp internal-sftp
SetEnv {environment}
"""
_ENVIRONMENT = ("SWELL_STARTED_BY", "SPT_NOENV")
"""Variables by which the reaper (`tests/support/reaper.py`) finds the processes of a test."""
_START = """
set -e
folder=$1; shift
for path in "$@"; do  # what lies in /tmp would be hidden by the host's own
    case $path in /tmp/*) target=$folder${path#/tmp} ;; *) target=$path ;; esac
    mkdir -p "$target"
    mount --bind "$path" "$target"
    mount -o remount,bind,ro "$target"
done
mount --bind "$folder/sshd/passwd" /etc/passwd
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount --rbind "$folder" /tmp
exec /usr/sbin/sshd -D -e -f /tmp/sshd/config
"""


def refusal() -> str | None:
    """Returns the reason why this process cannot create such hosts; None if it can."""
    for program, package in _NEEDED.items():
        if shutil.which(program) is None:
            return f"there is no {program}: apt-get install {package}"
    if reason := namespaces.refusal():
        return reason
    try:
        run([*_OWN_NAMESPACES.split(), "mount", "-t", "tmpfs", "tmpfs", "/run"])
    except HostsFailed as error:
        return f"process and mount namespaces may not be made here: {error}"
    return None


class SshHosts(Namespaces):
    """`count` identical hosts, numbered from 0, that have only `sshd` and an empty home folder."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.user = getpass.getuser()
        self._hosts: list[subprocess.Popen[bytes]] = []

    @property
    def key(self) -> Path:
        """The private key of the user of all hosts."""
        return self._folder / "key"

    def folder(self, host: int) -> Path:
        """Returns the folder that is /tmp on the host."""
        return self._folder / str(host)

    def home(self, host: int) -> Path:
        return self.folder(host) / HOME.name

    def start(self) -> None:
        _make_key(self.key)
        for host in range(len(self.addresses)):
            self._start_sshd(host)
        for address in self.addresses:
            wait_until(lambda at=address: _answers(at), lambda at=address: f"no sshd at {at}")

    def command(self, host: int, words: str) -> list[str]:
        """Returns the `ssh` command that runs `words` in a shell of this host."""
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
        flags = [flag for option in options for flag in ("-o", option)]
        target = f"{self.user}@{self.addresses[host]}"
        return ["ssh", "-i", str(self.key), *flags, target, words]

    def run(self, host: int, words: str, limit_s: float) -> str:
        """Runs `words` in a shell of this host; returns the output. Raises HostsFailed."""
        return run(self.command(host, words), limit_s)

    def others(self, host: int) -> list[int]:
        """Returns the living processes of this host, without `sshd` and `unshare`."""
        return [pid for pid in self.pids(host) if alive(pid) and not _is_host(title(pid))]

    def close(self) -> None:
        try:
            super().close()
        finally:
            for process in self._hosts:
                process.wait()

    def _start_sshd(self, host: int) -> None:
        folder = self.folder(host)
        (folder / "sshd").mkdir(parents=True)
        self.home(host).mkdir()
        _make_key(folder / "sshd" / "key")
        shutil.copy(self.key.with_suffix(".pub"), folder / "sshd" / "authorized_keys")
        (folder / "sshd" / "passwd").write_text(_with_home(Path("/etc/passwd").read_text()))
        reaper.start()
        environment = [f"{name}={os.environ[name]}" for name in _ENVIRONMENT if name in os.environ]
        (folder / "sshd" / "config").write_text(
            _CONFIG.format(
                address=self.addresses[host], environment=" ".join(environment) or "LC_ALL=C"
            )
        )
        words = f"{_OWN_NAMESPACES} --kill-child bash -c".split()
        python = sorted({sys.prefix, sys.base_prefix} - {"/usr", "/usr/local"})
        with (folder / "sshd" / "log").open("wb") as log:
            self._hosts.append(
                subprocess.Popen(
                    [*self.prefix(host), *words, _START, "sshd", str(folder), *python],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )


def _is_host(name: str) -> bool:
    return name.startswith(("sshd", "unshare"))


def _with_home(passwd: str) -> str:
    """Returns `/etc/passwd` with another home folder and the shell `bash` for the current user."""
    lines = [line.split(":") for line in passwd.splitlines()]
    for line in lines:
        if line[0] == getpass.getuser():
            line[5:] = [str(HOME), "/bin/bash"]
    return "".join(":".join(line) + "\n" for line in lines)


def _make_key(path: Path) -> None:
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)])


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, 22), timeout=1.0).close()
    except OSError:
        return False
    return True
