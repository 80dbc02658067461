"""Holds requests until all workers have loaded their adapters. Pure: the time is an argument.

A worker has places for `lora.max_adapters` adapters that are loaded at run time. A request is held
until its adapter has a place and is loaded; then it goes to the scheduler, which does not know
about adapters. An adapter keeps its place as long as the scheduler has requests with it. If all
places are taken, requests wait in the order of their arrival, and so do all later requests with any
adapter: otherwise an adapter in constant use could keep another one out forever. Adapters of the
configuration are in every worker, and have places of their own: once they are loaded, their
requests never wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from swell.configs.error_text import shown
from swell.configs.lora import Adapter, LoraConfig
from swell.engine.executor.adapter_loads import late_reason
from swell.engine.request import MAX_FAILED_ATTEMPTS
from swell.engine.scheduling.step_builder import StartedRequest
from swell.engine.wire import EngineCoreRequest
from swell.worker.wire import AdapterLoaded, LoadAdapter

LOAD_TIMEOUT_S = 120.0
"""Timeout of an adapter load; then its requests fail."""


def shown_to_users(reason: str, adapter: Adapter | None) -> str:
    """Hides the adapter's folder in a message for users."""
    return reason if adapter is None else reason.replace(adapter.folder, "its folder")


class Held(NamedTuple):
    request: EngineCoreRequest
    client: bytes
    digest: str
    arrived_s: float


class Failed(NamedTuple):
    held: Held
    reason: str


@dataclass(slots=True)
class _Place:
    index: int
    adapter: Adapter
    began_at: float
    is_loaded: bool = False


class AdapterAdmission:
    """The adapters of one engine."""

    def __init__(self, config: LoraConfig) -> None:
        self._takes_others = config.enabled
        self._free = list(range(config.max_adapters))
        self._of_config = {
            name: config.max_adapters + number for number, name in enumerate(config.adapters)
        }
        """Name -> place."""
        self._places: dict[str, _Place] = {}
        """Digest -> place, the most recently used one last."""
        self._held: list[Held] = []
        self._commands: list[LoadAdapter] = []
        self.num_loads = 0
        self.num_failures = 0

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_loaded(self) -> int:
        return sum(place.is_loaded for place in self._places.values())

    def waiting_tokens(self) -> int:
        return sum(len(one.request.prompt_token_ids) for one in self._held)

    def refusal(self, request: EngineCoreRequest) -> str | None:
        """Returns why a request can never run, or None."""
        adapter = request.adapter
        if adapter is None or adapter.name in self._of_config or self._takes_others:
            return None
        return (
            f"adapter {shown(adapter.name)}: this engine does not support adapters; set "
            "lora.enabled=true, or add the adapter to lora.adapters"
        )

    def hold(self, request: EngineCoreRequest, client: bytes, now: float) -> bool:
        """Returns whether a request must wait; if so, it is held here."""
        if request.adapter is None:
            return False
        digest = request.adapter.digest
        place = self._places.get(digest)
        if place is not None and self._may_run(place, has_turn=not self._held):
            self._places[digest] = self._places.pop(digest)
            return False
        self._held.append(Held(request, client, digest, now))
        return True

    def advance(self, in_use: Callable[[], set[str]], now: float) -> list[Held]:
        """Assigns places, and returns the requests that need not wait any longer. `in_use`: digests
        of the adapters of the scheduler's requests."""
        ready: list[Held] = []
        kept: list[Held] = []
        is_full = False
        for one in self._held:
            if one.digest not in self._places and (not is_full or self._is_of_config(one)):
                ahead = {other.digest for other in (*ready, *kept)}
                began = self._begin(one, lambda: in_use() | ahead, now)  # noqa: B023
                is_full = is_full or not began
            place = self._places.get(one.digest)
            if place is not None and self._may_run(place, has_turn=not is_full):
                self._places[one.digest] = self._places.pop(one.digest)
                ready.append(one)
            else:
                kept.append(one)
        self._held = kept
        return ready

    def take_commands(self) -> list[LoadAdapter]:
        """Returns and clears the loads to start."""
        commands, self._commands = self._commands, []
        return commands

    def on_loaded(self, loaded: AdapterLoaded) -> list[Failed]:
        """Handles the result of a load: all workers have the adapter, or one cannot load it.
        Returns the requests that fail."""
        place = self._places.get(loaded.digest)
        if place is None:
            return []
        if not loaded.failure:
            place.is_loaded = True
            self.num_loads += 1
            return []
        return self._fail(loaded.digest, loaded.failure)

    def expire(self, now: float) -> list[Failed]:
        """Returns requests that fail because their adapter takes too long to load."""
        late = [
            digest
            for digest, place in self._places.items()
            if not place.is_loaded and now >= place.began_at + LOAD_TIMEOUT_S
        ]
        return [
            failed
            for digest in late
            for failed in self._fail(
                digest, late_reason(self._places[digest].adapter, LOAD_TIMEOUT_S)
            )
        ]

    def waiting_for(self, commands: Iterable[LoadAdapter]) -> list[StartedRequest]:
        """Returns the requests that wait for these loads."""
        digests = {command.adapter.digest for command in commands}
        waiting = ((one.client, one.request) for one in self._held if one.digest in digests)
        return [
            StartedRequest(client, r.request_id, r.attempt, r.failed_attempts, [])
            for client, r in waiting
        ]

    def count_failed_attempt(self) -> list[Failed]:
        """Counts the loss of a worker, and restarts the loads in progress. One of them may be the
        cause: after too many losses its requests fail. Returns these."""
        loading = self._release_loading()
        failed, kept = [], []
        for one in self._held:
            attempts = one.request.failed_attempts + (one.digest in loading)
            request = msgspec.structs.replace(one.request, failed_attempts=attempts)
            if one.digest in loading and attempts >= MAX_FAILED_ATTEMPTS:
                why = f"{attempts} workers or engines in a row were lost while they loaded it"
                failed.append(Failed(one, f"adapter {_name(request)}: {why}"))
            else:
                kept.append(one._replace(request=request))
        self._held = kept
        return failed

    def abort(self, request_ids: Iterable[str], attempts: Iterable[int] = ()) -> None:
        """Same as `Scheduler.abort`."""
        if self._held:
            ended = dict(zip_longest(request_ids, attempts))
            self._held = [one for one in self._held if not _is_ended(one.request, ended)]

    def abort_client(self, client: bytes) -> list[EngineCoreRequest]:
        """Drops all requests of one ingress, and returns them."""
        dropped = [one.request for one in self._held if one.client == client]
        self._held = [one for one in self._held if one.client != client]
        return dropped

    def clear(self) -> None:
        """Drops every request, and each load in progress."""
        self._held.clear()
        self._commands.clear()
        self._release_loading()

    def _may_run(self, place: _Place, *, has_turn: bool) -> bool:
        return place.is_loaded and (has_turn or place.adapter.name in self._of_config)

    def _is_of_config(self, one: Held) -> bool:
        return one.request.adapter is not None and one.request.adapter.name in self._of_config

    def _begin(self, one: Held, in_use: Callable[[], set[str]], now: float) -> bool:
        """Assigns a place to an adapter; returns False if there is none."""
        adapter = one.request.adapter
        assert adapter is not None
        index = self._of_config.get(adapter.name)
        if index is None:
            if not self._free and not self._evict(in_use()):
                return False
            index = self._free.pop(0)
        self._places[one.digest] = _Place(index, adapter, now)
        self._commands.append(LoadAdapter(index, adapter))
        return True

    def _evict(self, in_use: set[str]) -> bool:
        for digest, place in self._places.items():
            is_idle = place.is_loaded and digest not in in_use
            if is_idle and place.adapter.name not in self._of_config:
                self._release(digest)
                return True
        return False

    def _release_loading(self) -> list[str]:
        """Frees the places of adapters that are not loaded yet, and returns their digests."""
        loading = [digest for digest, place in self._places.items() if not place.is_loaded]
        for digest in loading:
            self._release(digest)
        return loading

    def _release(self, digest: str) -> _Place:
        place = self._places.pop(digest)
        if place.adapter.name not in self._of_config:
            self._free.append(place.index)
        return place

    def _fail(self, digest: str, reason: str) -> list[Failed]:
        """Fails the requests of an adapter. Requests for equal files in another folder are kept,
        because that folder may be readable."""
        self.num_failures += 1
        folder = self._release(digest).adapter.folder
        failed: list[Held] = []
        kept: list[Held] = []
        for one in self._held:
            assert one.request.adapter is not None
            is_same = one.digest == digest and one.request.adapter.folder == folder
            (failed if is_same else kept).append(one)
        self._held = kept
        return [Failed(one, reason) for one in failed]


def _name(request: EngineCoreRequest) -> str:
    assert request.adapter is not None
    return shown(request.adapter.name)


def _is_ended(request: EngineCoreRequest, ended: dict[str, int | None]) -> bool:
    if request.request_id not in ended:
        return False
    attempt = ended[request.request_id]
    return attempt is None or request.attempt <= attempt
