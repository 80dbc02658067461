"""Lets an ingress ask the others, through Ray Serve, which knows the replicas."""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle

from swell.cluster.api.admin.protocol import RequestStory
from swell.configs.runtime.log import StructuredLogger

_PEERS_TIMEOUT_S = 5.0
"""How long an ingress waits for the answers of the others."""
_PEER_TIMEOUT_S = 3.0
"""How long the replicas may take to answer, once Serve has listed them."""
_NAMES_POLL_S = 0.2
"""Time between two attempts until Serve has listed the replicas."""


class ReplicaPeers:
    """`PeerStories` through Serve, which lists the replicas at the first use."""

    def __init__(self, replicas: int) -> None:
        context = serve.get_replica_context()
        self._names = context.deployment, context.app_name
        self._replicas = replicas
        self._handle: DeploymentHandle | None = None
        self._lock = asyncio.Lock()
        """Held while Serve is called: the first call of a handle prepares it."""
        self._log = StructuredLogger("cluster.app")

    async def find(self, id: str, asking: int) -> tuple[list[RequestStory], bool]:
        try:
            async with asyncio.timeout(_PEERS_TIMEOUT_S):
                answers = await self._ask(id, asking)
        except Exception as error:  # any error of the call
            answers = [error]
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        for failure in failed:
            self._log.warning("an ingress is silent", error=f"{type(failure).__name__}: {failure}")
        # Serve leaves out replicas that it has just found to be gone.
        complete = not failed and len(answers) >= self._replicas
        return [story for one in answers if isinstance(one, list) for story in one], complete

    async def _ask(self, id: str, asking: int) -> list[Any]:
        """Returns the answer of each replica, or the error of its call."""
        while True:
            try:
                async with self._lock:
                    sent = await asyncio.to_thread(self._broadcast, id, asking)
                answers: list[Any] = await sent.results_async(
                    timeout_s=_PEER_TIMEOUT_S, return_exceptions=True
                )
                return answers
            except DeploymentUnavailableError:  # Serve has not listed the replicas yet
                await asyncio.sleep(_NAMES_POLL_S)

    def _broadcast(self, id: str, asking: int) -> DeploymentBroadcastResponse:
        if self._handle is None:
            self._handle = serve.get_deployment_handle(*self._names, _check_exists=False)
        return self._handle.broadcast("find_requests", id, asking)
