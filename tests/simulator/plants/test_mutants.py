"""Mutants change one function while they are planted, and only then."""

from __future__ import annotations

from swell.coordinator import roster as rosters
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.transport.channel import ChannelAddress
from tests.simulator.plants.mutants import all_mutants, instrumented_modules

ROSTER = Roster(1, (Member(0, ChannelAddress("host", "", "")),))


def test_a_mutant_is_active_while_planted() -> None:
    mutants = [each for each in all_mutants() if each.function is rosters.leave]
    (unchanged,) = [each for each in mutants if str(each).endswith("it only returns roster")]
    right = rosters.leave(ROSTER, [0])
    assert right.members[0].state is MemberState.LEAVING
    with unchanged.planted():
        assert rosters.leave(ROSTER, [0]) is ROSTER
    assert rosters.leave(ROSTER, [0]) == right


def test_every_mutation_changes_the_code() -> None:
    mutants = [each for each in all_mutants() if each.function is rosters.end_repair]
    codes = {mutant.site.compile() for mutant in mutants}
    assert len(codes) == len(mutants) > 3 and rosters.end_repair.__code__ not in codes


def test_executed_statements_are_known() -> None:
    with instrumented_modules() as lines:
        rosters.leave(ROSTER, [0])
    rosters.cancel_leave(ROSTER, [0])
    first, last = rosters.leave.__code__.co_firstlineno, rosters.cancel_leave.__code__
    own = [line for file, line in lines if file == last.co_filename]
    assert any(first < line < last.co_firstlineno for line in own)
    after = range(last.co_firstlineno, rosters.end_repair.__code__.co_firstlineno)
    assert not any(line in after for line in own)
