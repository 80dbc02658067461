"""What Ray Serve says of applications of ours. No decisions."""

from __future__ import annotations

import asyncio
import contextlib
import re

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from swell.configs.log import StructuredLogger

_INGRESS_ACTOR = re.compile(r"SERVE_REPLICA::(.+)#Ingress#")
"""The name that Serve gives to the actor of an ingress, with that of the application."""
_TIMEOUT_S = 10.0
"""How long Serve's controller may take to give the status of an application."""
_POLL_S = 0.5
"""Between two calls for it."""


def application_owner(name: str) -> str:
    """How claims of ports (`port_claim.py`) call an application of this Ray."""
    return f"{name} of Ray's {ray.get_runtime_context().get_session_name()}"


def is_of_this_ray(owner: str) -> bool:
    """Then its ingresses decide, which know their application."""
    return ray.is_initialized() and owner == application_owner(owner.partition(" of Ray's ")[0])


async def is_deleting(name: str) -> bool:
    """Whether Serve deletes it; else it replaces one replica, or the whole by another version, and
    a successor comes. A controller that has just died is back after some seconds; if none answers,
    none is there that could start a successor."""
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
    """Whether an application of ours that runs here is being deployed anew: then its ingresses have
    their port already. Serve does not name the application that it builds."""
    if not ray.is_initialized():
        return False
    actors = ray.util.list_named_actors(all_namespaces=True)
    found = [_INGRESS_ACTOR.match(actor["name"]) for actor in actors]
    running = {match[1] for match in found if match}
    known = serve.status().applications
    return any(
        known[name].status == ApplicationStatus.DEPLOYING for name in running if name in known
    )
