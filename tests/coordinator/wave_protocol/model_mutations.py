"""Every rule of the wave protocol, what replaces it in a mutant, and the bounds that detect
this."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any, NamedTuple

from swell.coordinator.wave_protocol import waves
from swell.coordinator.wave_protocol.waves import WaveCoordinator, WaveMember


class Rule(NamedTuple):
    half: type
    method: str
    text: str
    """A fragment of the method's source, which occurs there exactly once."""
    without: str
    """The text that replaces the fragment if the rule is removed."""
    bounds: str
    """The name of the bounds that detect the removal."""


def remove(rule: Rule) -> dict[str, Any]:
    """Returns the half without the rule, as an argument of `explore`."""
    source = textwrap.dedent(inspect.getsource(getattr(rule.half, rule.method)))
    assert source.count(rule.text) == 1, f"{rule.text!r} in\n{source}"
    names: dict[str, Any] = dict(vars(waves))
    source = source.replace(rule.text, rule.without)
    exec("from __future__ import annotations\n" + source, names)
    half = type(rule.half.__name__, (rule.half,), {rule.method: names[rule.method]})
    return {"member" if rule.half is WaveMember else "coordinator": half}


_M, _C = WaveMember, WaveCoordinator

RULES = {
    # 1. Only engines start waves.
    "work wakes a stopped engine": Rule(
        _M, "work_arrived", "self.phase is Phase.STOPPED", "False", "depth 1"
    ),
    "work does not wake a paused engine": Rule(
        _M, "work_arrived", "self.phase is Phase.STOPPED", "self.phase is Phase.PAUSED", "pause"
    ),
    "only a running engine steps": Rule(
        _M, "may_submit", "self.phase is Phase.RUNNING", "True", "depth 1"
    ),
    # 2. Which messages the coordinator accepts.
    "a newer start is accepted": Rule(
        _C, "start_wave", "wave > self.wave", "False", "three requests"
    ),
    "an equal start is accepted while no engine is seen running": Rule(
        _C, "start_wave", "wave == self.wave and", "False and", "depth 1"
    ),
    "an older start is refused": Rule(
        _C, "start_wave", "wave > self.wave", "wave != self.wave", "three requests"
    ),
    "a start of another epoch is dropped": Rule(
        _C, "start_wave", "epoch != self.epoch", "False", "death, four requests"
    ),
    # 3. What an engine ignores and remembers.
    "an older start is ignored": Rule(
        _M, "start", " or message.wave < self.wave", "", "three requests"
    ),
    "a start begins the wave": Rule(
        _M, "start", "self.phase is Phase.STOPPED", "False", "depth 1"
    ),
    "the start of the next wave is remembered": Rule(
        _M, "start", "message.wave > self.wave", "False", "three requests"
    ),
    "the start of the same wave is not": Rule(
        _M, "start", "message.wave > self.wave", "True", "depth 1"
    ),
    "a remembered start begins the wave": Rule(
        _M, "_complete", "elif self.start_pending", "elif False", "three requests"
    ),
    "a remembered start counts once": Rule(
        _M, "_complete", "self.start_pending = False", "pass", "three requests"
    ),
    # 4. How a wave ends.
    "while a wave finishes no step is submitted": Rule(
        _M, "may_submit", " and not self.finishing", "", "depth 2"
    ),
    "work keeps the wave alive": Rule(_M, "on_all_reduce", "not working", "True", "depth 1"),
    "steps in flight are read first": Rule(
        _M, "on_all_reduce", " or self.in_flight", "", "depth 2"
    ),
    "the next wave does not begin finishing": Rule(
        _M, "on_all_reduce", "self.finishing = False", "pass", "depth 1"
    ),
    "work that came meanwhile begins the next wave": Rule(
        _M, "_complete", "has_work or", "False or", "depth 2"
    ),
    # 5. Counters.
    "an engine counts waves": Rule(_M, "_complete", "self.wave += 1", "pass", "depth 1"),
    "the first engine sends the end": Rule(
        _M, "_complete", "self.rank == self.ranks[0]", "False", "depth 1"
    ),
    "a late end is refused": Rule(
        _C, "wave_complete", " and self.wave <= wave", "", "three requests"
    ),
    "an end of another epoch is dropped": Rule(
        _C, "wave_complete", "epoch == self.epoch and ", "", "death, four requests"
    ),
    # 6. Pauses.
    "a pause must be unanimous": Rule(
        _M, "on_all_reduce", "pausing == len(self.ranks)", "pausing > 0", "two pauses"
    ),
    "an agreed pause ends the steps, work or not": Rule(
        _M, "on_all_reduce", "agreed or", "False or", "pause"
    ),
    "an agreed pause is no end of the wave": Rule(
        _M, "on_all_reduce", "self._pause() if agreed else ", "", "exchange"
    ),
    "a stopped engine runs to vote": Rule(
        _M, "pause", "self.phase is Phase.STOPPED", "False", "pause"
    ),
    "a voting engine goes on after the end of a wave": Rule(
        _M, "_complete", " or self.voting", "", "pause"
    ),
    "a start does not wake a paused engine": Rule(
        _M, "start", "self.phase is Phase.STOPPED", "self.phase is not Phase.OUT", "pause"
    ),
    "resume wakes, work or not": Rule(
        _M, "resume", "Phase.RUNNING, False", "Phase.STOPPED, False", "pause"
    ),
    "resume ends the vote": Rule(
        _M, "resume", "Phase.RUNNING, False", "Phase.RUNNING, True", "pause"
    ),
    "resume is for all": Rule(
        _C, "_resume", "for rank in self.ranks", "for rank in self.ranks[:1]", "pause"
    ),
    "a pause is requested once": Rule(
        _C, "_request_pause", "self.group_state is not GroupState.SERVING", "False", "two pauses"
    ),
    "an empty group is not paused": Rule(
        _C, "_request_pause", " or not self.ranks", "", "first two, pause"
    ),
    "a pause is kept until resume": Rule(
        _C, "_on_acknowledged", "if self.pause_requested", "if False", "pause"
    ),
    "resume lets all run": Rule(
        _C, "resume", "self._resume() if self.group_state is GroupState.PAUSED else []", "[]",
        "pause",
    ),
    "a pause is not taken back": Rule(
        _C, "resume", "self.group_state is GroupState.PAUSED",
        "self.group_state is not GroupState.SERVING", "pause",
    ),
    "all must answer": Rule(
        _C, "_on_acknowledged", "self.acknowledged != set(self.ranks)", "False", "pause"
    ),
    "answers count for one pause": Rule(
        _C, "_request_pause", "GroupState.PAUSING, frozenset()",
        "GroupState.PAUSING, self.acknowledged", "two pauses",
    ),
    "a pause of another epoch is dropped": Rule(
        _C, "paused", "(epoch, number) != (self.epoch, self.pause_number)", "False",
        "restart, newcomers"
    ),
    # 7. Group changes.
    "a change is a pause first": Rule(
        _C, "change", "return self._request_pause()", "return []", "newcomer"
    ),
    "a paused group changes at once": Rule(
        _C, "change", " or self.group_state is GroupState.PAUSED", "", "newcomer, pause"
    ),
    "a first group forms at once": Rule(_C, "change", "not self.ranks or", "", "first two, pause"),
    "a death is a new epoch at once": Rule(_C, "change", "gone or not", "not", "death"),
    "a death counts even if the change was wanted": Rule(
        _C, "change", "and not gone", "", "detach, death"
    ),
    "only a loss is a new epoch at once": Rule(
        _C, "change", "lost and not", "not", "detach"
    ),
    "after the pause the group changes": Rule(
        _C, "_on_acknowledged", "self.target_ranks != self.ranks or ", "", "newcomer"
    ),
    "an engine that is not wanted gets the command to leave": Rule(
        _C, "_form", "{*self.ranks, *self.target_ranks}", "{*self.target_ranks}", "detach"
    ),
    "a group is a new epoch": Rule(
        _C, "_form", "self.epoch_before) + 1", "self.epoch_before)", "newcomer"
    ),
    "all must join": Rule(
        _C, "_form", "self.ranks, self.acknowledged,", "self.ranks, _,", "newcomer"
    ),
    "an empty group is not waited for": Rule(
        _C, "_form", " if self.ranks else GroupState.SERVING", "", "two deaths"
    ),
    "a broken group forms again": Rule(
        _C, "broken", "self._form() if epoch == self.epoch else []", "[]", "restart, repair"
    ),
    "an answer of another epoch is dropped": Rule(
        _C, "joined", "epoch == self.epoch", "True", "newcomer, death"
    ),
    "a group begins paused": Rule(_M, "joined", "Phase.PAUSED", "Phase.STOPPED", "newcomer"),
    "a group begins with one wave": Rule(
        _M, "reconfigure", "message.epoch, message.wave", "message.epoch, self.wave", "newcomer"
    ),
    "an engine that leaves forgets that its wave was finishing": Rule(
        _M, "_leave", "self.finishing = ", "", "death, depth 2"
    ),
    "an engine that leaves forgets a start": Rule(
        _M, "_leave", " = self.start_pending", "", "repair, two requests"
    ),
    # 8. A coordinator restart.
    "a formed group is not inherited": Rule(
        _C, "_form", "frozenset(), False", "frozenset(), self.inherited", "restart"
    ),
    "an engine out of the group cannot pause": Rule(
        _C, "recover", "set(newest.ranks) <= able", "True", "restart, pause"
    ),
    "a group half resumed cannot pause": Rule(
        _C, "recover", "Phase.RUNNING)", "Phase.RUNNING, Phase.PAUSED)", "restart, pause"
    ),
    "an engine that was in no group has none that could pause": Rule(
        _C, "recover", "not newest.ranks or", "", "restart, newcomers"
    ),
    "the newest epoch counts": Rule(
        _C, "recover", "hello: hello.epoch", "hello: -hello.epoch", "restart, newcomers"
    ),
    "all who introduce themselves are wanted": Rule(
        _C, "recover", "tuple(sorted(hello.member.rank for hello in hellos))",
        "tuple(newest.ranks)", "restart, newcomers",
    ),
    "a report reveals what broke": Rule(
        _C, "report", "phase in (Phase.OUT, Phase.STANDALONE)", "False", "restart, repair"
    ),
    "a standalone engine is not in its group": Rule(
        _C,
        "report",
        "phase in (Phase.OUT, Phase.STANDALONE)",
        "phase is Phase.OUT",
        "alone, restart",
    ),
    "an engine that forms its group is not broken": Rule(
        _M, "reconfigure", "self.phase = Phase.FORMING", "pass", "restart"
    ),
    "an engine that has left is not broken": Rule(
        _C, "report", "if rank not in self.ranks:", "if False:", "restart, detach"
    ),
    "an engine in an older group is not in the newest": Rule(
        _C, "recover", "hello.epoch == self.epoch and ", "", "restart, repair"
    ),
    # 9. Lost messages.
    "a group that was not heard of is sent again": Rule(
        _C, "report", "return [(rank, self._new_group())]", "return []", "drop, newcomer"
    ),
    "a report says who has joined": Rule(
        _C, "report", "self.joined(rank, epoch) if phase is Phase.PAUSED else []", "[]",
        "drop, newcomer",
    ),
    "a report says that the engine still pauses": Rule(
        _C, "_compare_wave", "return [(rank, Resume(self.epoch))]", "return []", "drop, newcomer"
    ),
    "a report says that a wave runs": Rule(
        _C, "_compare_wave", "return self.start_wave(rank, self.epoch, wave)", "return []", "drop"
    ),
    "a report says that a wave has ended": Rule(
        _C, "_compare_wave", "self.wave_complete(self.epoch, wave - 1)", "pass", "drop"
    ),
    "a report says that the engine has not begun": Rule(
        _C, "_compare_wave", "return [(rank, StartDPWave(self.epoch, self.wave))]", "return []",
        "drop",
    ),
    "a pause that was not heard is requested again": Rule(
        _C, "report", "if waits else []", "if False else []", "drop, newcomer"
    ),
    "a paused engine answers again": Rule(
        _M, "pause", "and self.phase is Phase.PAUSED", "and False", "restart, pause"
    ),
}  # fmt: skip
