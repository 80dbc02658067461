"""Swell serves large language models on a Ray cluster whose size may change while answers stream.

`LLM` and `SamplingParams` generate answers in one process, without Ray. They are imported on first
use: `import swell` loads neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swell.cluster.local import LLM as LLM
    from swell.cluster.local import SamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("swell.cluster.local"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
