"""The oracle of the logits processors, which computes a request's logits one number at a time.

Every operation is rounded to float32, so the processors must agree to the last bit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch

from swell.kernels.sample import sample_tokens, uniform_noise
from swell.worker.sample.allowed_token_ids import NOT_ALLOWED_LOGIT
from swell.worker.sample.logits_processor import BANNED_BIAS
from swell.worker.sampler_wire import SamplerParams
from swell.worker.wire import NewRequest


@dataclass
class ReferenceRow:
    """One request."""

    params: SamplerParams
    prompt: list[int]
    outputs: list[int] = field(default_factory=list)
    min_tokens: int = 0
    ends: list[int] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        return self.prompt + self.outputs

    def new_request(self, slot: int) -> NewRequest:
        """Returns the message that puts the request into a slot, with its outputs so far."""
        return NewRequest(
            slot,
            self.known,
            len(self.prompt),
            [],
            self.params,
            min_tokens=self.min_tokens,
            end_token_ids=self.ends,
        )

    def logits(self, logits: list[float]) -> list[float]:
        """Returns the model's logits after all processors."""
        out = [self._penalized(token, np.float32(x)) for token, x in enumerate(logits)]
        for token, bias in self.params.logit_bias.items():
            out[token] += np.float32(bias)
        for token in [*self._early_ends(), *self._completions()]:
            out[token] += np.float32(BANNED_BIAS)
        allowed = self.params.allowed_token_ids
        if allowed:
            rest = np.float32(NOT_ALLOWED_LOGIT)
            out = [x if token in allowed else rest for token, x in enumerate(out)]
        return [float(x) for x in out]

    def sample(self, logits: list[float]) -> int:
        """Returns the token that is sampled from the result of `logits`. It calls the kernel under
        test, which has its own tests and oracle in tests/kernels/test_sample.py."""
        p = self.params
        token, _ = sample_tokens(
            torch.tensor([logits]),
            torch.tensor([p.temperature]),
            torch.tensor([p.top_k]),
            torch.tensor([p.top_p]),
            torch.tensor([p.min_p]),
            uniform_noise(torch.tensor([p.seed]), torch.tensor([len(self.known)])),
        )
        return int(token.item())

    def _penalized(self, token: int, logit: np.float32) -> np.float32:
        p, count = self.params, Counter(self.outputs)[token]
        if token in self.known:
            factor = np.float32(p.repetition_penalty)
            logit = logit / factor if logit > 0 else logit * factor
        off = np.float32(p.frequency_penalty) * np.float32(count)
        if count > 0:
            off += np.float32(p.presence_penalty)
        return logit - off

    def _early_ends(self) -> list[int]:
        return self.ends if len(self.outputs) < self.min_tokens else []

    def _completions(self) -> list[int]:
        """Returns the last tokens of the bad words whose other tokens are the most recent ones."""
        known = self.known
        return [
            word[-1]
            for word in self.params.bad_words
            if len(word) <= len(known) + 1 and known[len(known) + 1 - len(word) :] == word[:-1]
        ]
