"""What an answer has beside its content: the same wherever, and however often, it is computed."""

from __future__ import annotations

import time
from random import Random

from starlette.requests import Request

from swell.cluster.api.routing import request_id
from swell.cluster.text.randomness import SYSTEM_RANDOM
from swell.configs.lora import Adapter
from swell.configs.secret import HoldsSecrets, SecretText


class AnswerIdentity(HoldsSecrets, frozen=True, kw_only=True):
    id: str
    """Its id, without what an API puts in front."""
    created: int
    """In seconds since 1970."""
    owner: SecretText = ""
    """The user's key, as `Access.check_user` names it."""
    random: Random = SYSTEM_RANDOM
    """The ids of its parts are drawn from it."""
    is_repeatable: bool = False
    """It may be computed again: its events must depend on the request alone, and on no timing."""
    adapter: Adapter | None = None
    """The adapter with which it began, whatever has its name now; None: it begins with what the
    request names."""
    begun_version: str | None = None
    """The version of weights that gave what its client has already; None: it has nothing."""


def new_identity(request: Request, owner: SecretText = "") -> AnswerIdentity:
    """Of an answer that is computed once."""
    return AnswerIdentity(id=request_id(request), created=int(time.time()), owner=owner)
