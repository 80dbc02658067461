"""Checks whether a running cluster can be upgraded to a configuration, before anything starts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from swell.cluster.control.plan.upgrade import UpgradeRefused
from swell.cluster.control.plan.versions import Version
from swell.cluster.text.model_check import check
from swell.cluster.text.prompt.tokenizer_files import text_digest, text_files
from swell.configs.config_hash import cluster_id, config_hash, versioned_keys
from swell.configs.files.model_path import local_folder
from swell.configs.runtime.hanging_calls import HangingCalls, TooManyCalls
from swell.configs.schema import Config, ConfigError, ModelConfig, load
from swell.configs.schema import check as check_config

_OF_APPLICATION = ("serve", "cluster", "autoscaling")
"""Sections that an upgrade does not change."""
_OF_OPERATOR = "parallel.data"
"""Only `swell scale` changes it."""


READ_LIMIT_S = 20.0
"""How long the files of a model may take to read: callers of the manager wait for 30 s."""
_MAX_READS = 64
_MAX_READS_PER_FOLDER = 4
"""A folder that hangs does not keep others from being read."""

Make = Callable[[Config, Any], tuple[Config, list[str]]]
"""Computes the next configuration from the running one and the request, and the requested keys that
stay as they are. It reads files."""


class ModelFileReads:
    """Reads model folders in threads, so that the event loop continues even if a read hangs with
    its file server."""

    def __init__(self, limit_s: float = READ_LIMIT_S) -> None:
        self._calls = HangingCalls("swell-model-files", _MAX_READS, _MAX_READS_PER_FOLDER)
        self._limit_s = limit_s

    async def run(self, make: Make, running: Config, wanted: object) -> tuple[Config, list[str]]:
        """Calls `make` in a thread. Raises UpgradeRefused, also after the time limit."""
        try:
            future = self._calls.submit(lambda: make(running, wanted), _folder_of(wanted))
            return await asyncio.wait_for(asyncio.wrap_future(future), self._limit_s)
        except TooManyCalls as error:
            raise UpgradeRefused(str(error)) from None
        except TimeoutError:
            raise UpgradeRefused(
                f"the files of the model were not read within {self._limit_s:g} s on the "
                "manager's host: their file server may be unavailable; try again, or set another "
                "folder"
            ) from None


def _folder_of(wanted: object) -> str:
    """Returns the model folder of an unchecked request."""
    if isinstance(wanted, Mapping):
        model = wanted.get("model")
        wanted = model.get("path") if isinstance(model, Mapping) else None
    return str(wanted)


def cluster_id_of(config: Config) -> str:
    """Returns the cluster's id: a hash of the part of a configuration that all versions of a
    cluster share. Raises ConfigError."""
    try:
        return cluster_id(config, text_digest(config.model))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={config.model.path!r} cannot be read: {error}") from None


def with_model_of(deployed: Config, running: Config) -> Config:
    """Returns the configuration of an ingress: the one with which the application was deployed,
    with the model and the scheduler that its engines run."""
    model = msgspec.structs.replace(
        running.model,
        name=deployed.model.served_name,
        special_tokens_in_text=deployed.model.special_tokens_in_text,
    )
    return msgspec.structs.replace(deployed, model=model, scheduler=running.scheduler)


def upgraded(running: Config, settings: dict[str, Any]) -> tuple[Config, list[str]]:
    """Returns the configuration of the next version, and the keys of `settings` that differ but
    stay as they are. Defaults that are not written in `settings` do not count as requests. Reads
    files of both models. Raises UpgradeRefused."""
    try:
        requested = _load(settings)
    except ConfigError as error:
        raise UpgradeRefused(str(error)) from None
    _refuse_relative(running, requested)
    _refuse_experts(running, requested)
    before, after = msgspec.to_builtins(running), msgspec.to_builtins(requested)
    before["model"]["name"] = running.model.served_name
    after["model"]["name"] = requested.model.name or running.model.served_name
    may_change, kept = versioned_keys(), []
    for section, keys in before.items():
        for key in keys:
            name, old, new = f"{section}.{key}", keys[key], after[section][key]
            if old == new:
                continue
            if name in may_change:
                keys[key] = new
            elif section in _OF_APPLICATION or name == _OF_OPERATOR:
                if key in settings.get(section, {}):
                    kept.append(name)
            else:
                raise UpgradeRefused(
                    f"{name}={new!r} differs from {old!r}, which the ingresses of this cluster "
                    "use, so all versions must have the same value; deploy a second cluster for "
                    "another one"
                )
    merged = _load(before)
    try:
        _check_folders(running.model, merged.model)
        check(merged)
        _compare_text(running.model, merged.model)
    except (ConfigError, OSError, ValueError) as error:
        raise UpgradeRefused(f"{error} (on the manager's host)") from None
    return merged, kept


def version_hash(given: Config, config: Config, versions: Iterable[Version]) -> str:
    """Returns the hash of a version with the configuration `config`, which is `given` with the
    detected device. A known version keeps its hash, regardless of how it was given."""
    wanted = config_hash(config)
    for version in versions:
        with contextlib.suppress(ConfigError):  # another release wrote that version
            if config_hash(version.config) == wanted:
                return version.config_hash
    return config_hash(given)


def with_other_weights(running: Config, path: str) -> tuple[Config, list[str]]:
    """Like `upgraded`, for the weights of another folder of the same model, which existing engines
    load in place of theirs. The folder must contain a whole model: new engines start from it."""
    model = msgspec.structs.replace(running.model, path=path, load_format="auto")
    settings = msgspec.to_builtins(msgspec.structs.replace(running, model=model))
    merged, kept = upgraded(running, settings)
    if running.lora.is_on:
        raise UpgradeRefused(
            f"engines with adapters ({running.lora.reason}) cannot load other weights, because "
            "the adapters were trained for the current ones; deploy the application with the new "
            "weights (serve deploy)"
        )
    if running.model.load_format == "dummy":
        raise UpgradeRefused(
            "model.load_format=dummy: the engines have random weights, which cannot be restored "
            "if the update fails; use an upgrade (swell upgrade)"
        )
    return merged, kept


def _load(data: Mapping[str, Any]) -> Config:
    """Loads the configuration without resolving relative model paths: each process would resolve
    them against its own working directory. Raises ConfigError."""
    config, given = load(data), check_config(data)
    if not Path(given.model.path).is_absolute():
        config = msgspec.structs.replace(config, model=given.model)
    small = given.drafts.model
    if small is not None and not Path(small.path).is_absolute():
        config = msgspec.structs.replace(config, drafts=given.drafts)
    return config


def _refuse_relative(running: Config, requested: Config) -> None:
    """Refuses relative model paths. An unchanged hub id of the running model may stay: its
    tokenizer does not change."""
    for key, old, new in (
        ("model.path", running.model, requested.model),
        ("drafts.model.path", running.drafts.model, requested.drafts.model),
    ):
        if new is None or Path(new.path).is_absolute() or (old and old.path == new.path):
            continue
        raise UpgradeRefused(
            f"{key}={new.path!r} is not an absolute path; set the absolute path of a folder or "
            "file that exists on every host, and download a model of the hub to such a folder"
        )


def _refuse_experts(running: Config, requested: Config) -> None:
    if running.parallel.expert or requested.parallel.expert:
        raise UpgradeRefused(
            f"parallel.expert={str(requested.parallel.expert).lower()} (the cluster has "
            f"{str(running.parallel.expert).lower()}): engines that share experts form one group "
            "that runs each step together: all of them must have the same weights, dtype, layout "
            "and steps in flight, and each engine has reserved memory for the experts of "
            f"cluster.min_engines={running.cluster.min_engines} engines, so they cannot be "
            "replaced one after the other; deploy the application with the new configuration "
            "(serve deploy), which replaces the whole cluster, or deploy a second cluster and "
            "move the requests there"
        )


def _check_folders(old: ModelConfig, new: ModelConfig) -> None:
    for path in (old.path, new.path) if old.path != new.path else ():
        if local_folder(path) is None:
            raise UpgradeRefused(
                f"model.path={path!r} is neither a folder nor a GGUF file on this host, so its "
                "tokenizer cannot be compared with that of the cluster; download the model to "
                "every host"
            )


def _compare_text(old: ModelConfig, new: ModelConfig) -> None:
    if old.path == new.path:
        return
    before, after = text_files(old), text_files(new)
    if missing := sorted({*before} - {*after}):
        raise UpgradeRefused(
            f"{new.path} lacks {', '.join(missing)}, which the cluster's model has; copy them "
            "there, because the ingresses of this cluster use them to read and write text"
        )
    differ = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    if differ:
        raise UpgradeRefused(
            f"{', '.join(differ)} of {new.path} differ from those of {old.path}, which the "
            "ingresses of this cluster use to read and write text, so all versions must have the "
            "same; deploy a second cluster for another tokenizer"
        )
