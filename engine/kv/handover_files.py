"""Claims the files in which another engine has written KV for this one
(`worker/memory/block_files.py`). Does file I/O."""

from __future__ import annotations

import os
from pathlib import Path

from swell.configs.files.private_files import check_file, enter_folder
from swell.configs.schema import Config
from swell.engine.kv.handover_reads import Claim
from swell.worker.wire import CLAIMED, HANDOVER_FOLDER


def make_claim(config: Config) -> Claim:
    folder, world = config.cache.handover_folder, config.parallel.world

    def claim(name: str) -> bool:
        """Claims a file by renaming its parts, which is atomic: a part that was removed or never
        written cannot be claimed."""
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
    os.utime(claimed, dir_fd=folder, follow_symlinks=False)  # so that it counts as new
