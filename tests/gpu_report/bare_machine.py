"""Runs stages in this process as on a machine that has only the packages of `make gpu`, and no
network: `python -m tests.gpu_report.bare_machine STAGE ...`."""

from __future__ import annotations

import importlib
import re
import socket
import sys
from importlib import metadata
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "msgspec", "pyzmq", "llguidance")
"""The packages of the machine, besides those that they need."""


def modules_of_packages() -> set[str]:
    """Returns the top-level modules of these packages and of all that they need."""
    found: set[str] = set()
    waiting = [*PACKAGES]
    while waiting:
        name = _normal(waiting.pop())
        if name in found:
            continue
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another system, or triton on a CPU
            continue
        found.add(name)
        waiting += [each for each in needed if "extra ==" not in each]
    return {
        module
        for module, names in metadata.packages_distributions().items()
        if any(_normal(name) in found for name in names)
    }


def _normal(requirement: str) -> str:
    """Returns the name of a package as `metadata` compares it."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


class _Some:
    """Finds modules like another finder, but only some."""

    def __init__(self, finder: Any, modules: set[str]) -> None:
        self._finder, self._modules = finder, modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        is_internal = top.startswith("_")  # of Python, or of an editable installation
        if top not in self._modules and not is_internal:
            return None
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def main() -> None:
    modules = modules_of_packages() | set(sys.stdlib_module_names) | {"swell", "tests"}
    sys.meta_path[:] = [_Some(finder, modules) for finder in sys.meta_path]
    connect = socket.socket.connect

    def connect_on_this_machine(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1"), address
        connect(self, address)

    socket.socket.connect = connect_on_this_machine  # type: ignore[method-assign]
    scale = importlib.import_module("tests.gpu_report.scale").Scale("cpu")
    for stage in sys.argv[1:]:
        importlib.import_module(f"tests.gpu_report.stages.{stage}").run(scale)
        print(stage)


if __name__ == "__main__":
    main()
