"""Splits an output of several tokens into outputs of one token each. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from swell.engine.wire import EngineCoreOutput
from swell.worker.sampler_wire import TokenLogprobs


def one_by_one(output: EngineCoreOutput) -> Sequence[EngineCoreOutput]:
    """Returns outputs of one token each. The first one has the extras that belong to no token, the
    last one has the finish reason."""
    *before, last = output.new_token_ids or [0]
    if not before:
        return (output,)
    others = [extra for extra in output.extras if not isinstance(extra, TokenLogprobs)]
    rows = [extra for extra in output.extras if isinstance(extra, TokenLogprobs)]
    pieces = [
        replace(
            output,
            new_token_ids=[token_id],
            extras=(others if place == 0 else []) + rows[place : place + 1],
            finish_reason=None,
            stop_reason=None,
        )
        for place, token_id in enumerate(before)
    ]
    return [*pieces, replace(output, new_token_ids=[last], extras=rows[len(before) :])]
