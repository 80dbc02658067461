"""Why a call of an actor, or of Ray itself, gave no result, whichever Ray is there."""

from __future__ import annotations


class ActorError(RuntimeError):
    """A call of an actor has no result."""


class ActorDied(ActorError):
    """The actor has ended, and is not started again. The call may have run, or a part of it."""


class ActorUnavailable(ActorError):
    """The actor cannot be reached now. The call may have run, or may run yet."""


class ActorRaised(ActorError):
    """The method raised `cause`. Where that is itself a failed call, it is an `ActorError`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.cause = cause


class GcsUnavailable(TimeoutError):
    """Ray's GCS (its control store) does not answer. What was to be done may be done yet."""
