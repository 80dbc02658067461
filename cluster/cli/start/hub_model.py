"""Models of the Hugging Face hub that are not on this machine: announced, requested once, and
watched during the download."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from swell.cluster.cli.start.private_home import write_problem
from swell.cluster.text.model_check import find_quantization, read_json
from swell.configs.runtime.hanging_calls import within
from swell.configs.runtime.log import first_line
from swell.configs.schema import Config, ConfigError

HUB_S = 10.0
"""How long the hub may take to answer."""
_CLIENT_LIMIT = 5.0
"""Time limit of the hub's own client, in units of ours, so that ours is the one that passes: its
errors differ by release."""
_DOWNLOADED = (".safetensors", ".json", ".model", ".txt", ".jinja")
_WAY_OUT = (
    "copy the model to this machine and specify its folder, set HF_ENDPOINT to a mirror, or "
    "allow this machine to connect to the hub"
)


class Download:
    """Progress of a download into the hub's cache. This base class is for models without a
    download."""

    def share(self) -> str:
        """Returns a note to add to the reason of the wait."""
        return ""


class HubDownload(Download):
    def __init__(self, folder: Path, total_bytes: int) -> None:
        """`folder`: the cache folder with the model's files, named by content."""
        self._folder = folder
        self._total_bytes = total_bytes

    def share(self) -> str:
        done_bytes = 0
        for path in self._folder.glob("*"):
            try:
                done_bytes += path.stat().st_size
            except OSError:  # it was renamed
                continue
        if not 0 < done_bytes < self._total_bytes:
            return ""
        share = done_bytes / self._total_bytes
        return f" (downloaded {share:.0%} of {self._total_bytes / 1e9:.1f} GB)"


def ask_hub(config: Config, line: Callable[[str], None], timeout_s: float = HUB_S) -> Download:
    """Announces with `line` that a model comes from the hub, and requests its metadata. Raises
    ConfigError if the hub does not answer in time or lacks the model, and for a quantization that
    is not supported, if the hub or its cache names it."""
    name = config.model.path
    if os.path.exists(name):
        return Download()
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise ConfigError(
            f"model.path={name!r} is neither a folder nor a hub id: {error}"
        ) from None
    if isinstance(cached, str):
        line(f"model.path={name!r} is not a local folder: using the hub's cache")
        file = Path(cached)
        find_quantization(name, read_json(file, "a model has one"), file.parent)
        return Download()
    line(f"model.path={name!r} is not a local folder: downloading it from {constants.ENDPOINT}")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"model.path={name!r} is not in the cache of the hub, and HF_HUB_OFFLINE is set; unset "
            f"it, or {_WAY_OUT}"
        )
    api = HfApi(endpoint=constants.ENDPOINT)
    client_s = _CLIENT_LIMIT * timeout_s
    try:
        info = within(
            timeout_s, lambda: api.model_info(name, timeout=client_s, files_metadata=True)
        )
    except Exception as error:
        raise ConfigError(f"model.path={name!r}: {_reason(error, timeout_s)}") from None
    find_quantization(name, info.config or {}, None)
    _check_cache(Path(constants.HF_HUB_CACHE))
    total_bytes = sum(
        file.size or 0 for file in info.siblings or () if file.rfilename.endswith(_DOWNLOADED)
    )
    folder = Path(constants.HF_HUB_CACHE, "models--" + name.replace("/", "--"), "blobs")
    return HubDownload(folder, total_bytes)


def _check_cache(folder: Path) -> None:
    """Raises ConfigError if nothing can be downloaded into the folder."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    if problem := write_problem(there):
        raise ConfigError(
            f"the cache of the hub, {folder}: {problem}; set HF_HOME to a folder with room for the "
            "model"
        )


def _reason(error: Exception, timeout_s: float) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    hub = constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return (
            f"{hub} returns it only to accepted accounts; accept its terms there, and set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{hub} has no such model, or it is private; correct the name, set HF_TOKEN, or "
            "specify a folder that exists"
        )
    if isinstance(error, HfHubHTTPError):
        return f"{hub} refused the request: {first_line(error)}; {_WAY_OUT}"
    if isinstance(error, TimeoutError):
        return f"{hub} did not answer within {timeout_s:g} s; {_WAY_OUT}"
    return f"{hub} cannot be reached: {first_line(error)}; {_WAY_OUT}"
