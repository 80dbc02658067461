"""What an engine sees of the files in which another one has written KV for it
(`worker/block_files.py`). A shell."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from swell.configs.private_files import check_file, enter_folder
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
            with enter_folder(Path(folder, HANDOVER_FOLDER)) as inside:
                for rank in range(world):
                    _claim_part(inside, f"{name}.{rank}")
        except OSError:
            return False
        return True

    return claim


def _claim_part(folder: int, name: str) -> None:
    check_file(folder, os.stat(name, dir_fd=folder, follow_symlinks=False), name)
    claimed = name + CLAIMED
    os.rename(name, claimed, src_dir_fd=folder, dst_dir_fd=folder)
    os.utime(claimed, dir_fd=folder, follow_symlinks=False)  # it counts as new
