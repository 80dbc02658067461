"""The protocol of a contender: a JSON line when it is ready, then one for each line that it
receives.

The lines go to the original standard output. Output of libraries goes to standard error, so `Lines`
must be created before they are imported. Only needs Python.
"""

import json
import os
import sys
import time

TURN_S = 2.0
"""The minimum duration of a turn."""


class Lines:
    """Iterates over the calls; `send` replies. Stops when the caller closes its side."""

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
        """Replies to each line with the output tokens per second of `batch`, which returns their
        number.

        A turn is as many batches as fit, one after another: a single short one would mostly measure
        how fast caches warm up after the turns of the others.
        """
        for _ in self:
            started, seconds, tokens = time.perf_counter(), 0.0, 0
            while seconds < TURN_S:
                tokens += batch()
                seconds = time.perf_counter() - started
            self.send(tokens_per_s=tokens / seconds)
