"""The processor time that a model and its sampler use for a token: `MODEL ROWS INPUTS OUTPUTS`.

One engine in this process, so that no other part of it runs between two calls.
"""

import random
import sys
import time

from lines import Lines


class Stopwatch:
    """Measures the processor time of this process inside of calls."""

    def __init__(self):
        self.ns = 0

    def around(self, call):
        def timed(*args, **kwargs):
            started = time.process_time_ns()
            result = call(*args, **kwargs)
            self.ns += time.process_time_ns() - started
            return result

        return timed


def main(lines):
    from swell.cluster.local import LLM, SamplingParams

    model, (rows, inputs, outputs) = sys.argv[1], map(int, sys.argv[2:])
    params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
    with LLM(model, **{"scheduler.max_rows": rows, "cache.prefix_caching": False}) as llm:
        runner, watch = llm._engine.core.executor._worker.runner, Stopwatch()  # type: ignore[attr-defined]
        runner._forward = watch.around(runner._forward)
        runner.model.argmax = watch.around(runner.model.argmax)
        rng = random.Random(0)
        vocabulary = range(llm._prompts.vocab_size)
        prompts = [rng.choices(vocabulary, k=inputs) for _ in range(rows)]
        llm.generate(prompts, params)
        lines.send(ready=True)
        for _ in lines:
            watch.ns = 0
            llm.generate(prompts, params)
            lines.send(us_per_token=watch.ns / 1e3 / (rows * outputs))


if __name__ == "__main__":
    main(Lines())
