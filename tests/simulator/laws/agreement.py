"""Laws about a run at its end: all processes agree on the cluster, and no change is left half
done."""

from __future__ import annotations

from collections.abc import Iterator

from swell.cluster.client.engine_connection import EngineId
from swell.cluster.control.manager import ClusterManager
from swell.cluster.control.plan.control_state import ChangeStage
from swell.cluster.control.plan.fleet_view import Intent
from swell.coordinator.roster import MemberState
from swell.coordinator.wave_protocol.wave_interface import Phase
from tests.simulator.actors import SimCoordinator, SimEngine
from tests.simulator.control_plane import ControlPlane, SimIngress


def disagreements(plane: ControlPlane) -> Iterator[str]:
    """Yields what differs between processes although nothing changes any more."""
    coordinator = plane.coordinator
    if coordinator is None or coordinator._recovering:
        yield "there is no coordinator"
        return
    yield from _of_coordinator(coordinator)
    yield from _of_manager(plane.manager.manager, coordinator)
    for ingress in plane.ingresses:
        yield from _of_ingress(ingress, coordinator)
    for engine in plane.living_engines:
        yield from _of_engine(engine, coordinator)
    yield from _left_over(plane)


def _of_coordinator(coordinator: SimCoordinator) -> Iterator[str]:
    """Yields changes of members or groups that the coordinator has not completed."""
    machine = coordinator._state_machine
    if not machine.is_stable:
        yield f"the group {machine.waves.target_ranks} does not form"
    if machine.joining or machine.detached:
        yield f"engines join for ever: {machine.joining}, or leave: {machine.detached}"
    for member in machine.roster.members:
        if member.state is not MemberState.ACTIVE or member.leaves:
            yield f"engine {member.rank} is {member.state} for ever"


def _of_manager(manager: ClusterManager, coordinator: SimCoordinator) -> Iterator[str]:
    """Yields changes that the manager has not completed, or has not published."""
    if manager._state.change.stage not in (ChangeStage.SETTLED, ChangeStage.FAILED):
        yield f"the change to {manager.target} engines is {manager._state.change.stage} for ever"
    for handle in manager._fleet.handles:
        status = handle.intent, handle.next_version, handle.previous
        if status != (Intent.STAY, None, None) or handle.is_extra or handle.in_transition:
            yield f"the manager has not completed a change of {handle.name}: {handle}"
    if manager._fleet.drains:
        yield f"records of drains are left: {manager._fleet.drains}"
    newest, known = manager._checkpoint(), coordinator._state_machine.manager_state
    if manager._checkpoints._saved != newest:
        yield "the manager's state is not stored"
    if known.desired != newest.desired:
        yield "the coordinator does not have the state of the manager"


def _of_ingress(ingress: SimIngress, coordinator: SimCoordinator) -> Iterator[str]:
    """Yields what an ingress knows wrongly, or counts although nothing runs."""
    name, llm = ingress.process.name, ingress.llm
    if llm is None:
        return
    roster = coordinator._state_machine.roster
    ids = {EngineId.of(member) for member in roster.members}
    if not (llm.view.roster == llm._placer._roster == roster):
        yield f"{name} has another roster than the coordinator"
    client, placer = llm._client, llm._placer
    if client._connections.keys() != ids:  # type: ignore[attr-defined]
        yield f"{name} has connections to other engines than the members"
    if placer._unreachable:
        yield f"{name} does not reach {placer._unreachable}"
    if any(any(placer.backlog(own_only=own)) for own in (False, True)):
        yield f"{name} counts requests that wait, and none is there"


def _of_engine(engine: SimEngine, coordinator: SimCoordinator) -> Iterator[str]:
    """Yields what an engine knows wrongly, or the roster of the engine."""
    server, machine = engine.server, coordinator._state_machine
    if server is None:
        return
    name, own = engine.process.name, server.member
    member = machine.roster.find(own.rank)
    if member != own:
        yield f"{name} is {own}, and the roster has {member}"
    kept = server._coordinator_client._kept
    if kept.roster_epoch != machine.roster.epoch or kept.manager_state != machine.manager_state:
        yield f"{name} keeps another state for the next coordinator than the newest one"
    waves, group = server.core.wave_member, machine.waves
    if group.lockstep and (waves.epoch != group.epoch or tuple(waves.ranks) != group.ranks):
        yield f"{name} is in another group than the coordinator's"
    if waves.phase is Phase.STANDALONE:
        yield f"{name} serves standalone, and a coordinator leads"


def _left_over(plane: ControlPlane) -> Iterator[str]:
    """Yields processes without an owner."""
    engines = sorted(each.process.name for each in plane.living_engines)
    found = [p.name for p in plane.ray.processes.values() if p.alive]
    if sorted(name for name in found if name.startswith("sim-engine")) != engines:
        yield f"processes of engines are left: {found}"
    if sum(name.startswith("coordinator") for name in found) != 1:
        yield f"several coordinators are left: {found}"
    actors = [name for _, name in plane.ray.actors if name.startswith("sim-engine")]
    if len(actors) != len(engines):
        yield f"actors of engines are left: {actors}"
