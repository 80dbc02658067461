"""Generates answers in this process, without Ray and without HTTP.

    python examples/offline.py [MODEL]

MODEL is a model folder, a GGUF file, a hub id or a YAML file; the default is the small model of
this repository.
"""

import sys
from pathlib import Path

from swell import LLM, SamplingParams

NANO = Path(__file__).parents[1] / "configs" / "models" / "nano"
WORDS = ("kitten", "planet", "garden")


def main(model: str = str(NANO)) -> None:
    conversations = [[{"role": "user", "content": f"reverse: {word}"}] for word in WORDS]
    with LLM(model) as llm:
        answers = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=40))
    for word, answer in zip(WORDS, answers, strict=True):
        print(f"{word}: {answer.outputs[0].text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
