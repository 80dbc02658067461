"""Reads the status of our applications from Ray Serve. No decisions."""

from __future__ import annotations

import asyncio
import contextlib
import re

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from swell.configs.runtime.log import StructuredLogger

_INGRESS_ACTOR = re.compile(r"SERVE_REPLICA::(.+)#Ingress#")
"""The name that Serve gives to the actor of an ingress; it contains the application's name."""
_TIMEOUT_S = 10.0
"""How long Serve's controller may take to return the status of an application."""
_POLL_S = 0.5
"""Time between two attempts."""


def application_owner(name: str) -> str:
    """Returns the owner of port claims (`port_claim.py`) of an application of this Ray."""
    return f"{name} of Ray's {ray.get_runtime_context().get_session_name()}"


def is_of_this_ray(owner: str) -> bool:
    """Whether an owner is an application of this Ray. Its ingresses then check the claim, because
    they know their application."""
    return ray.is_initialized() and owner == application_owner(owner.partition(" of Ray's ")[0])


async def is_deleting(name: str) -> bool:
    """Whether Serve is deleting the application. If not, it replaces one replica, or the whole
    application by another version, and a successor will come. A controller that has just died is
    back after some seconds; if none answers, none can start a successor."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                try:
                    found = (await asyncio.to_thread(serve.status)).applications.get(name)
                    return found is None or found.status == ApplicationStatus.DELETING
                except Exception as error:
                    text = f"{type(error).__name__}: {error}"
                    StructuredLogger("cluster.app").warning("no status", error=text)
                    await asyncio.sleep(_POLL_S)
    return True


def is_built_again() -> bool:
    """Whether an application of ours that runs here is being redeployed, so that its ingresses
    already have their port. Serve does not tell the name of the application that it builds."""
    if not ray.is_initialized():
        return False
    actors = ray.util.list_named_actors(all_namespaces=True)
    found = [_INGRESS_ACTOR.match(actor["name"]) for actor in actors]
    running = {match[1] for match in found if match}
    known = serve.status().applications
    return any(
        known[name].status == ApplicationStatus.DEPLOYING for name in running if name in known
    )
