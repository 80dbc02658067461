"""Bodies of requests by which operators change a cluster."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from swell.cluster.text.sampling_params import BadRequest, bad_value, shown
from swell.cluster.text.schema.request_body import RequestBody
from swell.cluster.text.validate_params import Integers
from swell.configs.lora import MAX_NAME_CHARS
from swell.configs.schema import MAX_DRAIN_S, ConfigError
from swell.configs.schema import check as check_config

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?\Z", re.ASCII)
MAX_PATH_CHARS = 4096
_ENGINES, _RANKS = Integers(1, 2**31 - 1), Integers(0, 2**31 - 1)


class ScaleRequest(RequestBody, kw_only=True):
    engines: int
    drain_timeout_s: float | None = None
    """Time that leaving engines may take for what they have, from now on, up to four hours; None:
    the configured one. They hand over what is left."""

    def check(self) -> None:
        _ENGINES.check("engines", self.engines)
        limit = self.drain_timeout_s
        if limit is not None and not (math.isfinite(limit) and 0 <= limit <= MAX_DRAIN_S):
            raise BadRequest(
                f"drain_timeout_s={shown(limit)} must be a number between 0 and {MAX_DRAIN_S:g}",
                "drain_timeout_s",
            )


class DrainRequest(RequestBody, kw_only=True):
    rank: int
    """Of an engine, which has `cluster.drain_timeout_s` for what it has; sent again, as long from
    then on."""

    def check(self) -> None:
        _RANKS.check("rank", self.rank)


class UpgradeRequest(RequestBody, kw_only=True):
    config: dict[str, Any]
    """The whole configuration of the new version, as sections of keys: one that it leaves out gets
    its default. The sections `serve`, `cluster` and `autoscaling` and the number of engines stay as
    they are. `model.path` is an absolute path or a hub id: no host knows where another one is
    relative to."""

    def check(self) -> None:
        try:
            path = check_config(self.config).model.path
        except ConfigError as error:
            param = f"config.{error.key}" if error.key else "config"
            is_first = error.key and str(error).startswith(error.key)
            text = f"config.{error}" if is_first else f"config: {error}"
            raise BadRequest(text, param, "invalid_config") from None
        if ".." in path.split("/") or not (path.startswith("/") or _HUB_ID.match(path)):
            raise bad_value(
                "config.model.path",
                path,
                "must be an absolute path without '..', or a hub id, as 'owner/name'",
                "invalid_config",
            )


class WeightsRequest(RequestBody, kw_only=True):
    path: str
    """An absolute path of a folder on every host, with a whole model: that of the cluster, with
    other weights. Engines get them in place of theirs, and keep their processes."""

    def check(self) -> None:
        _check_folder("path", self.path)


class SwitchRequest(RequestBody, kw_only=True):
    """The body of pause, resume and wake: it has no fields, but must be JSON."""


class SleepRequest(RequestBody, kw_only=True):
    level: Literal[1, 2] = 1
    """1: the KV cache is given back, and weights move from the GPU to the memory of the host. 2:
    the weights are given back, too, and read again at the end."""
    requests: Literal["wait", "refuse"] = "wait"
    """What becomes of requests meanwhile."""


class LoadAdapterRequest(RequestBody, kw_only=True):
    lora_name: str
    """What requests call it, as their `model`."""
    lora_path: str
    """The absolute path of its folder, the same on every host."""
    load_inplace: bool = False
    """Whether it may take the place of one of the same name. What has begun with that one ends with
    it."""

    def check(self) -> None:
        _check_name(self.lora_name)
        _check_folder("lora_path", self.lora_path)


class UnloadAdapterRequest(RequestBody, kw_only=True):
    lora_name: str

    def check(self) -> None:
        _check_name(self.lora_name)


def _check_folder(name: str, path: str) -> None:
    if not path.startswith("/") or ".." in path.split("/") or len(path) > MAX_PATH_CHARS:
        raise bad_value(
            name,
            path,
            f"must be an absolute path without '..', of {MAX_PATH_CHARS} characters at most",
        )
    if not path.isprintable():
        raise bad_value(name, path, "has control characters")


def _check_name(name: str) -> None:
    if not (0 < len(name) <= MAX_NAME_CHARS and name.isprintable()):
        raise bad_value(
            "lora_name", name, f"must be 1 to {MAX_NAME_CHARS} characters that can be printed"
        )
