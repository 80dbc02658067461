"""Formats whose calls stand in a section: its marker, calls, its end.

    content │ <section> │ <call> head │ arguments │ </call> │ <call> ... │ </section> │ content
      out   │   held    │    held     │    out    │    -    │            │     -      │   out

The marks around calls are not required: a section may end with the answer, and a call may begin
without one.
"""

from __future__ import annotations

from abc import abstractmethod

from swell.cluster.text.parsers.calls import Call, LiteralMatcher
from swell.cluster.text.parsers.deltas import AnswerDelta
from swell.cluster.text.parsers.tools import ToolParser


class SectionParser(ToolParser):
    section: str
    """What begins calls."""
    section_ends: tuple[str, ...] = ()
    call_begin: str = ""
    """What begins each of them; empty: the section's marker."""

    calls_share_section: bool = True
    """Otherwise each stands in one of its own, though they are read wherever they come."""

    @abstractmethod
    def _new_call(self, *, bare: bool) -> Call:
        """Reads a call from behind what begins it. `bare`: there was no section around it."""

    def _on_marker(self, marker: str) -> None:
        begins_call = not self.call_begin or marker.endswith(self.call_begin)
        self._open_head(marker, self._before_first)
        if begins_call:
            self._begin_call(self._new_call(bare=bool(self.call_begin)))
        else:
            self._literals = LiteralMatcher(self.call_begin)

    def _before_first(self, text: str, at: int) -> int:
        start = at
        found, possible, at = self._literals.push(text, at)
        self._held.append(text[start:at])
        if found:
            self._begin_call(self._new_call(bare=False))
        elif not possible:
            self._give_up(self._literals.begun)
        return at

    def _on_call_end(self) -> None:
        if self.call_begin:
            self._literals = LiteralMatcher(self.call_begin, *self.section_ends)
            self._state = self._after_call
        else:
            self._state = self._gap

    def _after_call(self, text: str, at: int) -> int:
        start = at
        found, possible, at = self._literals.push(text, at)
        self._leading_space.append(text[start:at])
        if found == self.call_begin:
            self._open_head("", self._after_call)
            self._begin_call(self._new_call(bare=False))
        elif found:
            self._leading_space.clear()
            self._state = self._gap
        elif not possible:
            self._read_again(self._literals.begun, self._leading_space)
        return at

    def flush(self) -> list[AnswerDelta]:
        """What may have been the end of a section is taken for it."""
        if self._state == self._after_call and self._literals.begun:
            self._leading_space.clear()
        return super().flush()
