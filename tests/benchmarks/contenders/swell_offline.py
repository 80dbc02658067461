"""Our engine in one process: `MODEL ROWS INPUT_TOKENS OUTPUT_TOKENS`, batches by turns."""

import random
import sys

from lines import Lines


def count(answers):
    return sum(len(answer.outputs[0].token_ids) for answer in answers)


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
        lines.send(ready=True)
        lines.send_rates(lambda: count(llm.generate(prompts, params)))


if __name__ == "__main__":
    main(Lines())
