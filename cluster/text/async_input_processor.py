"""`InputProcessor` for an event loop."""

from __future__ import annotations

from collections.abc import Callable

from swell.cluster.text.generation_request import Conversation, GenerationRequest, Prompt
from swell.cluster.text.input_processor import InputProcessor, RequestParams
from swell.cluster.text.offload import OffloadPools
from swell.cluster.text.truncation import TEMPLATE_TEXT, TokenizeOptions


class AsyncInputProcessor:
    """Work that takes long runs in a thread, so that it does not delay the tokens of other
    requests. `size_bytes` is the size of the body as JSON, and of what the body refers to: the work
    grows with it."""

    def __init__(self, processor: InputProcessor, offloads: OffloadPools) -> None:
        self._processor = processor
        self._offloads = offloads

    async def process(
        self, convert: Callable[[], GenerationRequest], size_bytes: int = 0
    ) -> RequestParams:
        """Of what `convert` makes, which may take long too. Raises `BadRequest`."""
        build, compile_grammar = await self._offloads.bodies.run_sized(
            size_bytes, lambda: self._processor.prepare(convert())
        )
        if compile_grammar is None:
            return build(grammar=None)
        return build(grammar=await self._offloads.grammars.run(compile_grammar))

    async def tokenize(
        self,
        convert: Callable[[], tuple[list[Prompt] | Conversation, TokenizeOptions]],
        size_bytes: int = 0,
    ) -> list[int]:
        """The token ids of one prompt, or of a conversation."""
        (token_ids,) = await self._offloads.bodies.run_sized(
            size_bytes, lambda: self._processor.tokenize(*convert())
        )
        return token_ids

    async def count_tokens(self, text: str) -> int:
        """Of a text alone, without special tokens. Raises `BadRequest` if the context is too short
        for it."""
        return len(await self.tokenize(lambda: ([text], TEMPLATE_TEXT), len(text)))
