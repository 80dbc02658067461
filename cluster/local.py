"""Offline generation: one engine in this process, without Ray and without sockets."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.progress import Progress

from swell.cluster.client.output_processor import OutputProcessor
from swell.cluster.client.outputs import CompletionOutput, RequestOutput, RequestOutputKind
from swell.cluster.client.parallel_sampling import ParentRequest
from swell.cluster.text.chat_template import TemplateOptions
from swell.cluster.text.detokenizer import Detokenizer
from swell.cluster.text.generation_config import read_generation_config
from swell.cluster.text.generation_request import (
    Conversation,
    GenerationRequest,
    split_prompts,
)
from swell.cluster.text.input_processor import InputProcessor, RequestParams
from swell.cluster.text.model_folder import check
from swell.cluster.text.prompts import PromptProcessor
from swell.cluster.text.sampling_params import SamplingParams
from swell.cluster.text.tokenizer import load_eos_token_ids, load_tokenizer
from swell.cluster.text.truncation import TEMPLATE_TEXT
from swell.configs.process import prepare_for_torch
from swell.configs.schema import load
from swell.engine.core import EngineCore
from swell.engine.executor import ExecutorError, build_executor

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
        self._defaults = read_generation_config(self.config.model)
        tokenizer = load_tokenizer(path)
        executor = build_executor(self.config)
        limits = executor.start()
        self._core = EngineCore(self.config, executor, limits)
        self._prompts = PromptProcessor(
            tokenizer, limits.max_model_len, limits.vocab_size, self.config.model.served_name
        )
        self._detokenizer = Detokenizer(tokenizer)
        self._input_processor = InputProcessor(
            self._prompts, self._detokenizer, load_eos_token_ids(path, tokenizer)
        )
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
        each = split_prompts(prompts)
        fields = [f"prompt[{index}]" for index in range(len(each))] if len(each) > 1 else ["prompt"]
        requests = [
            GenerationRequest(prompt=[prompt], params=params, prompt_field=field)
            for prompt, params, field in zip(
                each, self._params(sampling_params, len(each)), fields, strict=True
            )
        ]
        return self._run(requests, use_tqdm)

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
        conversations: Sequence[Any] = [messages] if one else messages
        options = TemplateOptions(
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
        )
        requests = [
            GenerationRequest(
                prompt=Conversation(messages=self._prompts.chat_messages(turns), template=options),
                params=params,
                prompt_field="messages",
                tokenize_options=TEMPLATE_TEXT,
            )
            for turns, params in zip(
                conversations, self._params(sampling_params, len(conversations)), strict=True
            )
        ]
        return self._run(requests, use_tqdm)

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

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        """Those of each prompt."""
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise ValueError(
                f"{len(params)} sampling params for {count} prompts; give one or {count}"
            )
        return list(params)

    def _run(self, requests: Sequence[GenerationRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Check everything, then queue everything; what is queued is answered, or dropped."""
        processed = [self._input_processor.process(request) for request in requests]
        parents = {str(next(self._ids)): ParentRequest(one.params, _KIND) for one in processed}
        if not self._clean:  # the user's interrupt came while the last call was being forgotten
            self._reset()
        with Progress(disable=not use_tqdm, transient=False) as progress:
            bar = progress.add_task("answers", total=len(parents))
            try:
                self._clean = False
                answers: dict[str, RequestOutput] = {}
                for external_id, one in zip(parents, processed, strict=True):
                    self._submit(external_id, one)
                while self._core.has_work:
                    for outputs in self._core.step().values():
                        done = self._processor.process_outputs(outputs)
                        if done.reqs_to_abort:
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

    def _submit(self, external_id: str, request_params: RequestParams) -> None:
        (prompt,) = request_params.prompts
        for child in request_params.children(external_id, prompt):
            self._processor.add_request(
                child.core,
                child.params,
                kind=_KIND,
                index=child.child_index,
                prompt=child.prompt_text,
                text_start=request_params.text_start,
            )
            refused = self._core.add_request(child.core, _CLIENT)
            assert refused is None, refused

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
        """Start again, with an empty cache: an interrupt may have come between any two lines, so
        nothing that was kept about requests can be trusted. It may come here too."""
        self._clean = False
        self._processor = OutputProcessor(self._detokenizer)
        self._core.reset()
        self._clean = True
