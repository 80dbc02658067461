"""Our engine with long contexts: `MODEL CONTEXT_TOKENS PREFIX_TOKENS`, times in milliseconds."""

import random
import statistics
import sys
import time

from lines import Lines

OUTPUTS = 32
SUFFIX_TOKENS = 32
HITS = 5


class LongContexts:
    """Measurements of one row at a time."""

    def __init__(self, llm):
        from swell.cluster.local import SamplingParams

        self.llm, self.params, self.rng = llm, SamplingParams, random.Random(0)

    def tokens(self, count):
        return [self.rng.randrange(1000, 30_000) for _ in range(count)]

    def ms(self, prompt, outputs):
        """Returns the time from the prompt to the last of `outputs` tokens."""
        params = self.params(temperature=0, max_tokens=outputs, ignore_eos=True)
        started = time.perf_counter()
        self.llm.generate([prompt], params)
        return 1000 * (time.perf_counter() - started)

    def decode_ms(self, context):
        """Returns the time of one token. All others are in the cache, so the prompt takes almost no
        time."""
        prompt = self.tokens(context - OUTPUTS // 2)
        self.ms(prompt, 1)
        pairs = [(self.ms(prompt, 1), self.ms(prompt, 1 + OUTPUTS)) for _ in range(3)]
        return statistics.median(long - short for short, long in pairs) / OUTPUTS

    def prefix_ms(self, length):
        """Returns the times to the first token: with a new prefix, and with one that is in the
        cache."""
        prefix = self.tokens(length)
        miss = self.ms(prefix + self.tokens(SUFFIX_TOKENS), 1)
        hits = [self.ms(prefix + self.tokens(SUFFIX_TOKENS), 1) for _ in range(HITS)]
        return miss, statistics.median(hits)


def main(lines):
    from swell.cluster.local import LLM

    model, (context, prefix) = sys.argv[1], map(int, sys.argv[2:])
    overrides = {"scheduler.max_rows": 4, "model.max_model_len": context + 2 * OUTPUTS}
    with LLM(model, **overrides) as llm:
        contexts = LongContexts(llm)
        contexts.prefix_ms(prefix)
        lines.send(ready=True)
        for _ in lines:
            miss, hit = contexts.prefix_ms(prefix)
            lines.send(decode_ms=contexts.decode_ms(context), miss_ms=miss, hit_ms=hit)


if __name__ == "__main__":
    main(Lines())
