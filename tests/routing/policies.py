"""Policies that the router is compared with. They use its state and choose in their own way."""

from __future__ import annotations

from swell.cluster.client.routing.prefix_index import PromptBlocks
from swell.cluster.client.routing.routable_engines import Candidates
from swell.cluster.client.routing.router import Router


class LeastLoaded(Router):
    """Chooses the engine with the fewest requests, reported or sent since the report; the lowest
    rank among equals."""

    def _pick(self, request_id: str, prompt: PromptBlocks, candidates: Candidates) -> int:
        return min(candidates.ranks, key=self._requests)

    def _requests(self, rank: int) -> int:
        engine = self._engines[rank]
        unreported = sum(load.requests for load in engine.unreported.values())
        return max(engine.load.running + engine.load.waiting + unreported, engine.sent.requests)


class RoundRobin(Router):
    """Chooses one engine after the other."""

    _turn = 0

    def _pick(self, request_id: str, prompt: PromptBlocks, candidates: Candidates) -> int:
        self._turn += 1
        return candidates.ranks[self._turn % len(candidates.ranks)]


POLICIES: dict[str, type[Router]] = {
    "affinity": Router,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
