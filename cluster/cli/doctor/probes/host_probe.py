"""The actor that runs on every host of a Ray cluster during a survey. It answers in JSON, so that
another release of Swell on a host is reported instead of breaking the answer."""

from __future__ import annotations

import os

import msgspec

from swell.cluster.cli.doctor.facts import HostRequest, Part, RayFacts, Target
from swell.cluster.cli.doctor.probes.fact_collector import collect
from swell.cluster.cli.doctor.probes.link_sockets import LinkListeners, try_links
from swell.configs.runtime.secret import SecretBytes

FORCE_STOP = "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"


class HostProbe:
    def __init__(self, token: SecretBytes) -> None:
        self._token = token
        self._listeners: LinkListeners | None = None

    def facts(self, request: HostRequest, object_store_bytes: int) -> bytes:
        """Returns `HostFacts`."""
        return msgspec.json.encode(collect(request, _ray_facts(object_store_bytes)))

    def listen(self, parts: list[Part]) -> bytes:
        """Open listeners that live as long as this process. Returns `list[Listener]`."""
        self._listeners = self._listeners or LinkListeners(self._token)
        return msgspec.json.encode([self._listeners.open(part) for part in parts])

    def connect(self, source: str, targets: list[Target], timeout_s: float) -> bytes:
        """Try to connect to the targets. Returns `list[Link]`."""
        return msgspec.json.encode(try_links(source, targets, self._token, timeout_s))


def _ray_facts(object_store_bytes: int) -> RayFacts:
    """Returns the settings of Ray. All processes of a node have the same environment, on the head
    including the GCS."""
    from ray._private import worker
    from ray._private.authentication.authentication_utils import is_token_auth_enabled
    from ray._raylet import Config  # type: ignore[attr-defined]

    node = worker._global_node
    return RayFacts(
        token_authentication=is_token_auth_enabled(),
        check_period_s=Config.health_check_period_ms() / 1000,
        check_timeout_s=Config.health_check_timeout_ms() / 1000,
        check_failures=Config.health_check_failure_threshold(),
        force_stop_replicas=os.environ.get(FORCE_STOP) == "1",
        object_store_bytes=object_store_bytes,
        session_folder=node.get_session_dir_path() if node is not None else None,
    )
