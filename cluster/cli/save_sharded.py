"""`swell save-sharded`: saves a model in the shards that the workers of a configuration load."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.progress import DownloadColumn, Progress

from swell.cluster.cli.generate import quiet_transformers
from swell.cluster.text.model_check import check
from swell.configs.runtime.process import prepare_for_torch
from swell.configs.schema import ConfigError, load


def save_sharded(args: argparse.Namespace) -> int:
    config = load(args.config, dict(args.set))
    check(config)
    quiet_transformers()
    prepare_for_torch()
    from swell.worker.sharded import saving

    out = Path(args.out)
    with Progress(*Progress.get_default_columns(), DownloadColumn()) as bars:
        bar = bars.add_task("start", total=None)

        def show(what: str, done_bytes: int, all_bytes: int) -> None:
            bars.update(bar, description=what, completed=done_bytes, total=all_bytes)

        try:
            size_bytes = saving.save_sharded(config, out, show)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    parallel = config.parallel
    split = "".join(
        f" --set parallel.{key}={value}"
        for key, value in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline))
        if value > 1
    )
    print(f"saved {size_bytes / 1e9:.2f} GB in {parallel.world} files: swell serve {out}{split}")
    return 0
