"""Bodies of the requests with which operators change a cluster."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.params.validate_params import Integers
from swell.cluster.text.schema.request_body import RequestBody
from swell.configs.error_text import shown
from swell.configs.lora import MAX_NAME_CHARS
from swell.configs.schema import MAX_DRAIN_S, ConfigError
from swell.configs.schema import check as check_config

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?\Z", re.ASCII)
MAX_PATH_CHARS = 4096
_ENGINES, _RANKS = Integers(1, 2**31 - 1), Integers(0, 2**31 - 1)


class ScaleRequest(RequestBody, kw_only=True):
    engines: int
    drain_timeout_s: float | None = None
    """The time that leaving engines get to finish their requests, counted from now, up to four
    hours; None: the configured time. They hand over the requests that are left."""

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
    """The rank of the engine, which gets `cluster.drain_timeout_s` to finish its requests. Sending
    the request again restarts that time."""

    def check(self) -> None:
        _RANKS.check("rank", self.rank)


class UpgradeRequest(RequestBody, kw_only=True):
    config: dict[str, Any]
    """The whole configuration of the new version, as sections of keys; a missing key gets its
    default. The sections `serve`, `cluster` and `autoscaling` and the number of engines do not
    change. `model.path` must be an absolute path or a hub id, because a relative path would differ
    between hosts."""

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
                "must be an absolute path without '..', or a hub id such as 'owner/name'",
                "invalid_config",
            )


class WeightsRequest(RequestBody, kw_only=True):
    path: str
    """The absolute path of a folder on every host that holds a whole model: the model of the
    cluster with other weights. Engines load them in place, and keep their processes."""

    def check(self) -> None:
        _check_folder("path", self.path)


class SwitchRequest(RequestBody, kw_only=True):
    """The body of pause, resume, wake and reset_prefix_cache. It must be JSON without fields."""


class SleepRequest(RequestBody, kw_only=True):
    level: Literal[1, 2] = 1
    """1: the KV cache is freed, and the weights move from the GPU to host memory. 2: the weights
    are freed too, and are read again at wake-up."""
    requests: Literal["wait", "refuse"] = "wait"
    """Whether requests that arrive meanwhile wait or are refused."""


class LoadAdapterRequest(RequestBody, kw_only=True):
    lora_name: str
    """The name that requests use as their `model`."""
    lora_path: str
    """The absolute path of the adapter's folder, the same on every host."""
    load_inplace: bool = False
    """Whether the adapter may replace one of the same name. Requests that began with the old
    adapter finish with it."""

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
            f"must be an absolute path without '..', with at most {MAX_PATH_CHARS} characters",
        )
    if not path.isprintable():
        raise bad_value(name, path, "must not contain control characters")


def _check_name(name: str) -> None:
    if not (0 < len(name) <= MAX_NAME_CHARS and name.isprintable()):
        raise bad_value("lora_name", name, f"must be 1 to {MAX_NAME_CHARS} printable characters")
