"""Reads the configuration from a file for Ray Serve or KubeRay, as deployed by `ray up` and
Kubernetes, so that `swell doctor` can check hosts with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from swell.configs.files.yaml_text import read_yaml, read_yaml_file
from swell.configs.schema import ConfigError, parse_override

T = TypeVar("T")

_BUILDER = "swell.cluster.app:build"


class _Application(msgspec.Struct):
    import_path: str = ""
    args: dict[str, Any] = {}
    """`config`, and overrides of the configuration (`section.key`)."""


class _ServeFile(msgspec.Struct):
    applications: list[_Application]


class _Spec(msgspec.Struct):
    serve_config: str = msgspec.field(name="serveConfigV2")


class _RayService(msgspec.Struct):
    spec: _Spec


def read_source(source: str) -> tuple[str, dict[str, object]]:
    """Returns the configuration that such a file names, and its overrides. Any other source is
    returned unchanged, without overrides. Raises ConfigError."""
    data = _data_of(source)
    manifest = _convert(data, _RayService)
    if manifest is not None:
        data = read_yaml(manifest.spec.serve_config.encode(), f"{source!r}, serveConfigV2")
    serve_file = _convert(data, _ServeFile)
    if serve_file is None:
        return source, {}
    ours = [app.args for app in serve_file.applications if app.import_path == _BUILDER]
    if len(ours) != 1 or not ours[0].get("config"):
        raise ConfigError(
            f"{source!r} is a file of Ray Serve with {len(ours)} applications of {_BUILDER}; "
            "expected: one, whose `args` have `config`"
        )
    args = dict(ours[0])
    config = str(args.pop("config"))
    return config, dict(parse_override(f"{key}={value}") for key, value in args.items())


def _data_of(source: str) -> object:
    """Returns the content of a YAML file. None if it is another kind of file or cannot be read:
    loading it as a configuration then reports the reason."""
    path = Path(os.path.expanduser(source))
    if path.suffix not in (".yaml", ".yml"):
        return None
    try:
        return read_yaml_file(path)
    except (OSError, ConfigError):
        return None


def _convert(data: Any, shape: type[T]) -> T | None:
    try:
        return msgspec.convert(data, shape)
    except msgspec.ValidationError:  # a file of another kind
        return None
