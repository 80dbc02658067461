"""The whole building in one process, without Ray and without sockets: offline generation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rich.progress import Progress

from swell.cluster.client.output_processor import OutputProcessor
from swell.cluster.client.outputs import CompletionOutput, RequestOutput, RequestOutputKind
from swell.cluster.client.parallel_sampling import ParentRequest
from swell.cluster.text.bad_words import bad_words_token_ids
from swell.cluster.text.chat_template import TemplateOptions
from swell.cluster.text.child_params import child_sampling_params
from swell.cluster.text.detokenizer import Detokenizer, TextStart
from swell.cluster.text.generation_config import read_generation_config
from swell.cluster.text.model_folder import check
from swell.cluster.text.prompts import PromptProcessor, end_token_ids, load_tokenizer
from swell.cluster.text.sampling_params import SamplingParams, to_core_request
from swell.cluster.text.structured_output import compile_grammar
from swell.cluster.text.validate_params import resolve_prompt_logprobs, validate
from swell.configs.process import prepare_for_torch
from swell.configs.schema import load
from swell.engine.core import EngineCore
from swell.engine.executor import ExecutorError, build_executor
from swell.engine.wire import EngineCoreRequest

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_CLIENT = b"local"
_KIND = RequestOutputKind.FINAL_ONLY


class TokenizedPrompt(NamedTuple):
    """What one prompt was."""

    token_ids: list[int]
    text: str | None
    """As it was given, if it was a text."""
    text_start: TextStart


ChildRequest = tuple[EngineCoreRequest, SamplingParams, int, TokenizedPrompt]
"""The request for one answer, its sampling parameters, its index and its prompt."""

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
        self._defaults = read_generation_config(self.config.model)
        tokenizer = load_tokenizer(path)
        self._eos_token_ids = end_token_ids(path, tokenizer)
        executor = build_executor(self.config)
        limits = executor.start()
        self._core = EngineCore(self.config, executor, limits)
        self._prompts = PromptProcessor(
            tokenizer, limits.max_model_len, limits.vocab_size, self.config.model.served_name
        )
        self._detokenizer = Detokenizer(tokenizer)
        self._processor = OutputProcessor(self._detokenizer)
        self._ids = itertools.count()
        self._clean = True
        """Nothing is left of an earlier call."""

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
        tokenized = [
            TokenizedPrompt(ids, text if isinstance(text, str) else None, TextStart.CONTINUATION)
            for ids, text in zip(
                self._prompts.completion_prompts(prompts), self._prompts.split(prompts), strict=True
            )
        ]
        return self._run(tokenized, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        continue_final_message: bool = False,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; with `continue_final_message` the answer
        goes on with the last message."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Iterable[Any] = [messages] if one else messages
        options = TemplateOptions(
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
        )
        prompts = [
            self._prompts.chat_prompt(self._prompts.chat_messages(talk), options)
            for talk in conversations
        ]
        text_start = TextStart.CONTINUATION if continue_final_message else TextStart.NEW_TEXT
        tokenized = [TokenizedPrompt(ids, None, text_start) for ids in prompts]
        return self._run(tokenized, sampling_params, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of a call without `sampling_params`: what the model's generation_config.json says,
        and else neutral. A `SamplingParams` that is given is taken as it is, as in vLLM."""
        return self._defaults.sampling_params()

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
        prompts: list[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Check everything, then queue everything; what is queued is answered, or forgotten."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        parents: dict[str, ParentRequest] = {}
        requests: list[ChildRequest] = []
        for prompt, params in zip(
            prompts, _params_per_prompt(sampling_params, len(prompts)), strict=True
        ):
            external_id = str(next(self._ids))
            requests += self._requests(external_id, prompt, params)
            parents[external_id] = ParentRequest(params, _KIND)
        if not self._clean:  # the user's interrupt came while the last call was being forgotten
            self._reset()
        with Progress(disable=not use_tqdm, transient=False) as progress:
            bar = progress.add_task("answers", total=len(parents))
            try:
                self._clean = False
                answers: dict[str, RequestOutput] = {}
                self._submit(requests)
                while self._core.has_work:
                    for outputs in self._core.step().values():
                        done = self._processor.process_outputs(outputs)
                        self._core.abort_requests([s.request_id for s in done.reqs_to_abort])
                        for output in done.request_outputs:
                            self._collect_output(parents, output, answers)
                        progress.update(bar, completed=len(answers))
                self._clean = True
            except BaseException:
                # Workers that have ended cannot begin anew, which the next call says.
                with suppress(ExecutorError):
                    self._reset()
                raise
        return [answers[external_id] for external_id in parents]

    def _submit(self, requests: Sequence[ChildRequest]) -> None:
        for request, params, index, tokenized in requests:
            text_start = (
                tokenized.text_start if params.structured_outputs is None else TextStart.VERBATIM
            )
            self._processor.add_request(
                request,
                params,
                kind=_KIND,
                index=index,
                prompt=tokenized.text,
                text_start=text_start,
            )
            refused = self._core.add_request(request, _CLIENT)
            assert refused is None, refused

    def _requests(
        self, external_id: str, prompt: TokenizedPrompt, params: SamplingParams
    ) -> Iterator[ChildRequest]:
        """One for each answer that is to be drawn, with its index."""
        validate(params, vocab_size=self._prompts.vocab_size)
        params = resolve_prompt_logprobs(params, len(prompt.token_ids), self._prompts.vocab_size)
        max_tokens = self._prompts.resolve_max_tokens(
            len(prompt.token_ids), params.max_tokens, min_tokens=params.min_tokens
        )
        bad_words = bad_words_token_ids(
            self._prompts.tokenizer, params.bad_words, vocab_size=self._prompts.vocab_size
        )
        form = params.structured_outputs
        grammar = None if form is None else compile_grammar(form)
        for index, child in enumerate(child_sampling_params(params)):
            request = to_core_request(
                child,
                external_req_id=external_id,
                prompt_token_ids=prompt.token_ids,
                max_tokens=max_tokens,
                eos_token_ids=self._eos_token_ids,
                bad_words=bad_words,
                grammar=grammar,
            )
            yield request, child, index, prompt

    def _collect_output(
        self,
        parents: Mapping[str, ParentRequest],
        output: RequestOutput,
        answers: dict[str, RequestOutput],
    ) -> None:
        """Children become answers. Of a failed answer the other children end with it."""
        external_id = output.request_id
        answer = parents[external_id].add(output)
        if answer is None:
            return
        answers[external_id] = answer
        if answer.outputs[0].finish_reason == "error":
            states = self._processor.request_states.values()
            ids = [s.request_id for s in states if s.request.external_req_id == external_id]
            self._processor.abort_requests(ids)
            self._core.abort_requests(ids)

    def _reset(self) -> None:
        """Begin anew, with an empty cache: an interrupt may have come between any two lines, so
        nothing that was kept about requests can be trusted. It may come here too."""
        self._clean = False
        self._processor = OutputProcessor(self._detokenizer)
        self._core.reset()
        self._clean = True


def _params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling params for {count} prompts; give one or {count}")
    return list(params)
