"""One worker process of a `RayExecutor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from swell.configs.runtime.log import first_line


@dataclass(eq=False, slots=True)
class RayWorker:
    """One worker process; its replacement is another object."""

    rank: int
    actor: Any
    node: str
    """The node of its bundle."""
    pid: int = 0
    run: Any = None
    peer: bytes | None = None

    def exit_reason(self) -> str:
        """Returns why the worker has stopped, or an empty string while it runs."""
        if self.run is None or not ray.wait([self.run], timeout=0)[0]:
            return ""
        try:
            ray.get(self.run)
        except ray.exceptions.RayError as error:
            return f"died: {first_line(error)}"
        return "ended"
