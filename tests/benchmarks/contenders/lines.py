"""The protocol of a contender: a JSON line when it is ready, then one for each line it receives.

The lines go to what was standard output at the start. What libraries print goes to standard
error, so this must be made before they are loaded. Needs nothing but Python.
"""

import json
import os
import sys
import time

TURN_S = 2.0
"""The least duration of a turn."""


class Lines:
    """Iterate over the calls; `send` answers. Ends when the caller closes its side."""

    def __init__(self):
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, **facts):
        self._out.write(json.dumps(facts) + "\n")
        self._out.flush()

    def __iter__(self):
        for line in sys.stdin:
            yield json.loads(line)

    def send_rates(self, batch):
        """Answer each line with the output tokens per second of `batch`, which gives their number.

        A turn is as many batches as it takes, one after another: a short one alone would mostly
        measure how fast caches warm up after the others' turns.
        """
        for _ in self:
            started, seconds, tokens = time.perf_counter(), 0.0, 0
            while seconds < TURN_S:
                tokens += batch()
                seconds = time.perf_counter() - started
            self.send(tokens_per_s=tokens / seconds)
