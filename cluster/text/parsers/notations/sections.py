"""Formats whose calls are in a section: its marker, calls, its end marker.

    content │ <section> │ <call> head │ arguments │ </call> │ <call> ... │ </section> │ content
     sent   │   held    │    held     │   sent    │    -    │            │     -      │  sent

The markers around calls are optional: a section may end with the answer, and a call may begin
without one.
"""

from __future__ import annotations

from abc import abstractmethod

from swell.cluster.text.parsers.call_reader import Call
from swell.cluster.text.parsers.text_reader import NotRead, Reading
from swell.cluster.text.parsers.tool_parser import ToolParser


class SectionParser(ToolParser):
    section: str
    """Marker that begins a section."""
    call_begin: str = ""
    """Marker that begins each call; empty if the section's marker does."""

    calls_share_section: bool = True
    """Whether several calls share a section. Otherwise each has its own, but calls are read
    wherever they occur."""

    @abstractmethod
    def _new_call(self, *, bare: bool) -> Call:
        """Returns a reader of a call, from after the marker that begins it. `bare` means that there
        was no section around it."""

    def _read_calls(self, marker: str) -> Reading[None]:
        self._hold(marker)
        bare = bool(self.call_begin) and marker.endswith(self.call_begin)
        if self.call_begin and not bare:
            try:
                yield from self._one_of(self.call_begin, give=self._held.append)
            except NotRead as error:
                return self._give_up(error.unread)
        while (yield from self._read_call("", self._new_call(bare=bare))):
            if not self.call_begin:
                return (yield from self._read_gap())
            end = yield from self._read_end_marker(self.call_begin, *self.end_markers)
            if not end:
                return self._show("")
            if end != self.call_begin:
                self._leading_space.clear()
                return (yield from self._read_gap())
            bare = False

    def _flush_end_marker(self) -> None:
        """Drops text that may be the beginning of the section's end marker."""
        self._leading_space.clear()
