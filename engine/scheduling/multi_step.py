"""Multi-step scheduling: one plan computes several tokens of each row.

A step with only decode rows is computed `scheduler.steps_per_plan` times, one token further each
time, before its results are read: so the host is needed once for all of these tokens.

    plan            n                 n + 1
    row a           t0 t1 t2 t3       t4 t5 t6 t7
    row b           t0 t1 end

The tokens are the same as with single steps, because each pass is such a step. A row that has
finished is left out of the following passes (`swell.worker.step.multi_step.RowEnds`); if the worker
does not know that it has finished, up to `steps_per_plan` - 1 of its tokens are discarded.
Like drafts, additional passes use only spare resources: neither the token budget of prompts, nor
blocks that another request may need."""

from __future__ import annotations

from swell.engine.kv.kv_cache_manager import KVCacheManager
from swell.engine.request import Request
from swell.engine.scheduling.step_builder import StepBuilder


def add_passes(
    builder: StepBuilder, steps: int, running: int, kv: KVCacheManager, max_model_len: int
) -> None:
    """Allows up to `steps` tokens for each row, if every row of the step computes only its newest
    token. `running`: number of requests with a slot."""
    if builder.new_requests:
        return
    if not all(_decodes(request, count) for request, count in builder.rows):
        return
    for request, _ in builder.rows:
        to_come = request.core.max_tokens - request.num_outputs - request.pending - 1
        extra_steps = min(steps - 1, to_come, max_model_len - request.total_tokens)
        extra_steps = builder.room_for(request, extra_steps, running, kv) if extra_steps > 0 else 0
        if extra_steps > 0:
            builder.extra_steps[request.slot] = extra_steps


def _decodes(request: Request, count: int) -> bool:
    return count == 1 and request.computed + 1 == request.total_tokens and request.is_sampling
