"""Runs every model of the zoo in a process of its own, with a deadline."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from swell.configs.runtime.log import first_line
from tests.zoo import check, configs
from tests.zoo import tiny_checkpoint as specimen

DEADLINE_S = 120.0
"""The time limit of one model with one backend; most take a fifth of a second."""
MEMORY_BYTES = 12 << 30
"""The address space of one process."""
IMPORTED = (
    "swell.worker.worker",
    "swell.worker.models.moe",
    "swell.worker.models.generic.causal_lm",
)
MIN_DISTINCT = 5
"""The minimum number of distinct tokens: an oracle whose answers are all alike tests nothing."""


SPLITS: dict[str, dict[str, int]] = {
    "": {},
    "2 stages": {"parallel.pipeline": 2},
    "2 ranks": {"parallel.tensor": 2},
}
"""The settings that split an engine over workers."""


@dataclass(frozen=True)
class Case:
    kind: str
    """The model_type."""
    variant: str
    """See `configs.variants`."""
    backend: str
    split: str = ""
    """See `SPLITS`."""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.kind, self.variant, self.backend, self.split)))


@dataclass(frozen=True)
class Outcome:
    """The result of one case."""

    case: Case
    status: str
    """One of equal, refused, or failed; no model may fail."""
    note: str
    """The reason of a refusal, the error of a failure, otherwise the difference of the answers."""
    architecture: str
    seconds: float


def cases(kinds: Sequence[str], splits: Sequence[str] = ("",)) -> list[Case]:
    """Returns each kind in each variant, with transformers, and natively if its architecture is
    native."""
    from swell.worker.models import NATIVE

    return [
        Case(kind, variant, backend, split)
        for kind in kinds
        for variant in configs.variants(kind)
        for backend in ("transformers", "native")
        for split in splits
        if backend == "transformers" or configs.text_architecture_of(kind) in NATIVE
    ]


def run(case: Case) -> Outcome:
    """Runs a case in this process."""
    with tempfile.TemporaryDirectory() as folder:
        return _run(case, Path(folder))


def _run(case: Case, folder: Path) -> Outcome:
    """Runs a case with its files in `folder`."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    start = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status, note = _try(case, folder)
    except BaseException as error:
        status, note = "failed", _place(error)
    seconds = time.monotonic() - start
    name = configs.architecture(case.kind)
    return Outcome(case, status, note, name, seconds)


def _try(case: Case, folder: Path) -> tuple[str, str]:
    config = configs.shrunk(case.kind, case.variant)
    oracle = specimen.make(folder, config)
    text = config.get_text_config(decoder=True)
    pad = getattr(text, "pad_token_id", None)
    overrides: dict[str, Any] = {"model.backend": case.backend, **SPLITS[case.split]}
    if isinstance(oracle, Exception):
        overrides["model.load_format"] = "dummy"
    try:
        found = check.answers(folder, configs.VOCAB, pad, **overrides)
    except check.RefusedError as refused:
        if not _names_its_cause(str(refused)):
            return "failed", f"refused without saying what: {refused}"
        if isinstance(oracle, Exception) and first_line(oracle) in str(refused):
            return "failed", f"transformers cannot build its config: {first_line(oracle)}"
        return "refused", str(refused).replace(str(folder), "FOLDER")
    if isinstance(oracle, Exception):
        return "failed", f"it is served, but transformers cannot build it: {oracle}"
    difference = check.compare(oracle, found)
    if difference.distinct < MIN_DISTINCT:
        return "failed", f"the oracle has {difference.distinct} answers: nothing is tested"
    note = f"{difference.worst:.2f} of the tolerance at {difference.where}"
    return ("equal" if difference.equal else "failed"), note


def _names_its_cause(text: str) -> bool:
    """Whether a refusal says on one line what is refused, and has another reason than an error of a
    trial run: that is a defect, or its config is not one that a checkpoint has."""
    if "\n" in text or "its forward fails on" in text:
        return False
    return any(w in text for w in ("architecture", "model", "rope", "hidden"))


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({last})"


def run_in_subprocess(case: Case, deadline_s: float = DEADLINE_S) -> Outcome:
    """Runs a case in a child process, which is killed at its deadline. This process removes its
    files, because a killed child does not."""
    with tempfile.TemporaryDirectory() as folder:
        return _run_in_subprocess(case, Path(folder), deadline_s)


def _run_in_subprocess(case: Case, folder: Path, deadline_s: float) -> Outcome:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            with os.fdopen(writer, "w") as pipe:
                json.dump(asdict(_run(case, folder)), pipe)
        finally:
            os._exit(0)
    os.close(writer)
    text, end = b"", time.monotonic() + deadline_s
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        part = os.read(reader, 65536)
        if not part:
            break
        text += part
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    os.waitpid(child, 0)
    if text:
        found = json.loads(text)
        return Outcome(**{**found, "case": case})
    note = f"its process ended without an answer, within {deadline_s:.0f} s"
    return Outcome(case, "failed", note, configs.architecture(case.kind), deadline_s)


def run_all(wanted: Sequence[Case]) -> Iterator[Outcome]:
    # imported once, for all children; a model that ran here would leave threads
    for module in IMPORTED:
        import_module(module)
    whole: dict[Case, str] = {}
    for case in wanted:
        alone = replace(case, split="")
        if whole.get(alone, "equal") != "equal":
            continue  # what one worker cannot serve, several cannot either
        outcome = run_in_subprocess(case)
        whole[case] = outcome.status
        yield outcome
