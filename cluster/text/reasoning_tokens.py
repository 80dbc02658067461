"""Counts the tokens of an answer that are reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from swell.cluster.text.params.sampling_params import BadRequest
from swell.cluster.text.prompt.input_processor import InputProcessor
from swell.cluster.text.prompt.thread_offload import OffloadPools
from swell.cluster.text.prompt.truncation import TEMPLATE_TEXT


class ReasoningTokens:
    """Counts reasoning tokens from the reasoning's text."""

    def __init__(self, processor: InputProcessor, offloads: OffloadPools) -> None:
        self._processor = processor
        self._offloads = offloads

    def reasoning_tokens(self, texts: Sequence[str], most: int) -> int:
        """Returns the number of reasoning tokens in answers with `most` tokens. Tokenizes the texts
        again, which may take long, and may yield more tokens than the model wrote: the result is at
        most `most`."""
        count = 0
        for text in texts:
            try:
                if text:
                    count += len(self._processor.tokenize([text], TEMPLATE_TEXT)[0])
            except BadRequest:  # too long for a prompt
                return most
        return min(count, most)

    async def reasoning_tokens_offloaded(self, texts: Sequence[str], most: int) -> int:
        """Counts in the same way without delaying other requests."""
        size = sum(map(len, texts))
        return await self._offloads.bodies.run_sized(size, self.reasoning_tokens, texts, most)
