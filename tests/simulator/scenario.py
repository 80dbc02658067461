"""What happens in one run, as data: it is drawn from a seed, and shrunk when it breaks a law."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.simulator.model import VOCAB_SIZE

HOSTS = ("host0", "host1", "host2")
"""The first one has Ray's GCS, the coordinator and the manager."""

_BEGIN_S = 3.0
"""The engines serve by then."""
_SPAN_S = 3.0
"""Of the arrivals and the faults."""


@dataclass(frozen=True)
class Request:
    at: float
    ingress: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class AtMessage:
    """While the `count`-th message of a kind is on its way; `kind` names its type."""

    kind: str
    count: int


@dataclass(frozen=True)
class Fault:
    """`kind` is a name in `faults.FAULTS`."""

    kind: str
    at: float
    """Not before this time of the world, in seconds."""
    target: int = 0
    """Which of the things that it may concern, modulo their number."""
    time_s: float = 0.0
    """How long it lasts, where it ends."""
    trigger: AtMessage | None = None


@dataclass(frozen=True)
class Scenario:
    seed: int
    engines: int
    ingresses: int
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]


TRIGGERS = (
    "EngineCoreRequest",
    "EngineCoreOutputs",
    "AbortRequests",
    "ReplaceClient",
    "KeepAlive",
    "KeepAliveReply",
    "ClusterView",
    "EngineHello",
    "EngineReport",
)


def draw(seed: int, kinds: tuple[str, ...], num_faults: int = 4) -> Scenario:
    """A standard run."""
    random = Random(f"scenario:{seed}")
    engines, ingresses = random.randint(1, 3), random.randint(1, 2)
    requests = tuple(
        Request(
            _BEGIN_S + random.random() * _SPAN_S,
            random.randrange(ingresses),
            tuple(random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 24))),
            random.randint(1, 24),
            random.randrange(9),
        )
        for _ in range(random.randint(1, 12))
    )
    faults = tuple(_draw_fault(random, kinds) for _ in range(random.randint(1, num_faults)))
    ordered = sorted(requests, key=lambda request: request.at)
    return Scenario(seed, engines, ingresses, tuple(ordered), faults)


def _draw_fault(random: Random, kinds: tuple[str, ...]) -> Fault:
    trigger = None
    if random.random() < 0.5:
        trigger = AtMessage(random.choice(TRIGGERS), random.randint(1, 12))
    return Fault(
        random.choice(kinds),
        _BEGIN_S + random.random() * _SPAN_S,
        random.randrange(12),
        random.choice((0.05, 1.0, 5.0, 15.0)) * (0.5 + random.random()),
        trigger,
    )
