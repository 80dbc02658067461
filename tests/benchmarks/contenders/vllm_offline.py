"""vLLM in one process: `MODEL ROWS INPUT_TOKENS OUTPUT_TOKENS`, batches by turns."""

import random
import sys

from lines import Lines


def count(answers):
    return sum(len(answer.outputs[0].token_ids) for answer in answers)


def main(lines):
    import vllm

    model, (rows, inputs, outputs) = sys.argv[1], map(int, sys.argv[2:])
    llm = vllm.LLM(model=model, dtype="float32", max_model_len=2048, enable_prefix_caching=False)
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(1000, 30_000) for _ in range(inputs)]}
        for _ in range(rows)
    ]
    params = vllm.SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
    warm = vllm.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate(prompts, warm, use_tqdm=False)
    lines.send(ready=True)
    lines.send_rates(lambda: count(llm.generate(prompts, params, use_tqdm=False)))


if __name__ == "__main__":
    main(Lines())
