"""The oracle of `test_lm_eval.py`, which runs in an environment with torch: reads [[context,
continuation], ...] from stdin, texts for nano, and writes the total log likelihood that
transformers computes for each continuation."""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
sums = []
with torch.inference_mode():
    for context, continuation in json.load(sys.stdin):
        before = tokenizer.encode(context, add_special_tokens=False)
        ids = tokenizer.encode(context + continuation, add_special_tokens=False)
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)  # [tokens, vocabulary]
        sums.append(sum(float(logprobs[at - 1, ids[at]]) for at in range(len(before), len(ids))))
json.dump(sums, sys.stdout)
