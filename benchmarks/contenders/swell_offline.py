"""Our engine in one process: `MODEL ROWS INPUT_TOKENS OUTPUT_TOKENS`, and one batch each time."""

import random
import sys
import time

from lines import Lines


def main(lines):
    from swell.cluster.local import LLM, SamplingParams

    model, (rows, inputs, outputs) = sys.argv[1], map(int, sys.argv[2:])
    overrides = {
        "scheduler.max_rows": rows,
        "cache.prefix_caching": False,
        "model.max_model_len": 2048,
    }
    with LLM(model, **overrides) as llm:
        rng = random.Random(0)
        prompts = [[rng.randrange(1000, 30_000) for _ in range(inputs)] for _ in range(rows)]
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        lines.tell(ready=True)
        for _ in lines:
            started = time.perf_counter()
            answers = llm.generate(prompts, params)
            seconds = time.perf_counter() - started
            tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
            lines.tell(tokens_per_s=tokens / seconds)


if __name__ == "__main__":
    main(Lines())
