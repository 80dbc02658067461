"""A scenario: all events of one run as data. It is drawn from a seed, and shrunk if it breaks a
law."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tests.simulator.model import BROKEN_WEIGHTS, POISON_SEED, VOCAB_SIZE

HOSTS = ("host0", "host1", "host2")
"""The hosts of a cluster. The first one runs Ray's GCS."""

_BEGIN_S = 3.0
"""The engines serve by this time."""
_SPAN_S = 3.0
"""The time span of the arrivals and the faults."""
FAST_STEP_S, SLOW_STEP_S = 0.004, 0.03
"""Times of a step. With the slow step, more happens during a request."""
PATIENT_S, IMPATIENT_S = 60.0, 3.0
"""How long requests wait for an engine: longer than any replacement takes, or not."""
_DEADLINE_SHARE = 0.2
"""The share of scenarios in which some requests have a deadline."""
_TIMEOUTS_S = (0.05, 0.5, 2.0, 8.0, 20.0)
_BURST_S = 1.0
_LONG_S = 10.0
"""A fault that lasts longer than this is detected while it lasts."""


_CAMPAIGN_SHARE, _BUSY_SHARE = 0.7, 0.2
"""The shares of scenarios that are usual and busy campaigns: see `draws/campaigns.py`."""


@dataclass(frozen=True)
class Request:
    at: float
    ingress: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    gives_up_after: int | None = None
    """The number of tokens after which the client aborts it; None: it waits for the end."""
    timeout_s: float | None = None
    """The time from its arrival to its deadline; None: it may take any time."""

    @property
    def is_poison(self) -> bool:
        """Whether each engine that computes it terminates."""
        return self.seed == POISON_SEED


@dataclass(frozen=True)
class AtMessage:
    """A trigger: the fault happens while the `count`-th message of the type named `kind`, or call
    through Ray of the method `kind`, is in flight."""

    kind: str
    count: int


@dataclass(frozen=True)
class Fault:
    """A fault. `kind` is a name in `faults.FAULTS`."""

    kind: str
    at: float
    """The earliest virtual time at which it happens, in seconds."""
    target: int = 0
    """Index of its target among the possible targets, modulo their number."""
    time_s: float = 0.0
    """How long the fault lasts, if its kind has an end."""
    trigger: AtMessage | None = None
    same: bool = False
    """Whether it prefers a process that the previous fault has hit, or an end of the link that it
    hit."""
    changing: bool = False
    """Whether it prefers an engine that loads, leaves or replaces a worker."""


@dataclass(frozen=True)
class Operation:
    """A request of an operator to the manager. It is repeated until it is accepted or refused."""

    at: float
    kind: str
    """scale, drain, upgrade, update_weights, pause, resume or redeploy; Serve does the redeploy."""
    argument: int = 0
    """scale: number of engines; drain: rank; upgrade, update_weights and redeploy: number of the
    weights; pause: sleep level of the engines."""
    trigger: AtMessage | None = None
    """The message after `at` at which it is requested; without such a message, it never is."""


@dataclass(frozen=True)
class Scenario:
    seed: int
    engines: int
    ingresses: int
    expert: bool
    """Whether the engines share experts."""
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    operations: tuple[Operation, ...] = ()
    control_host: str = HOSTS[0]
    """The host of the manager and of the coordinator."""
    step_s: float = FAST_STEP_S
    """Seconds of a step, without the time for each of its tokens."""
    autoscaled: bool = False
    """Whether the number of engines follows the load. Hosts then get resources when engines need
    them."""
    rooms: tuple[int, int, int] = (1, 2, 3)
    """The number of engines for which each host has room, unless the cluster is autoscaled."""
    prefill_engines: int = 0
    """The number of engines that compute prompts for the others."""
    slow_load_s: float = 0.0
    """Additional loading time of all engines after the first `engines`."""
    no_engine_timeout_s: float = PATIENT_S
    """How long a request waits for its first engine."""


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
"""Triggers for engines that share experts."""


def draw(
    seed: int,
    kinds: tuple[str, ...],
    num_faults: int = 4,
    expert: bool | None = None,
    num_operations: int = 2,
    *,
    campaigns: bool = True,
) -> Scenario:
    """Draws a scenario. `num_faults`: maximum number of faults. `num_operations`: maximum number of
    basic operator changes, to which upgrades and reversals are added. `expert`: whether engines
    share experts; None: drawn. `campaigns`: whether some seeds yield campaigns."""
    scenario = _draw(seed, kinds, num_faults, expert, num_operations, campaigns=campaigns)
    deadlines = Random(f"deadlines:{seed}")
    if deadlines.random() < _DEADLINE_SHARE:
        requests = [_with_deadline(deadlines, request) for request in scenario.requests]
        scenario = replace(scenario, requests=tuple(requests))
    return scenario


def _draw(
    seed: int,
    kinds: tuple[str, ...],
    num_faults: int,
    expert: bool | None,
    num_operations: int,
    *,
    campaigns: bool,
) -> Scenario:
    random = Random(f"scenario:{seed}")
    engines, ingresses = random.randint(1, 3), random.randint(1, 2)
    requests = [_draw_request(random, ingresses) for _ in range(random.randint(1, 12))]
    faults = [_draw_fault(random, kinds) for _ in range(random.randint(1, num_faults))]
    for index in range(1, len(faults)):
        if random.random() < 0.2:  # both faults within a millisecond
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
    if campaigns and (share := campaign.random()) < _CAMPAIGN_SHARE + _BUSY_SHARE:
        # The module imports this one.
        from tests.simulator.draws.campaigns import draw_campaign

        return draw_campaign(campaign, scenario, kinds, is_busy=share >= _CAMPAIGN_SHARE)
    tight = Random(f"tight:{seed}")
    if {"kill", "lose-host-for-good"} <= {*kinds} and not expert and tight.random() < 0.6:
        return draw_tight(tight, scenario)
    return scenario


def draw_tight(random: Random, scenario: Scenario) -> Scenario:
    """Draws a scenario in which versions change while long answers stream, engines terminate, and a
    host is lost for good. The other hosts have room for exactly the target number of engines."""
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
    if random.random() < 0.06:  # a long request, which its client may abort
        max_tokens = random.randint(100, 300)
        gives_up_after = random.choice((None, random.randint(1, 20)))
    return Request(at, ingress, prompt, max_tokens, random.randrange(9), gives_up_after)


def _with_deadline(random: Random, request: Request) -> Request:
    timeout_s = random.choice(_TIMEOUTS_S) * (0.5 + random.random())
    return replace(request, timeout_s=timeout_s) if random.random() < 0.5 else request


def _aim_at_groups(random: Random, faults: list[Fault]) -> list[Fault]:
    """Makes half of the triggers messages about groups."""
    return [
        replace(fault, trigger=AtMessage(random.choice(GROUP_TRIGGERS), random.randint(1, 6)))
        if fault.trigger is not None and random.random() < 0.5
        else fault
        for fault in faults
    ]


def _draw_burst(random: Random, requests: list[Request], fault: Fault) -> list[Request]:
    """Moves all arrivals to the second after a fault."""
    return [replace(request, at=fault.at + _BURST_S * random.random()) for request in requests]


def _draw_late(random: Random, requests: list[Request], faults: list[Fault]) -> list[Request]:
    """Moves some arrivals into the time of a long fault."""
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
    """Makes a client abort its request, and a fault hit the abort message."""
    index = random.randrange(len(requests))
    request = replace(requests[index], max_tokens=300, gives_up_after=random.randint(1, 20))
    fault = replace(faults[0], trigger=AtMessage("AbortRequests", 1), kind=random.choice(kinds))
    return [*requests[:index], request, *requests[index + 1 :]], [fault, *faults[1:]]


def _draw_reversals(random: Random, operations: list[Operation]) -> list[Operation]:
    """Draws operators who change the number of engines again, often before the previous number is
    reached."""
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
    """Draws one to three upgrades, some to weights that do not load. A later one may cancel,
    replace or repeat the previous one, during it or after it has finished."""
    at = _BEGIN_S + random.random() * _SPAN_S
    kind = random.choice(("upgrade", "upgrade", "redeploy"))
    operations = [Operation(at, kind, random.choice((1, 1, 1, BROKEN_WEIGHTS)))]
    while len(operations) < 3 and random.random() < 0.4:
        at += random.choice((0.05, 0.5, 2.0, 10.0))
        kind = random.choice(("upgrade", "upgrade", "redeploy"))
        operations.append(Operation(at, kind, random.choice((0, 1, 2, 2, BROKEN_WEIGHTS))))
    return operations


def _draw_weights(random: Random, operations: list[Operation]) -> list[Operation]:
    """Turns half of the upgrades into weight updates, which keep the processes."""
    return [
        replace(operation, kind="update_weights")
        if operation.kind == "upgrade" and random.random() < 0.5
        else operation
        for operation in operations
    ]


def _draw_long(random: Random, requests: list[Request]) -> list[Request]:
    """Makes some answers long enough that versions change during them."""
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
