"""Errors of calls to actors and to Ray itself, independent of Ray's own exception classes."""

from __future__ import annotations


class ActorError(RuntimeError):
    """Raised if a call to an actor did not return a result."""


class ActorDied(ActorError):
    """Raised if the actor is dead and will not be restarted. The call may have run completely or in
    part."""


class ActorUnavailable(ActorError):
    """Raised if the actor cannot be reached now. The call may have run, or may still run."""


class ActorRaised(ActorError):
    """Raised if the method raised `cause`. If the method failed because of a call of its own,
    `cause` is an `ActorError`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.cause = cause


class GcsUnavailable(TimeoutError):
    """Raised if Ray's GCS (its control store) does not answer. The requested action may still
    happen."""
