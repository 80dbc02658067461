"""Files that a configuration names: engines, ingresses and manager read them on any host of a Ray
cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from swell.configs.files.adapter_files import WEIGHTS_NAME
from swell.configs.schema import SERVE_FILES, Config


def named_paths(config: Config) -> dict[str, str]:
    """Returns the files that must be readable, by configuration key. Hub ids are left out: each
    host has its own cache."""
    serve = config.serve
    paths = {f"serve.{key}": getattr(serve, key) for key in SERVE_FILES if getattr(serve, key)}
    for name, folder in config.lora.adapters.items():
        paths[f"lora.adapters.{name}"] = str(Path(folder, WEIGHTS_NAME))
    if Path(config.model.path).is_absolute():
        paths["model.path"] = str(Path(config.model.path, "config.json"))
    if config.drafts.model is not None and Path(config.drafts.model.path).is_absolute():
        paths["drafts.model"] = str(Path(config.drafts.model.path, "config.json"))
    return paths


def unreadable(paths: Mapping[str, str]) -> list[str]:
    """Returns the keys whose files this host cannot read."""
    return [key for key, path in paths.items() if not os.access(path, os.R_OK)]
