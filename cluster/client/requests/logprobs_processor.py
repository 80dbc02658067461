"""Log probabilities of one request, from engine outputs to the client's table."""

from __future__ import annotations

from swell.cluster.client.requests.outputs import LogprobTable
from swell.cluster.text.tokens.token_texts import TokenTexts
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import Extra, PromptLogprobs, TokenLogprobs


class LogprobsProcessor:
    """Log probabilities that engines sent and that the client has not got yet.

    Values that arrived are kept if the engine is lost. A later attempt computes only those of new
    outputs; if it sends a prompt position again, the first value is kept. Every prompt position is
    known when the first output arrives.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        texts: TokenTexts,
        *,
        skip_special_tokens: bool = True,
        prompt: str | None = None,
    ) -> None:
        """`prompt` is the prompt's text as it was sent, if known."""
        self.cumulative: float | None = None
        """The sum over all outputs; None if output log probabilities were not requested."""
        self._texts = texts
        self._outputs: LogprobTable | None = None
        self._prompt: LogprobTable | None = None
        self._num_prompt_missing = 0
        """Number of prompt positions without a value."""
        if request.sampler.logprobs is not None:
            self._outputs, self.cumulative = LogprobTable(texts), 0.0
        if request.sampler.prompt_logprobs is not None:
            ids = request.prompt_token_ids
            self._num_prompt_missing = len(ids) - 1
            places = texts.offsets(ids, skip_special_tokens, prompt)
            self._prompt = LogprobTable(
                texts, [[i] for i in ids], [[] for _ in ids], [0] * len(ids), *places
            )

    @property
    def prompt_complete(self) -> bool:
        return self._num_prompt_missing == 0

    def split_extras(self, extras: list[Extra], num_tokens: int) -> list[TokenLogprobs]:
        """Stores the log probabilities of the prompt. Returns those of the `num_tokens` outputs,
        one per token, or an empty list if they were not requested. Raises ValueError if the counts
        differ."""
        outputs = []
        for extra in extras:
            if isinstance(extra, PromptLogprobs):
                self._add_prompt(extra)
            elif isinstance(extra, TokenLogprobs):
                outputs.append(extra)
        if self._outputs is None:
            return []
        if len(outputs) != num_tokens:
            raise ValueError(f"an engine returned {num_tokens} tokens but {len(outputs)} logprobs")
        return outputs

    def add(self, token_logprobs: TokenLogprobs, offset: int, *, at_beginning: bool) -> None:
        """Adds the next visible output token, which has `offset` characters of text before it."""
        assert self._outputs is not None and self.cumulative is not None
        self._outputs.append(token_logprobs, offset, at_beginning=at_beginning)
        self.cumulative += token_logprobs.logprobs[0]

    def pop_logprobs(self, *, delta_only: bool) -> LogprobTable | None:
        """Returns those of all outputs; with `delta_only`, those since the last call."""
        outputs = self._outputs
        if outputs is None:
            return None
        if not delta_only:
            return outputs[:]
        self._outputs = LogprobTable(self._texts)
        return outputs

    def pop_prompt_logprobs(self, *, delta_only: bool) -> LogprobTable | None:
        """Returns those of the prompt; with `delta_only`, only at the first call."""
        prompt = self._prompt
        if delta_only:
            self._prompt = None
        return prompt

    def _add_prompt(self, prompt_logprobs: PromptLogprobs) -> None:
        table = self._prompt
        if table is None:
            return
        columns = zip(
            prompt_logprobs.token_ids, prompt_logprobs.logprobs, prompt_logprobs.ranks, strict=True
        )
        for position, (token_ids, logprobs, rank) in enumerate(columns, prompt_logprobs.start):
            if not table.logprobs[position]:
                table.token_ids[position] = token_ids
                table.logprobs[position] = logprobs
                table.ranks[position] = rank
                self._num_prompt_missing -= 1
