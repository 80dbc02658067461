"""What an engine gives at once, as if it came token by token. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from swell.engine.wire import EngineCoreOutput
from swell.worker.sample.wire import TokenLogprobs


def one_by_one(output: EngineCoreOutput) -> Sequence[EngineCoreOutput]:
    """Outputs of one token each: the first has what belongs to no token, the last the end."""
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
