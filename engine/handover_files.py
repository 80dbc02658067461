"""What an engine sees of the files in which another one has written KV for it
(`worker/block_files.py`). A shell."""

from __future__ import annotations

import os
from collections.abc import Callable

from swell.configs.schema import Config
from swell.worker.wire import CLAIMED, HANDOVER_FOLDER

Claim = Callable[[str], bool]
"""Whether all parts of a file are there, and are this engine's now."""


def make_claim(config: Config) -> Claim:
    folder, world = config.cache.handover_folder, config.parallel.world

    def claim(name: str) -> bool:
        """Renaming is atomic: what was removed meanwhile, or not written, is not claimed."""
        if folder is None:
            return False
        try:
            for rank in range(world):
                path = os.path.join(folder, HANDOVER_FOLDER, f"{name}.{rank}")
                os.rename(path, path + CLAIMED)
                os.utime(path + CLAIMED)  # it counts as new
        except OSError:
            return False
        return True

    return claim
