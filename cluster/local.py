"""The whole building in one process, without Ray and without sockets: offline generation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.progress import Progress

from swell.cluster.detokenizer import Detokenizer
from swell.cluster.output_processor import OutputProcessor
from swell.cluster.outputs import CompletionOutput, RequestOutput, RequestOutputKind
from swell.cluster.parallel import ParentRequest, children
from swell.cluster.params import SamplingParams, to_core_request
from swell.cluster.preflight import check
from swell.cluster.prompt import PromptProcessor, end_token_ids, load_tokenizer
from swell.cluster.structured import compile_grammar
from swell.cluster.validate import validate
from swell.cluster.words import bad_word_tokens
from swell.configs.process import prepare_for_torch
from swell.configs.schema import load
from swell.engine.core import EngineCore
from swell.engine.executor import build_executor
from swell.engine.wire import EngineCoreRequest

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_CLIENT = b"local"
_KIND = RequestOutputKind.FINAL_ONLY

prepare_for_torch()


class LLM:
    """One engine in this process.

    `model` is a model folder, a hub id or a YAML file of ours; the overrides are the keys of
    `--set`: `LLM("folder", **{"cache.prefix_caching": False})`. Use it as a context manager, or
    call `close`, to give its memory back. Not thread-safe.
    """

    def __init__(self, model: str, **overrides: Any) -> None:
        overrides.setdefault("parallel.executor", "inproc")
        self.config = load(model, overrides)
        check(self.config)
        path = self.config.model.path
        tokenizer = load_tokenizer(path)
        self._ends = end_token_ids(path, tokenizer)
        executor = build_executor(self.config)
        limits = executor.start()
        self._core = EngineCore(self.config, executor, limits)
        self._prompts = PromptProcessor(
            tokenizer, limits.max_model_len, limits.vocab_size, self.config.model.served_name
        )
        self._processor = OutputProcessor(Detokenizer(tokenizer))
        self._ids = itertools.count()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer every prompt: strings or lists of token ids, in the order given.

        One `SamplingParams` for all, or one for each. Raises BadRequest (a ValueError) for what
        cannot be answered, before anything is computed.
        """
        if not isinstance(prompts, str):
            prompts = [p if isinstance(p, str | int) else list(p) for p in prompts]  # type: ignore[assignment]
        return self._run(self._prompts.completion_prompts(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Iterable[Any] = [messages] if one else messages
        prompts = [
            self._prompts.chat_prompt(self._prompts.chat_messages(talk)) for talk in conversations
        ]
        return self._run(prompts, sampling_params, use_tqdm)

    def check_idle(self) -> None:
        """Raise AssertionError unless every block and slot of the engine is free."""
        self._core.check_idle()

    def close(self) -> None:
        """End the workers and give their memory back; may be called twice."""
        self._core.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_core"):
            self.close()

    def _run(
        self,
        prompts: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        parents = self._submit(prompts, _spread(sampling_params, len(prompts)))
        answers: dict[str, RequestOutput] = {}
        with Progress(disable=not use_tqdm, transient=False) as progress:
            bar = progress.add_task("answers", total=len(parents))
            try:
                while self._core.has_work:
                    for outputs in self._core.step().values():
                        done = self._processor.process_outputs(outputs)
                        self._core.abort_requests(done.reqs_to_abort)
                        for output in done.request_outputs:
                            self._gather(parents, output, answers)
                        progress.update(bar, completed=len(answers))
            except BaseException:
                self._abandon()
                raise
        return [answers[external_id] for external_id in parents]

    def _submit(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> dict[str, ParentRequest]:
        """Check everything, then queue everything; answers by external id, in the order of the
        prompts."""
        parents: dict[str, ParentRequest] = {}
        requests: list[tuple[EngineCoreRequest, SamplingParams, int]] = []
        for prompt, wish in zip(prompts, params, strict=True):
            external_id = str(next(self._ids))
            requests += self._requests(external_id, prompt, wish)
            parents[external_id] = ParentRequest(wish, _KIND)
        for request, wish, index in requests:
            self._processor.add_request(request, wish, kind=_KIND, index=index)
            refused = self._core.add_request(request, _CLIENT)
            assert refused is None, refused
        return parents

    def _requests(
        self, external_id: str, prompt: list[int], wish: SamplingParams
    ) -> Iterator[tuple[EngineCoreRequest, SamplingParams, int]]:
        """One for each answer that is to be drawn, with its index."""
        validate(wish, vocab_size=self._prompts.vocab_size)
        max_tokens = self._prompts.resolve_max_tokens(
            len(prompt), wish.max_tokens, min_tokens=wish.min_tokens
        )
        bad_words = bad_word_tokens(self._prompts.tokenizer, wish.bad_words)
        form = wish.structured_outputs
        grammar = None if form is None else compile_grammar(form)
        for index, child in enumerate(children(wish)):
            request = to_core_request(
                child,
                external_req_id=external_id,
                prompt_token_ids=prompt,
                max_tokens=max_tokens,
                eos_token_ids=self._ends,
                bad_words=bad_words,
                grammar=grammar,
            )
            yield request, child, index

    def _gather(
        self,
        parents: Mapping[str, ParentRequest],
        output: RequestOutput,
        answers: dict[str, RequestOutput],
    ) -> None:
        """Children become answers. Of a failed answer the other children end with it."""
        external_id = output.request_id
        answer = parents[external_id].add(output)
        if answer is not None:
            answers[external_id] = answer
            left = self._processor.abort_requests([external_id], internal=False)
            self._core.abort_requests(left)

    def _abandon(self) -> None:
        """Forget unfinished requests, so that the next call starts clean."""
        left = list(self._processor.request_states)
        self._core.abort_requests(self._processor.abort_requests(left, internal=True))
        while self._core.has_work:
            self._core.step()


def _spread(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling params for {count} prompts; give one or {count}")
    return list(params)
