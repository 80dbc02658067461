"""The identity of an answer: its id, its time and its randomness. It is the same wherever, and
however often, the answer is computed."""

from __future__ import annotations

import time
from random import Random

import msgspec

from swell.cluster.api.request_context import RequestContext
from swell.cluster.text.random_ids import SYSTEM_RANDOM
from swell.configs.lora import Adapter


class AnswerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """The id of the answer, without the prefix of an API."""
    created: int
    """When the answer began, in seconds since 1970."""
    random: Random = SYSTEM_RANDOM
    """The source of the ids of the answer's parts."""
    seed: int | None = None
    """The seed of the sampling, unless the request sets one; None: a random one."""
    is_repeatable: bool = False
    """Whether the answer may be computed again. If so, its events must depend only on the request,
    and never on timing."""
    adapter: Adapter | None = None
    """The adapter with which the answer began, even if its name means another adapter now. None:
    the answer begins with the adapter that the request names."""
    begun_version: str | None = None
    """The version of the weights that computed what the client already has. None: the client has
    nothing yet."""


def new_identity(context: RequestContext) -> AnswerIdentity:
    """Returns the identity of an answer that is computed once."""
    return AnswerIdentity(id=context.id, created=int(time.time()))
