"""The kinds of faults and changes of campaigns, and the messages that trigger faults."""

from __future__ import annotations

from dataclasses import dataclass

STALL_TIMEOUT_S = 10.0
"""Equals `STALL_TIMEOUT_S` in `control_plane.py`: a fault of about this length is sometimes
noticed, sometimes not."""
RECOVERY = (
    "Broken",
    "Repaired",
    "Introduce",
    "EngineHello",
    "EngineReport",
    "CoordinatorHeartbeat",
    "Subscribe",
    "ClusterView",
    "ClusterReports",
    "ReplaceClient",
    "KeepAliveReply",
    "EngineCoreRequest",
)
"""Messages by which a cluster detects a failure and recovers from it."""
GROUP_RECOVERY = ("ReconfigureDistributedRequest", "Joined", "Pause", "Paused", "Resume")
"""Additional messages for engines that share experts."""
OF_KIND = {
    "lose-worker": ("Broken", "Repaired", "Introduce"),
    "kill-control": ("Introduce", "EngineHello", "Subscribe", "CoordinatorHeartbeat"),
    "kill": ("EngineHello", "ClusterView", "EngineCoreRequest"),
    "kill-ingress": ("ReplaceClient", "Subscribe", "KeepAlive"),
    "drain-host": ("EngineHello", "ClusterView", "EngineReport"),
    "second-manager": ("EngineHello", "CoordinatorHeartbeat", "ClusterView"),
    "black-hole": ("EngineReport", "EngineHello", "CoordinatorHeartbeat", "KeepAliveReply"),
}
"""The messages of the recovery from some kinds of faults."""
CHANGE = (
    "EngineReport",
    "EngineHello",
    "ClusterView",
    "CoordinatorHeartbeat",
    "EngineCoreRequest",
    "EngineCoreOutputs",
)
"""Messages that are sent while an operator changes something."""
ALIVE = ("EngineReport", "EngineReport", "EngineReport", "KeepAlive", "Subscribe")
"""Messages that living processes send periodically."""
STEPS = (
    "leave",
    "leave",
    "cancel_leave",
    "cancel_leave",
    "detach",
    "detach",
    "join",
    "join",
    "remove_failed",
    "save_manager_state",
    "start",
    "stop",
    "kv_put",
    "kv_put",
)
"""Calls through Ray by which a manager carries out a change, one step after the other."""
CALLS = ("adopt", "contact", "ended", "membership", "pause", "ready", "resume", "view", "wait")
"""Further calls through Ray, which may fail as the steps may."""
FIRST_CALLS = (
    "kv_put",
    "kv_put",
    "kv_put",
    "kv_get",
    "kv_keys",
    "contact",
    "membership",
    "save_manager_state",
    "adopt",
)
"""Calls through Ray by which a manager takes over."""
BUSY_STEPS = ("start", "start", "start", "detach", "detach", "cancel_leave", "remove_failed")
"""Calls by which engines load other weights, leave, and stay after all."""
CHANGES = ("scale", "scale", "drain", "pause", "upgrade", "upgrade")
"""Changes by an operator."""
BUSY_CHANGES = ("scale", "scale", "drain", "upgrade", "upgrade", "upgrade", "upgrade")
"""Changes of busy campaigns."""
SELDOM = ("clock", "lose-host", "stop-pair", "lose-host-for-good", "cut", "half-cut", "slow")
"""Kinds of faults that few moments have. A busy campaign has two of them in addition."""
LINKS = ("black-hole", "black-hole", "drop", "loss", "slow", "cut-pair", "half-cut-pair")
"""Faults of a link that come before a fault at one of its ends."""
ENDS = ("kill", "kill", "kill", "lose-worker", "stop", "hang", "kill-control", "kill-ingress")
"""Faults at an end of such a link."""
LOSSES = ("drop", "black-hole", "drop", "kill", "stop", "stop-control", "cut-pair", "loss")
"""Faults that a message triggers."""
LEADERS = (
    "kill-control",
    "kill-control",
    "kill-control",
    "second-manager",
    "stop-control",
    "gcs-away",
)
"""Faults that leave a change to another manager or coordinator, perhaps after a while."""
RECOVERIES = ("lose-worker", "lose-worker", "kill", "stop", "drop", "kill-ingress")
"""Faults from which an engine recovers, during which an operator changes the number of engines and
changes it back."""
MANAGERS = ("second-manager", "second-manager", "kill-control", "kill-control", "stop-control")
"""Faults that leave a change to another manager, most of them to the same coordinator."""
OBSTACLES = ("hang", "stop", "cut-pair", "half-cut-pair", "cut-pair", "half-cut-pair", "black-hole")
"""Faults that prevent a group from forming."""
CUTS = ("cut", "half-cut", "cut", "cut-pair", "half-cut-pair")
"""Cuts. Two of five separate only two hosts."""


@dataclass(frozen=True)
class Mix:
    """The kinds of faults and changes that the moments of one campaign have in common."""

    common: tuple[str, ...]
    """The kinds of faults that begin a trouble."""
    possible: tuple[str, ...]
    """The kinds of faults that weaken a link, or hit a message or an end of a link."""
    changes: tuple[str, ...]
    """The kinds of changes by an operator."""
    expert: bool
    """Whether the engines share experts."""
    is_busy: bool = False
    """See `draw_campaign`."""

    @property
    def steps(self) -> tuple[str, ...]:
        """The calls at which a leader is lost."""
        return (*STEPS, *BUSY_STEPS) if self.is_busy else STEPS

    def among(self, names: tuple[str, ...]) -> list[str]:
        """Returns those of these kinds of faults that are possible, or all possible kinds."""
        return [each for each in names if each in self.possible] or list(self.possible)
