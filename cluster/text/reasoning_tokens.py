"""How many tokens of an answer are reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from swell.cluster.text.input_processor import InputProcessor
from swell.cluster.text.offload import OffloadPools
from swell.cluster.text.sampling_params import BadRequest
from swell.cluster.text.truncation import TEMPLATE_TEXT


class ReasoningTokens:
    """Counts tokens of reasoning by its text."""

    def __init__(self, processor: InputProcessor, offloads: OffloadPools) -> None:
        self._processor = processor
        self._offloads = offloads

    def reasoning_tokens(self, texts: Sequence[str], most: int) -> int:
        """The tokens of the reasoning of answers that have `most` tokens: the texts are counted
        anew, which may take long. Written otherwise than the model did, they may have more."""
        count = 0
        for text in texts:
            try:
                if text:
                    count += len(self._processor.tokenize([text], TEMPLATE_TEXT)[0])
            except BadRequest:  # it would not fit
                return most
        return min(count, most)

    async def reasoning_tokens_offloaded(self, texts: Sequence[str], most: int) -> int:
        """The same without delay for other requests."""
        size = sum(map(len, texts))
        return await self._offloads.bodies.run_sized(size, self.reasoning_tokens, texts, most)
