"""Several tokens of each row by one plan: multi-step scheduling.

A step that decodes alone is computed `scheduler.steps_per_plan` times, one token further each time,
before its results are read: the host is asked once for all of them.

    plan            n                 n + 1
    row a           t0 t1 t2 t3       t4 t5 t6 t7
    row b           t0 t1 end

The tokens are those of one step at a time, since each pass is such a step. A row that has ended is
left out of the passes behind (`swell.worker.multi_step.RowEnds`); where the worker does not know,
they compute up to `steps_per_plan` - 1 tokens for nothing. Like drafts, further
passes take nothing from others: neither the budget of rows with prompts, nor blocks that another
request may need.
"""

from __future__ import annotations

from swell.engine.kv_cache_manager import KVCacheManager
from swell.engine.request import Request
from swell.engine.step_builder import StepBuilder


def add_passes(
    builder: StepBuilder, steps: int, running: int, kv: KVCacheManager, max_model_len: int
) -> None:
    """Let rows have up to `steps` tokens each, if every row of the step computes its newest token
    alone; `running`: requests that have a slot."""
    if builder.new_rows:
        return
    if not all(_decodes(request, count) for request, count in builder.rows):
        return
    for request, _ in builder.rows:
        to_come = request.core.max_tokens - request.num_outputs - request.pending - 1
        further = min(steps - 1, to_come, max_model_len - request.total_tokens)
        further = builder.room_for(request, further, running, kv) if further > 0 else 0
        if further > 0:
            builder.further[request.slot] = further


def _decodes(request: Request, count: int) -> bool:
    return count == 1 and request.computed + 1 == request.total_tokens and request.is_sampling
