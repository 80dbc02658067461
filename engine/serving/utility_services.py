"""Functions of an engine that clients may call, in addition to requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from swell.engine.wire import UtilityCall, UtilityOutput


class UtilityServices:
    """The functions, by name."""

    def __init__(self, services: Mapping[str, Callable[..., object]]) -> None:
        self._services = dict(services)

    def call(self, call: UtilityCall) -> UtilityOutput:
        """Runs a function; an exception is returned as a failure message."""
        try:
            if call.method not in self._services:
                known = ", ".join(sorted(self._services))
                raise ValueError(f"unknown utility {call.method!r}; known: {known}")
            result = self._services[call.method](*call.args)
            return UtilityOutput(call.call_id, None, msgspec.Raw(msgspec.msgpack.encode(result)))
        except Exception as error:
            return UtilityOutput(call.call_id, f"{type(error).__name__}: {error}")
