"""Offline inference: one engine in this process, without Ray and without sockets."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput
from swell.cluster.client.requests.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    cosines,
    vector_of,
)
from swell.cluster.local_engine import LocalEngine, load_local
from swell.cluster.text.adapters import LoadedAdapters
from swell.cluster.text.errors import bad_value
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.prompt.chat_template import TemplateOptions
from swell.cluster.text.prompt.generation_request import (
    Conversation,
    GenerationRequest,
    Prompt,
    split_prompts,
)
from swell.cluster.text.prompt.input_processor import InputProcessor, ProcessedRequest
from swell.cluster.text.prompt.pooling_processor import (
    Input,
    PoolingProcessor,
    PoolingRequest,
    generation_refusal,
    load_pooling,
    pooling_refusal,
)
from swell.cluster.text.prompt.prompt_embeds import EmbedsPrompts, load_embeds_width
from swell.cluster.text.prompt.prompt_processor import PromptProcessor
from swell.cluster.text.prompt.truncation import TEMPLATE_TEXT, TokenizeOptions, Truncation
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.cluster.text.tokens.generation_config import read_generation_config
from swell.cluster.text.tokens.tokenizer import load_eos_token_ids, load_tokenizer
from swell.configs.files.adapter_files import adapters_of, check_adapter
from swell.configs.lora import Adapter
from swell.configs.runtime.process import prepare_for_torch

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

prepare_for_torch()


class LLM:
    """One engine in this process.

    `model` is a model folder, a GGUF file, a hub id or a YAML file. The overrides are the keys of
    `--set`: `LLM("folder", **{"cache.prefix_caching": False})`. Use it as a context manager, or
    call `close`, to free its memory. Not thread-safe.
    """

    def __init__(self, model: str, **overrides: Any) -> None:
        self.config = load_local(model, overrides, "LLM")
        path = self.config.model.path
        self._defaults = read_generation_config(self.config.model)
        self._tokenizer = tokenizer = load_tokenizer(path)
        detokenizer = Detokenizer(tokenizer)
        self._engine = LocalEngine(self.config, detokenizer)
        limits = self._engine.limits
        pooling = load_pooling(self.config.model)
        self._prompts = PromptProcessor(
            tokenizer,
            limits.max_model_len,
            limits.vocab_size,
            self.config.model.served_name,
            min_answer_tokens=1 if pooling is None else 0,
            special_tokens_in_text=self.config.model.special_tokens_in_text,
        )
        self._pooling = None if pooling is None else PoolingProcessor(self._prompts, pooling)
        self._input_processor = InputProcessor(
            self._prompts,
            detokenizer,
            load_eos_token_ids(path, tokenizer),
            embeds_width=load_embeds_width(self.config.model),
            routed_experts=self.config.model.routed_experts,
            logprobs_mode=self.config.model.logprobs_mode,
            schema_keywords=self.config.serve.schema_keywords,
        )
        self._ids = map(str, itertools.count())
        self._adapters = adapters_of(self.config.lora)
        self._loaded = LoadedAdapters(self.config.lora, self.config.model.served_name)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | EmbedsPrompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str] = "",
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generates a completion for every prompt: strings, lists of token ids or embeddings
        (`read_prompt_embeds`). The outputs have the order of the prompts.

        `sampling_params` is one `SamplingParams` for all prompts, or a list with one for each. The
        same holds for `adapter`: a name from `lora.adapters` or `load_adapter`, or empty for the
        base model. Raises BadRequest (a ValueError) for invalid requests, before anything is
        computed.
        """
        each: list[dict[str, Any]] = (
            [{"prompt": [], "embeds": [one]} for one in prompts]
            if isinstance(prompts, EmbedsPrompts)
            else [{"prompt": [one]} for one in _inputs_of(prompts)]
        )
        requests = [
            GenerationRequest(
                **given,
                params=params,
                prompt_field=field,
                adapter=self._adapter(name),
                external_req_id=next(self._ids),
            )
            for given, params, field, name in zip(
                each,
                self._params(sampling_params, len(each)),
                _fields_of(len(each)),
                _each_of("adapters", adapter, str, len(each)),
                strict=True,
            )
        ]
        return self._engine.run(self._process(requests), use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        continue_final_message: bool = False,
        adapter: str = "",
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generates a response to one conversation, or to each of several. With
        `continue_final_message` the output continues the last message. `adapter`: as in `generate`,
        for all conversations."""
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
                adapter=self._adapter(adapter),
                external_req_id=next(self._ids),
            )
            for turns, params in zip(
                conversations, self._params(sampling_params, len(conversations)), strict=True
            )
        ]
        return self._engine.run(self._process(requests), use_tqdm)

    def embed(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingRequestOutput]:
        """Returns the embedding of every prompt (strings or lists of token ids) in the same order.
        Raises BadRequest (a ValueError) for prompts that cannot be embedded, and for other
        models."""
        inputs = _inputs_of(prompts)
        request = PoolingRequest(
            task="embed",
            inputs=inputs,
            fields=_fields_of(len(inputs)),
            activates=normalize,
            dimensions=dimensions,
            prompt_name=prompt_name,
            tokenize_options=_cut_to(truncate_prompt_tokens),
        )
        return [
            EmbeddingRequestOutput(outputs=EmbeddingOutput(vector_of(one)), **_common(one))
            for one in self._pool(request, use_tqdm)
        ]

    def classify(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[ClassificationRequestOutput]:
        """Returns the class probabilities of every prompt; prompts as in `embed`."""
        inputs = _inputs_of(prompts)
        request = PoolingRequest(
            task="classify",
            inputs=inputs,
            fields=_fields_of(len(inputs)),
            tokenize_options=_cut_to(truncate_prompt_tokens),
        )
        return [
            ClassificationRequestOutput(
                outputs=ClassificationOutput(vector_of(one)), **_common(one)
            )
            for one in self._pool(request, use_tqdm)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[ScoringRequestOutput]:
        """Returns the score of each pair: one text with each of `data_2`, or two lists of equal
        length. For an embedding model the score is the cosine of both embeddings."""
        firsts = [data_1] if isinstance(data_1, str) else list(data_1)
        seconds = [data_2] if isinstance(data_2, str) else list(data_2)
        if not seconds or len(firsts) not in (1, len(seconds)):
            raise ValueError(
                f"data_1 has {len(firsts)} texts and data_2 has {len(seconds)}; pass "
                "one text in data_1, or the same number as in data_2"
            )
        embeds = self._pooling is not None and self._pooling.spec.embeds
        pairs = list(zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True))
        inputs: Sequence[Input] = [*firsts, *seconds] if embeds else pairs
        request = PoolingRequest(
            task="score",
            inputs=inputs,
            fields=_fields_of(len(inputs)),
            tokenize_options=_cut_to(truncate_prompt_tokens),
        )
        answers = self._pool(request, use_tqdm)
        vectors = [vector_of(answer) for answer in answers]
        scores = cosines(vectors, len(firsts)) if embeds else [vector[0] for vector in vectors]
        return [
            ScoringRequestOutput(outputs=ScoringOutput(score), **_common(answer))
            for score, answer in zip(scores, answers[-len(seconds) :], strict=True)
        ]

    def load_adapter(self, name: str, folder: str) -> None:
        """Loads the adapter of a folder under this name, replacing one with the same name. Its
        weights are loaded at the first use. Needs `lora.enabled`. Raises ValueError."""
        path = str(Path(folder).absolute())
        adapter = check_adapter(name, path, self.config.lora.max_rank)
        self._loaded.load(adapter, in_place=True)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter of `load_adapter`. Raises ValueError."""
        self._loaded.unload(name)

    def sleep(self, level: int = 1) -> None:
        """Frees memory until `wake_up`. Level 1 frees the KV cache and on a GPU moves the weights
        to host memory. Level 2 also drops the weights, which `wake_up` reads again. Raises
        ValueError if the configuration does not support that."""
        if level not in (1, 2):
            raise ValueError(f"level={level!r} must be 1 or 2")
        self._engine.set_sleep(level)

    def wake_up(self) -> None:
        """Undoes `sleep`; outputs are the same as before. Raises ValueError if the weights of
        `update_weights` turn out to be wrong; the previous ones are then used."""
        self._engine.set_sleep(0)

    def is_sleeping(self) -> bool:
        return self._engine.sleep_level > 0

    def update_weights(self, source: str | Path | Mapping[str, Any]) -> None:
        """Uses other weights of the same model from now on: those of a folder, or all tensors of a
        checkpoint by name. Clears the KV cache. While the engine sleeps, `wake_up` reads the
        weights. Raises ValueError for weights that cannot be used; the previous ones then stay."""
        self._engine.update_weights(source)

    def reset_prefix_cache(self) -> None:
        """Lets later calls compute their whole prompts again, without blocks of earlier ones."""
        self._engine.reset_prefix_cache()

    def _adapter(self, name: str) -> Adapter | None:
        if not name:
            return None
        known = {**self._adapters, **{one.name: one for one in self._loaded.all}}
        if name not in known:
            names = ", ".join(map(repr, known)) or "none"
            raise bad_value("adapter", name, f"is not loaded; loaded: {names}")
        return known[name]

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer of the model, as transformers loads it."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of a call without `sampling_params`: those of the model's
        generation_config.json, and neutral values for the rest. Given `SamplingParams` are used as
        they are, as in vLLM."""
        return self._defaults.sampling_params()

    def check_idle(self) -> None:
        """Raises AssertionError unless all blocks and slots of the engine are free."""
        self._engine.core.check_idle()

    def close(self) -> None:
        """Stops the workers and frees their memory; may be called twice."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self.close()

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        """Returns the parameters of each prompt."""
        if params is None:
            params = self.get_default_sampling_params()
        return _each_of("sampling params", params, SamplingParams, count)

    def _process(self, requests: Sequence[GenerationRequest]) -> list[ProcessedRequest]:
        """Checks and processes all requests."""
        if self._pooling is not None:
            raise generation_refusal(self._pooling.spec)
        return [self._input_processor.process(request) for request in requests]

    def _pool(self, request: PoolingRequest, use_tqdm: bool) -> list[RequestOutput]:
        """Returns one output for each input."""
        if self._pooling is None:
            raise pooling_refusal()
        whole = self._pooling.process(request)
        each = [
            replace(
                whole,
                requests=[replace(one, external_req_id=next(self._ids))],
                prompt_texts=[None],
            )
            for one in whole.requests
        ]
        return self._engine.run(each, use_tqdm)


def _common(output: RequestOutput) -> dict[str, Any]:
    """Returns the fields that all pooling outputs have."""
    return {
        "request_id": output.request_id,
        "prompt_token_ids": output.prompt_token_ids,
        "num_cached_tokens": output.num_cached_tokens,
    }


def _inputs_of(
    prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
) -> list[Prompt]:
    """Returns the prompts, each a text or a list of token ids."""
    if not isinstance(prompts, str):
        prompts = [p if isinstance(p, str | int) else list(p) for p in prompts]  # type: ignore[assignment]
    return split_prompts(prompts)


def _fields_of(count: int) -> list[str]:
    """Returns the names of the prompts in error messages."""
    return [f"prompt[{index}]" for index in range(count)] if count > 1 else ["prompt"]


def _each_of(what: str, given: Any, kind: type, count: int) -> list[Any]:
    """Returns a list of `count` values, from one value of `kind` for all prompts, or from one for
    each."""
    if isinstance(given, kind):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} {what} for {count} prompts; pass one or {count}")
    return list(given)


def _cut_to(tokens: int | None) -> TokenizeOptions:
    truncation = None if tokens is None else Truncation(tokens, "right", reserved_tokens=0)
    return TokenizeOptions(add_special_tokens=True, truncation=truncation)
