"""The engine of offline generation: the engine core and the processing of its outputs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.progress import Progress

from swell.cluster.client.requests.merged_outputs import MergedOutputs
from swell.cluster.client.requests.output_processor import OutputProcessor
from swell.cluster.client.requests.outputs import RequestOutput, RequestOutputKind
from swell.cluster.text.model_check import check
from swell.cluster.text.prompt.input_processor import ProcessedRequest
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.configs.schema import Config, load
from swell.configs.section import ConfigError
from swell.configs.sleep_check import sleep_refusal
from swell.engine.core import EngineCore
from swell.engine.executor import ExecutorError, build_executor
from swell.worker.memory.new_weights import save_weights, with_weights_of

_CLIENT = b"local"
_KIND = RequestOutputKind.FINAL_ONLY


def load_local(source: str, overrides: Mapping[str, object], user: str) -> Config:
    """Returns the configuration of the one engine in this process that `user` runs, with checked
    files. Raises ConfigError."""
    config = load(source, {"parallel.executor": "inproc", **overrides})
    check(config)
    if config.parallel.expert:
        raise ConfigError(
            f"parallel.expert=true is not supported by {user}, which is one engine with all "
            "experts: only engines of a cluster share experts; set parallel.expert=false",
            "parallel.expert",
        )
    return config


class LocalEngine:
    """Runs lists of requests, one list at a time. Not thread-safe."""

    def __init__(self, config: Config, detokenizer: Detokenizer) -> None:
        """Loads the model."""
        self._config = config
        executor = build_executor(config)
        self.limits = executor.start()
        self.core = EngineCore(config, executor, self.limits)
        self.processor = OutputProcessor(detokenizer)
        self._detokenizer = detokenizer
        self._clean = True
        """Nothing is left of an earlier call."""
        self._folders: list[tempfile.TemporaryDirectory[str]] = []
        """Folders of weights that were given as tensors: they are read again after a sleep."""

    @property
    def sleep_level(self) -> int:
        """The sleep level; 0: awake."""
        return self.core.memory.sleep_level

    def set_sleep(self, level: int) -> None:
        """Sleeps at this level or deeper, or wakes up with level 0. Raises ValueError if engines of
        this configuration cannot sleep so deeply, or if weights cannot be read."""
        if level and (refusal := sleep_refusal(self._config, level)):
            raise ValueError(refusal)
        if not level or level > self.core.memory.sleep_level:
            self._change_workers(lambda: self.core.memory.set_sleep(level))

    def update_weights(self, source: str | Path | Mapping[str, Any]) -> None:
        """Uses other weights; see `LLM.update_weights`."""
        if refusal := sleep_refusal(self._config, 2):
            raise ValueError(
                "the weights cannot be replaced, for the same reason as a sleep at "
                f"level 2 is refused: {refusal}"
            )
        try:
            if isinstance(source, Mapping):
                folder = tempfile.TemporaryDirectory(prefix="swell-weights-")
                self._folders.append(folder)
                save_weights(source, self._config.model, Path(folder.name))
                source = folder.name
            path = str(Path(source).absolute())
            check(with_weights_of(self._config, path))
            self._change_workers(lambda: self.core.memory.update_weights(path))
        finally:
            self._remove_folders(self.core.memory.weight_folders)

    def reset_prefix_cache(self) -> None:
        """Lets later calls compute their whole prompts again."""
        if not self._clean:
            self._reset()
        self.core.scheduler.kv.reset_prefix_cache()

    def _change_workers(self, change: Callable[[], object]) -> None:
        """Runs a change of the workers. If it is interrupted, their state is unknown: the next call
        resets."""
        clean, self._clean = self._clean, False
        try:
            change()
            self._clean = clean
        except ValueError:  # the change is refused, and nothing has changed
            self._clean = clean
            raise
        finally:
            self._remove_folders(self.core.memory.weight_folders)

    def close(self) -> None:
        """Stops the workers; may be called twice."""
        self.core.shutdown()
        self._remove_folders(())

    def _remove_folders(self, in_use: Collection[str]) -> None:
        for folder in [one for one in self._folders if one.name not in in_use]:
            self._folders.remove(folder)
            folder.cleanup()

    def run(self, processed: Sequence[ProcessedRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Runs all requests, each with one prompt and an id of its own: each one is completed, or
        dropped after an error. Raises RuntimeError while the engine sleeps."""
        if level := self.core.memory.sleep_level:
            raise RuntimeError(f"the engine sleeps at level {level}; call wake_up() first")
        if not self._clean:  # an interrupt came while the last call was cleaning up
            self._reset()
        with Progress(disable=not use_tqdm, transient=False) as progress:
            bar = progress.add_task("answers", total=len(processed))
            try:
                self._clean = False
                answers: dict[str, RequestOutput] = {}
                merged = {_id_of(one): self._submit(one) for one in processed}
                while self.core.has_work:
                    for outputs in self.core.step().values():
                        done = self.processor.process_outputs(outputs)
                        if done.reqs_to_abort:
                            self.core.abort_requests([s.request_id for s in done.reqs_to_abort])
                        for state in done.finished:
                            id = state.external_id
                            self._take_answer(id, merged[id], answers)
                            progress.update(bar, completed=len(answers))
                self._clean = True
            except BaseException:
                # Workers that have stopped cannot be reset: the next call raises that.
                with suppress(ExecutorError):
                    self._reset()
                raise
        return [answers[id] for id in merged]

    def _submit(self, processed: ProcessedRequest) -> MergedOutputs:
        (prompt,) = processed.prompt_texts
        states = []
        for index, one in enumerate(processed.requests):
            states.append(
                self.processor.add_request(
                    one,
                    processed.params,
                    kind=_KIND,
                    index=index,
                    prompt=prompt,
                    text_start=processed.text_start,
                )
            )
            refused = self.core.add_request(one, _CLIENT)
            assert refused is None, refused
        return MergedOutputs(states, processed.params, _KIND)

    def _take_answer(
        self, id: str, outputs: MergedOutputs, answers: dict[str, RequestOutput]
    ) -> None:
        """Takes the answer to one prompt if it is complete. If one child fails, its output is the
        answer, and the other children are aborted."""
        for _, output in outputs.take():
            answers[id] = output
        if outputs.failed_output is not None and id not in answers:
            answers[id] = outputs.failed_output
            states = self.processor.request_states.values()
            ids = [state.request_id for state in states if state.external_id == id]
            self.processor.abort_requests(ids)
            self.core.abort_requests(ids)

    def _reset(self) -> None:
        """Resets the engine, with an empty cache. An interrupt may have come between any two lines,
        so no state of requests can be trusted. It may also come here."""
        self._clean = False
        self.processor = OutputProcessor(self._detokenizer)
        self.core.reset()
        self._clean = True


def _id_of(processed: ProcessedRequest) -> str:
    return str(processed.requests[0].external_req_id)
