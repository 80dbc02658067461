"""Lets an ingress ask the others, through Ray Serve, which knows the replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle

from swell.cluster.api.admin.protocol import RequestStory
from swell.cluster.api.services import CancelStatus
from swell.configs.runtime.log import StructuredLogger
from swell.configs.runtime.secret import SecretText

_PEERS_TIMEOUT_S = 5.0
"""How long an ingress waits for the answers of the others."""
_PEER_TIMEOUT_S = 3.0
"""How long the replicas may take to answer, once Serve has listed them."""
_NAMES_POLL_S = 0.2
"""Time between two attempts until Serve has listed the replicas."""


class ReplicaPeers:
    """`PeerIngresses` through Serve, which lists the replicas at the first use."""

    def __init__(self, replicas: int) -> None:
        context = serve.get_replica_context()
        self._names = context.deployment, context.app_name
        self._replicas = replicas
        self._handle: DeploymentHandle | None = None
        self._lock = asyncio.Lock()
        """Held while Serve is called: the first call of a handle prepares it."""
        self._log = StructuredLogger("cluster.app")

    async def find(self, id: str, asking: int) -> tuple[list[RequestStory], bool]:
        answers, complete = await self._call("find_requests", id, asking)
        return [story for stories in answers for story in stories], complete

    async def cancel(
        self, ids: Sequence[str], owner: SecretText, asking: int
    ) -> tuple[list[dict[str, CancelStatus]], bool]:
        return await self._call("cancel_requests", list(ids), owner, asking)

    async def _call(self, method: str, *args: object) -> tuple[list[Any], bool]:
        """Returns the answers of the replicas to a call, and whether all of them answered."""
        try:
            async with asyncio.timeout(_PEERS_TIMEOUT_S):
                answers = await self._ask(method, *args)
        except Exception as error:  # any error of the call
            answers = [error]
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        for failure in failed:
            self._log.warning("an ingress is silent", error=f"{type(failure).__name__}: {failure}")
        # Serve leaves out replicas that it has just found to be gone.
        complete = not failed and len(answers) >= self._replicas
        return [answer for answer in answers if not isinstance(answer, BaseException)], complete

    async def _ask(self, method: str, *args: object) -> list[Any]:
        """Returns the answer of each replica, or the error of its call."""
        while True:
            try:
                async with self._lock:
                    sent = await asyncio.to_thread(self._broadcast, method, *args)
                answers: list[Any] = await sent.results_async(
                    timeout_s=_PEER_TIMEOUT_S, return_exceptions=True
                )
                return answers
            except DeploymentUnavailableError:  # Serve has not listed the replicas yet
                await asyncio.sleep(_NAMES_POLL_S)

    def _broadcast(self, method: str, *args: object) -> DeploymentBroadcastResponse:
        if self._handle is None:
            self._handle = serve.get_deployment_handle(*self._names, _check_exists=False)
        return self._handle.broadcast(method, *args)
