"""Checks which engines can sleep. Does no I/O."""

from __future__ import annotations

from swell.configs.schema import Config


def sleep_refusal(config: Config, level: int) -> str | None:
    """Returns why engines of this configuration cannot sleep at this level, or None if they can."""
    if config.parallel.expert:
        return (
            "parallel.expert=true: engines that share experts cannot sleep, because each has a "
            "part of the shared weights; pause them instead (POST /admin/pause), which keeps "
            "their memory"
        )
    if config.lora.is_on and level > 1:
        return (
            f"level={level} frees the weights and the loaded adapters with them "
            f"({config.lora.reason}); use level=1"
        )
    return None
