"""What happens in one run, as data: it is drawn from a seed, and shrunk when it breaks a law."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tests.simulator.model import BROKEN_WEIGHTS, POISON_SEED, VOCAB_SIZE

HOSTS = ("host0", "host1", "host2")
"""The first one has Ray's GCS."""

_BEGIN_S = 3.0
"""The engines serve by then."""
_SPAN_S = 3.0
"""Of the arrivals and the faults."""
FAST_STEP_S, SLOW_STEP_S = 0.004, 0.03
"""With the latter more happens during a request."""
_BURST_S = 1.0
_LONG_S = 10.0
"""A fault of this length is noticed while it lasts."""


_CAMPAIGN_SHARE = 0.6
"""Of the runs: see `campaigns.py`."""


@dataclass(frozen=True)
class Request:
    at: float
    ingress: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    gives_up_after: int | None = None
    """Tokens after which its client gives it up; None: it waits for the end."""

    @property
    def is_poison(self) -> bool:
        """Each engine that computes it dies."""
        return self.seed == POISON_SEED


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
    same: bool = False
    """It hits a process that the fault before it has hit, or whose link, if it may."""


@dataclass(frozen=True)
class Operation:
    """What an operator asks of the manager, and repeats until it is accepted or refused."""

    at: float
    kind: str
    """scale, drain, upgrade, update_weights, pause or resume; redeploy is what Serve does."""
    argument: int = 0
    """Of scale: how many engines; of drain: which rank; of upgrade, update_weights and redeploy:
    which weights; of pause: how deeply engines sleep."""


@dataclass(frozen=True)
class Scenario:
    seed: int
    engines: int
    ingresses: int
    expert: bool
    """The engines share experts."""
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    operations: tuple[Operation, ...] = ()
    control_host: str = HOSTS[0]
    """Of the manager, and of the coordinator beside it."""
    step_s: float = FAST_STEP_S
    """How long a step takes, its tokens aside."""
    autoscaled: bool = False
    """The number of engines follows the load, and hosts have resources when engines need them."""
    rooms: tuple[int, int, int] = (1, 2, 3)
    """Engines for which each host has room, unless it is autoscaled."""
    prefill_engines: int = 0
    """So many engines compute prompts for the others."""
    slow_load_s: float = 0.0
    """Engines after the first ones load for so much longer."""


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
GROUP_TRIGGERS = (
    "ReconfigureDistributedRequest",
    "Joined",
    "Broken",
    "Pause",
    "Paused",
    "Resume",
    "StartWave",
    "StartDPWave",
    "WaveComplete",
)
"""Of engines that share experts."""


def draw(
    seed: int,
    kinds: tuple[str, ...],
    num_faults: int = 4,
    expert: bool | None = None,
    num_operations: int = 2,
    *,
    campaigns: bool = True,
) -> Scenario:
    """A standard run, or one with more faults or changes by an operator at most. `expert`: None for
    either. `campaigns`: some runs are of those."""
    random = Random(f"scenario:{seed}")
    engines, ingresses = random.randint(1, 3), random.randint(1, 2)
    requests = [_draw_request(random, ingresses) for _ in range(random.randint(1, 12))]
    faults = [_draw_fault(random, kinds) for _ in range(random.randint(1, num_faults))]
    for index in range(1, len(faults)):
        if random.random() < 0.2:  # two in the same millisecond
            at = faults[index - 1].at + 0.001 * random.random()
            faults[index - 1] = replace(faults[index - 1], trigger=None)
            faults[index] = replace(faults[index], at=at, trigger=None)
    operations = [
        op for _ in range(num_operations) if random.random() < 0.3 for op in _draw_operation(random)
    ]
    if expert is None:
        expert = Random(f"expert:{seed}").random() < 0.5
    if expert:
        faults = _aim_at_groups(Random(f"groups:{seed}"), faults)
    operations += _draw_reversals(Random(f"reversals:{seed}"), operations)
    if not expert and (upgrades := Random(f"upgrades:{seed}")).random() < 0.3:
        operations += _draw_upgrades(upgrades)
        requests = _draw_long(upgrades, requests)
    operations = _draw_weights(Random(f"weights:{seed}"), operations)
    if (burst := Random(f"burst:{seed}")).random() < 0.2:
        requests = _draw_burst(burst, requests, faults[0])
    requests = _draw_late(Random(f"late:{seed}"), requests, faults)
    if (aborts := Random(f"aborts:{seed}")).random() < 0.1:
        requests, faults = _draw_lost_abort(aborts, kinds, requests, faults)
    if Random(f"poison:{seed}").random() < 0.05:
        requests[0] = replace(requests[0], seed=POISON_SEED, gives_up_after=None)
    scenario = Scenario(
        seed,
        engines,
        ingresses,
        expert,
        tuple(sorted(requests, key=lambda request: request.at)),
        tuple(faults),
        tuple(sorted(operations, key=lambda operation: operation.at)),
        Random(f"control:{seed}").choice(HOSTS),
        Random(f"step:{seed}").choice((FAST_STEP_S, FAST_STEP_S, SLOW_STEP_S)),
        Random(f"autoscaled:{seed}").random() < 0.25,
        prefill_engines=Random(f"prefill:{seed}").choice((0, 0, 0, 1)),
    )
    campaign = Random(f"campaign:{seed}")
    if campaigns and campaign.random() < _CAMPAIGN_SHARE:
        from tests.simulator.campaigns import draw_campaign  # which knows scenarios

        return draw_campaign(campaign, scenario, kinds)
    tight = Random(f"tight:{seed}")
    if {"kill", "lose-host-for-good"} <= {*kinds} and not expert and tight.random() < 0.15:
        return draw_tight(tight, scenario)
    return scenario


def draw_tight(random: Random, scenario: Scenario) -> Scenario:
    """Versions change while long answers stream, engines die, and a host is lost, without which
    there is room for exactly as many engines as are wanted."""
    engines, lost = random.randint(1, 3), random.choice((1, 2))
    rooms = {0: 0, 3 - lost: 0}
    for _ in range(engines):
        rooms[random.choice((0, 3 - lost))] += 1
    rooms[lost] = random.randint(1, 2)
    losses = [_draw_fault(random, ("lose-host-for-good",))]
    losses += [_draw_fault(random, ("kill",)) for _ in range(random.randint(1, 3))]
    faults = [replace(fault, at=fault.at + _SPAN_S * random.random()) for fault in losses]
    faults[0] = replace(faults[0], target=lost - 1)
    operations = _draw_weights(random, _draw_upgrades(random))
    if random.random() < 0.3:
        at = _BEGIN_S + random.random() * _SPAN_S
        operations.append(Operation(at, "scale", random.randint(1, engines)))
    return replace(
        scenario,
        engines=engines,
        requests=tuple(_draw_long(random, [*scenario.requests])),
        faults=tuple(faults),
        operations=tuple(sorted(operations, key=lambda operation: operation.at)),
        step_s=SLOW_STEP_S,
        autoscaled=False,
        rooms=(rooms[0], rooms[1], rooms[2]),
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


def _aim_at_groups(random: Random, faults: list[Fault]) -> list[Fault]:
    """Every second message that a fault waits for is one about groups."""
    return [
        replace(fault, trigger=AtMessage(random.choice(GROUP_TRIGGERS), random.randint(1, 6)))
        if fault.trigger is not None and random.random() < 0.5
        else fault
        for fault in faults
    ]


def _draw_burst(random: Random, requests: list[Request], fault: Fault) -> list[Request]:
    """All come about the time of a fault."""
    return [replace(request, at=fault.at + _BURST_S * random.random()) for request in requests]


def _draw_late(random: Random, requests: list[Request], faults: list[Fault]) -> list[Request]:
    """Some come while a long fault lasts."""
    long = [fault for fault in faults if fault.time_s > _LONG_S and fault.trigger is None]
    if not long:
        return requests
    fault = random.choice(long)
    return [
        replace(request, at=fault.at + fault.time_s * random.random())
        if random.random() < 0.3
        else request
        for request in requests
    ]


def _draw_lost_abort(
    random: Random, kinds: tuple[str, ...], requests: list[Request], faults: list[Fault]
) -> tuple[list[Request], list[Fault]]:
    """A client gives up, and something happens to the message that says so."""
    index = random.randrange(len(requests))
    request = replace(requests[index], max_tokens=300, gives_up_after=random.randint(1, 20))
    fault = replace(faults[0], trigger=AtMessage("AbortRequests", 1), kind=random.choice(kinds))
    return [*requests[:index], request, *requests[index + 1 :]], [fault, *faults[1:]]


def _draw_reversals(random: Random, operations: list[Operation]) -> list[Operation]:
    """An operator who wants another number before the one asked for is there."""
    return [
        replace(operation, at=operation.at + random.choice((0.05, 0.5, 2.0)), argument=number)
        for operation in operations
        if operation.kind == "scale" and (number := random.randint(0, 3))
    ]


def _draw_operation(random: Random) -> list[Operation]:
    at = _BEGIN_S + random.random() * _SPAN_S
    kind = random.choice(("scale", "scale", "drain", "pause"))
    if kind == "pause":
        level = int(1e6 * at) % 3
        return [
            Operation(at, kind, level),
            Operation(at + random.choice((0.1, 2.0, 30.0)), "resume"),
        ]
    return [Operation(at, kind, random.randint(1, 3) if kind == "scale" else random.randint(0, 2))]


def _draw_upgrades(random: Random) -> list[Operation]:
    """One to three, to weights that perhaps do not load. The next one perhaps cancels the one
    before, replaces it, or goes forth again, while that is under way or has ended."""
    at = _BEGIN_S + random.random() * _SPAN_S
    kind = random.choice(("upgrade", "upgrade", "redeploy"))
    operations = [Operation(at, kind, random.choice((1, 1, 1, BROKEN_WEIGHTS)))]
    while len(operations) < 3 and random.random() < 0.4:
        at += random.choice((0.05, 0.5, 2.0, 10.0))
        kind = random.choice(("upgrade", "upgrade", "redeploy"))
        operations.append(Operation(at, kind, random.choice((0, 1, 2, 2, BROKEN_WEIGHTS))))
    return operations


def _draw_weights(random: Random, operations: list[Operation]) -> list[Operation]:
    """Some upgrades keep the processes."""
    return [
        replace(operation, kind="update_weights")
        if operation.kind == "upgrade" and random.random() < 0.5
        else operation
        for operation in operations
    ]


def _draw_long(random: Random, requests: list[Request]) -> list[Request]:
    """Some answers are so long that versions change meanwhile."""
    return [
        replace(request, max_tokens=random.randint(50, 200)) if random.random() < 0.4 else request
        for request in requests
    ]


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
