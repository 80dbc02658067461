"""What happens in one run, as data: it is drawn from a seed, and shrunk when it breaks a law."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    gives_up_after: int | None = None
    """Tokens after which its client gives it up; None: it waits for the end."""


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
class Operation:
    """What an operator asks of the manager, and repeats until it is accepted or refused."""

    at: float
    kind: str
    """scale, drain, pause or resume."""
    argument: int = 0
    """Of scale: how many engines; of drain: which rank."""


@dataclass(frozen=True)
class Scenario:
    seed: int
    engines: int
    ingresses: int
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    operations: tuple[Operation, ...] = ()


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
    requests = [_draw_request(random, ingresses) for _ in range(random.randint(1, 12))]
    faults = [_draw_fault(random, kinds) for _ in range(random.randint(1, num_faults))]
    for index in range(1, len(faults)):
        if random.random() < 0.2:  # two in the same millisecond
            at = faults[index - 1].at + 0.001 * random.random()
            faults[index - 1] = replace(faults[index - 1], trigger=None)
            faults[index] = replace(faults[index], at=at, trigger=None)
    operations = [op for _ in range(2) if random.random() < 0.3 for op in _draw_operation(random)]
    return Scenario(
        seed,
        engines,
        ingresses,
        tuple(sorted(requests, key=lambda request: request.at)),
        tuple(faults),
        tuple(sorted(operations, key=lambda operation: operation.at)),
    )


def _draw_request(random: Random, ingresses: int) -> Request:
    at = _BEGIN_S + random.random() * _SPAN_S
    ingress = random.randrange(ingresses)
    prompt = tuple(random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 24)))
    max_tokens, gives_up_after = random.randint(1, 24), None
    if random.random() < 0.06:  # a long one, which its client may give up
        max_tokens = random.randint(100, 300)
        gives_up_after = random.choice((None, random.randint(1, 20)))
    return Request(at, ingress, prompt, max_tokens, random.randrange(9), gives_up_after)


def _draw_operation(random: Random) -> list[Operation]:
    at = _BEGIN_S + random.random() * _SPAN_S
    kind = random.choice(("scale", "scale", "drain", "pause"))
    if kind == "pause":
        return [Operation(at, kind), Operation(at + random.choice((0.1, 2.0, 30.0)), "resume")]
    return [Operation(at, kind, random.randint(1, 3) if kind == "scale" else random.randint(0, 2))]


def _draw_fault(random: Random, kinds: tuple[str, ...]) -> Fault:
    trigger = None
    if random.random() < 0.5:
        trigger = AtMessage(random.choice(TRIGGERS), random.randint(1, 12))
    return Fault(
        random.choice(kinds),
        _BEGIN_S + random.random() * _SPAN_S,
        random.randrange(12),
        random.choice((0.05, 1.0, 5.0, 15.0, 30.0)) * (0.5 + random.random()),
        trigger,
    )
