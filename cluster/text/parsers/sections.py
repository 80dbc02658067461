"""Formats whose calls are in a section: its marker, calls, its end marker.

    content │ <section> │ <call> head │ arguments │ </call> │ <call> ... │ </section> │ content
      out   │   held    │    held     │    out    │    -    │            │     -      │   out

The markers around calls are not required: a section may end with the answer, and a call may begin
without one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from swell.cluster.text.parsers.calls import Call, LiteralMatcher, MarkedCall
from swell.cluster.text.parsers.tools import ToolParser


class SectionParser(ToolParser):
    section: str
    """What begins calls."""
    call_begin: str = ""
    """What begins each of them; empty: the section's marker."""

    calls_share_section: bool = True
    """Otherwise each is in one of its own, though calls are read wherever they come."""

    @abstractmethod
    def _new_call(self, *, bare: bool) -> Call:
        """Reads a call from after what begins it. `bare`: there was no section around it."""

    def _on_marker(self, marker: str) -> None:
        if not self.call_begin or marker.endswith(self.call_begin):
            self._open_call(marker, self._new_call(bare=bool(self.call_begin)))
        else:
            self._open_call(marker, _FirstCall(self.call_begin, self._new_call))

    def _on_call_end(self) -> None:
        if self.call_begin:
            self._end_of_call = LiteralMatcher(self.call_begin, *self.end_markers)
            self._state = self._after_call
        else:
            self._state = self._gap

    def _on_end_marker(self, marker: str) -> None:
        if marker == self.call_begin:
            self._open_call("", self._new_call(bare=False))
        else:
            super()._on_end_marker(marker)

    def _on_no_end_marker(self, begun: str) -> None:
        self._read_again(begun, self._leading_space)

    def _flush_end_marker(self) -> None:
        """What may have been the end of a section is taken for it."""
        self._leading_space.clear()


class _FirstCall(MarkedCall):
    """What begins the first call of a section."""

    def __init__(self, call_begin: str, new_call: Callable[..., Call]) -> None:
        self._expect({call_begin: lambda _: self._begin_body(new_call(bare=False))})
