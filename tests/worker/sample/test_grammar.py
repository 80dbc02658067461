"""An output with a grammar is a sentence of the grammar, for any logits."""

from __future__ import annotations

import json
import re
import sys

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from swell.cluster.text.grammar.structured_output import compile_grammar
from swell.cluster.text.params.sampling_params import StructuredOutputs
from swell.worker.sample import grammar as module
from swell.worker.sample.sampler import Sampler
from swell.worker.sampler_wire import Grammar, SamplerParams
from swell.worker.step.block_tables import BlockTables
from swell.worker.step.failed_rows import FailedRows
from swell.worker.step.input_batch import BatchBuilder, InputBatch
from swell.worker.step.request_states import RequestStates
from swell.worker.wire import NewRequest, SchedulerOutput
from tests.support.paths import NANO
from tests.support.structured_schemas import SCHEMAS

pytestmark = pytest.mark.slow

TOKENIZER = Tokenizer.from_file(str(NANO / "tokenizer.json"))
VOCAB = 320
END = 260
CPU = torch.device("cpu")
ROWS, LENGTH = 16, 12_000
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
PROMPT = [7, 8]
# [VOCAB]: how much a token helps to finish an output, a string, an address, an array, an object or
# a number
CLOSING = torch.zeros(VOCAB)
CLOSING[[END, *b'"@]},']] = torch.tensor([1.0, 1.0, 0.95, 0.9, 0.9, 0.5])


class Answers:
    """A sampler whose logits are noise; sampled tokens are appended to the row's tokens."""

    def __init__(self, model_path: str = str(NANO), vocab: int = VOCAB, eager: float = 15) -> None:
        """`eager`: the number of tokens after which tokens that close a string or an object become
        likely."""
        self.states = RequestStates(ROWS, LENGTH, CPU)
        self.blocks = BlockTables(ROWS, LENGTH, 16, CPU)
        self.failed = FailedRows()
        self.sampler = Sampler(self.states, vocab, model_path, self.failed)
        self.tokens: dict[int, list[int]] = {}
        self.vocab, self.eager = vocab, eager

    def take(
        self, slot: int, lark: str | None, outputs: list[int] | None = None, **overrides
    ) -> None:
        params = {"temperature": 1.5, "seed": slot, **overrides}
        row_fields = {
            key: params.pop(key) for key in ("min_tokens", "end_token_ids") if key in params
        }
        sampler = SamplerParams(**params, grammar=None if lark is None else Grammar(lark))
        known = [*PROMPT, *(outputs or [])]
        row = NewRequest(slot, known, len(PROMPT), [], sampler, **row_fields)
        self.states.stage(row)
        self.sampler.add_request(row)
        self.states.apply()
        self.tokens[slot] = known

    def batch(self, slots: list[int]) -> InputBatch:
        plan = SchedulerOutput(
            0,
            slots=slots,
            starts=[len(self.tokens[slot]) - 1 for slot in slots],
            num_tokens=[1] * len(slots),
            samples=[True] * len(slots),
        )
        return BatchBuilder(self.states, self.blocks, 1024).build(plan)

    def logits(self, slots: list[int]) -> torch.Tensor:
        """Returns noise that depends on slot and position only, so that a row has the same logits
        wherever it continues."""
        rows = []
        for slot in slots:
            length = len(self.tokens[slot])
            generator = torch.Generator().manual_seed(slot * 1_000_003 + length)
            noise = 3 * torch.randn(self.vocab, generator=generator)
            noise[:VOCAB] += CLOSING * min(length / self.eager, 40.0)
            rows.append(noise)
        return torch.stack(rows)

    def step(self, slots: list[int], logits: torch.Tensor | None = None) -> list[int]:
        batch = self.batch(slots)
        sampled = self.sampler(self.logits(slots) if logits is None else logits, batch).tokens
        self.states.write_sampled(batch.sample_slots, batch.sample_positions, sampled)
        for slot, token in zip(slots, sampled.tolist(), strict=True):
            self.tokens[slot].append(token)
        return sampled.tolist()

    def finish(self, slots: list[int]) -> dict[int, str]:
        """Steps until every row has sampled an end token; returns the texts before it."""
        left = list(slots)
        while left:
            assert max(len(self.tokens[slot]) for slot in left) < LENGTH, "no end"
            sampled = self.step(left)
            left = [slot for slot, token in zip(left, sampled, strict=True) if token != END]
        return {slot: text(self.outputs(slot)) for slot in slots}

    def outputs(self, slot: int) -> list[int]:
        return self.tokens[slot][len(PROMPT) :]


def text(outputs: list[int]) -> str:
    """Returns the text of a finished output; special tokens inside it are shown."""
    assert outputs[-1] == END
    return TOKENIZER.decode(outputs[:-1], skip_special_tokens=False)


def lark(**form) -> str:
    return compile_grammar(StructuredOutputs(**form)).lark


def answer(source: str, first_seed: int = 0, **overrides) -> list[str]:
    """Returns one output of each row."""
    answers = Answers()
    for slot in range(ROWS):
        answers.take(slot, source, seed=first_seed + slot, **overrides)
    return list(answers.finish(list(range(ROWS))).values())


@pytest.fixture
def logged_errors(monkeypatch) -> list[str]:
    """Collects the errors of the log."""
    lines: list[str] = []
    monkeypatch.setattr(
        module.StructuredLogger, "error", lambda _, line, **fields: lines.append(line)
    )
    return lines


# ------------------------------------------------------------------------------------- sentences

NAMES = list(SCHEMAS)


@pytest.mark.parametrize("names", [NAMES[i::10] for i in range(10)], ids=lambda names: names[0])
def test_every_answer_is_accepted_by_its_schema(names):
    """Every answer is valid under its schema: each schema twice, in one batch with a row without a
    grammar."""
    answers = Answers()
    rows = dict(enumerate([*names, *names][: ROWS - 1]))
    for slot, name in rows.items():
        answers.take(slot, lark(json=SCHEMAS[name][0]))
    answers.take(ROWS - 1, None)
    assert END not in answers.step([*rows, ROWS - 1])[:-1]
    for slot, written in answers.finish(list(rows)).items():
        schema = SCHEMAS[rows[slot]][0]
        jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(
            json.loads(written)
        )


REGEXES = [
    r"a+b?",
    r"^\d{3}-\d{2,4}$",
    r"(yes|no|maybe) ?(yes|no)?",
    r"[^/]{1,5}/[^/]{1,5}",
    r"\w+\s\w+",
    r"(?i)swell",
    r"(a|ab)(c|bcd)(d*)",
    r'"\\["\\/]"',
    r"[ä-ü]{2}🍀",
    r"x|",
    r".{0,4}",
    r"\x41\u00e9[\]\-^]",
    r"(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3}",
    "line\nbreak\t?",
]


@pytest.mark.parametrize("pattern", REGEXES)
def test_every_answer_matches_its_regex_as_a_whole(pattern):
    for written in answer(lark(regex=pattern)):
        assert re.fullmatch(pattern, written), repr(written)


def test_every_answer_is_one_of_the_choices_and_each_can_be_drawn():
    choices = [
        "a",
        "ab",
        "abc",
        "Grüße",
        "🍀",
        'say "hi"',
        "back\\slash",
        "two\nlines",
        "\x01",
        "<|end|>",
    ]
    sampled = set()
    for seed in range(0, 160, ROWS):
        sampled.update(answer(lark(choice=choices), seed, temperature=30.0))
        assert sampled <= set(choices)
    assert sampled == set(choices)


GRAMMARS = {
    "Lark": """
        start: sum
        sum: product (("+" | "-") product)*
        product: value ("*" value)*
        value: /[1-9][0-9]{0,3}/ | "(" sum ")"
    """,
    "GBNF": r"""
        root ::= sum
        sum ::= product (("+" | "-") product)*   # a comment
        product ::= value ("\x2a" value){0,3}
        value ::= [1-9] [0-9]* | "\u0028" sum ")"
    """,
}


@pytest.mark.parametrize("notation", GRAMMARS)
def test_every_answer_is_a_sentence_of_its_grammar(notation):
    answers = Answers(eager=4)
    ending = torch.zeros(VOCAB)
    ending[[*b")", END]] = 6.0
    for slot in range(ROWS):
        answers.take(slot, lark(grammar=GRAMMARS[notation]))
    left = list(range(ROWS))
    while left:
        sampled = answers.step(left, answers.logits(left) + ending)
        left = [slot for slot, token in zip(left, sampled, strict=True) if token != END]
    for slot in range(ROWS):
        written = text(answers.outputs(slot))
        assert re.fullmatch(r"[-+*()0-9]+", written)
        compile(written, "answer", "eval")


# -------------------------------------------------------------------------------- rows and slots


def test_rows_without_a_grammar_keep_their_logits_bit_for_bit():
    answers = Answers()
    slots = [3, 1, 5]
    answers.take(3, None)
    answers.take(1, lark(json=True))
    answers.take(5, None, allowed_token_ids=[97, 98])
    for _ in range(4):
        logits, batch = answers.logits(slots), answers.batch(slots)
        free = logits.clone()
        tokens = answers.sampler(free, batch).tokens
        assert torch.equal(free[0], logits[0])
        assert torch.equal(free[2, [97, 98]], logits[2, [97, 98]])
        assert torch.isinf(free[1]).any()
        answers.states.write_sampled(batch.sample_slots, batch.sample_positions, tokens)
        for slot, token in zip(slots, tokens.tolist(), strict=True):
            answers.tokens[slot].append(token)


def test_without_grammars_nothing_is_computed(monkeypatch):
    for name in ("load_vocabulary", "_GrammarCompiler", "apply_bitmask", "PendingTokens"):
        monkeypatch.setattr(module, name, None)
    answers = Answers()
    answers.take(0, None)
    answers.step([0])
    answers.step([0])


@pytest.mark.parametrize("name", ["invoice", "tree", "any of with a common prefix", "string"])
def test_a_resumed_answer_equals_an_undisturbed_one(name):
    source = lark(json=SCHEMAS[name][0])
    whole = Answers()
    whole.take(2, source)
    whole.finish([2])
    outputs = whole.outputs(2)
    for known in {0, 1, len(outputs) // 2, len(outputs) - 1}:
        later = Answers()
        later.take(2, source, outputs[:known])
        later.finish([2])
        assert later.outputs(2) == outputs


def test_a_reused_slot_has_no_state_of_its_last_row():
    alone = Answers()
    alone.take(0, lark(choice=["xyz"]))
    alone.finish([0])
    answers = Answers()
    answers.take(0, lark(regex="[ab]{9}"))
    for _ in range(3):
        answers.step([0])
        answers.take(1, lark(json=True))
    answers.take(0, lark(choice=["xyz"]))  # the last token of [ab]{9} has not been read yet
    answers.take(1, None)
    answers.finish([0])
    assert answers.outputs(0) == alone.outputs(0)


def test_rows_that_pause_and_return_are_not_mixed_up():
    """Rows that pause and return are not mixed up: each step samples other rows, as with chunked
    prompts."""
    wanted = {0: "abcabcabc", 1: "123123123", 2: "xyzxyzxyz"}
    answers = Answers()
    for slot, written in wanted.items():
        answers.take(slot, lark(choice=[written]))
    answers.take(3, None)
    for slots in ([0], [2, 0], [3], [1, 0, 3], [3], [2], [0, 1, 2], [1]):
        answers.step(slots)
    assert answers.finish([0, 1, 2]) == wanted


def test_after_an_end_token_only_end_tokens_are_drawn(logged_errors):
    """After the end only end tokens are sampled: a step in flight samples once more for a finished
    request."""
    answers = Answers()
    answers.take(0, lark(choice=["ab"]))
    answers.finish([0])
    assert [answers.step([0]) for _ in range(3)] == [[END]] * 3
    assert logged_errors == []


# ------------------------------------------------------------------------------- contradictions

CONTRADICTIONS = {
    "min_tokens": {"min_tokens": 50, "end_token_ids": [END]},
    "bad_words": {"bad_words": [[ord(c)] for c in "abc"]},
    "allowed_token_ids": {"allowed_token_ids": [120, 121]},
    "logit_bias": {"logit_bias": {ord(c): -100.0 for c in "abc"} | {120: 100.0}},
    "penalties": {"repetition_penalty": 100.0, "frequency_penalty": 2.0, "presence_penalty": 2.0},
    "filters": {"top_k": 1, "top_p": 0.01, "min_p": 0.99},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize("names", [*([name] for name in CONTRADICTIONS), list(CONTRADICTIONS)[:6]])
def test_the_grammar_mask_is_applied_last(names):
    overrides = {key: value for name in names for key, value in CONTRADICTIONS[name].items()}
    written = answer(lark(regex="[abc]{4}"), **overrides)
    assert all(re.fullmatch("[abc]{4}", one) for one in written)


# -------------------------------------------------------------------------- models and failures


@pytest.mark.parametrize("vocab", [321, 352, 400, 1000])
def test_tokens_that_only_the_model_has_are_never_drawn(vocab):
    answers = Answers(vocab=vocab)
    answers.take(0, lark(regex="(?s:.*)"))
    for _ in range(200):
        logits = answers.logits([0])
        logits[:, VOCAB:] += 50.0
        answers.step([0], logits)
    assert max(answers.tokens[0]) < VOCAB


def test_a_model_may_have_fewer_tokens_than_its_tokenizer():
    answers = Answers(vocab=288)
    answers.take(0, lark(regex="[ab]"))
    logits = torch.zeros(1, 288)
    answers.sampler(logits, answers.batch([0]))
    assert np.flatnonzero(torch.isfinite(logits[0])).tolist() == [97, 98]


FAILS = "the output cannot follow its grammar: "


@pytest.mark.parametrize("source", ["start: nothing", "start: /(/", "%json"])
def test_a_grammar_that_does_not_compile_fails_only_its_row(source, logged_errors):
    answers, alone = Answers(), Answers()
    answers.take(0, source)
    for one in (answers, alone):
        one.take(1, lark(choice=["abc"]))
    answers.step([0, 1])
    assert answers.failed.among([1, 0])[1].startswith(FAILS)
    assert answers.finish([1]) == alone.finish([1]) == {1: "abc"}
    answers.step([0])
    assert logged_errors == ["output cannot follow its grammar"]
    answers.take(0, lark(choice=["xyz"]))  # another request takes the slot
    answers.failed.forget(0)
    assert answers.finish([0]) == {0: "xyz"} and not answers.failed.among([0, 1])


@pytest.mark.parametrize("vocab", [97, 98, 258, 260, 261, 288, 289])
@pytest.mark.parametrize("choice", ["a", "b", "\x00"])
def test_tokens_that_only_the_tokenizer_has_do_not_continue_a_grammar(vocab, choice, logged_errors):
    """Tokens that only the tokenizer has do not continue a grammar. A token is a byte and 260 the
    end; the vocabulary may be cut before either, also within the last word of a mask."""
    answers = Answers(vocab=vocab)
    answers.take(0, lark(choice=[choice]), temperature=0.0)
    sampled = []
    for _ in range(2):
        sampled += answers.step([0], torch.zeros(1, vocab))
        if answers.failed.among([0]):
            break
    can = ord(choice) < vocab
    assert (sampled == [ord(choice), END]) == (can and vocab > END)
    if vocab > END:
        assert not answers.failed.among([0])
    else:
        reason = answers.failed.among([0])[0]
        assert (
            reason
            == f"{FAILS}after {int(can)} tokens, none of the model's {vocab} tokens continues or "
            "ends the grammar"
        )
        assert len(sampled) == 1 + can


def test_a_mask_that_fails_midway_fails_its_row(monkeypatch, logged_errors):
    """A mask may exceed its limits midway: the first mask of the grammar is cheap, a later one is
    not."""
    limits = {**module.GRAMMAR_LIMITS, "step_max_items": 8}
    monkeypatch.setattr(module, "GRAMMAR_LIMITS", limits)
    answers = Answers()
    answers.take(0, 'start: "a" (x | y)\nx: "b" x? | z\ny: "b" y? | z\nz: "b" z "c" | "b"')
    answers.take(1, lark(choice=["aaaaaaaaaaaaaaaa"]))
    steps = 0
    while not answers.failed.among([0]) and steps < 12:
        answers.step([0, 1])
        steps += 1
    assert steps > 1 and answers.failed.among([0, 1])[0].startswith(FAILS)
    assert list(answers.failed.among([0, 1])) == [0]


def test_an_expensive_mask_does_not_finish_the_answer(monkeypatch, logged_errors):
    """A mask that costs too much does not end the output. The library allows an end token where it
    has given up, so the output would seem to have finished with `stop`."""
    monkeypatch.setattr(module, "GRAMMAR_LIMITS", {**module.GRAMMAR_LIMITS, "max_lexer_states": 8})
    answers = Answers()
    answers.take(0, lark(regex="a{3,5000}b|(a|ab|abc)*x"))
    for _ in range(4):
        sampled = answers.step([0])
        if answers.failed.among([0]):
            break
        assert sampled != [END], "it fails in the step that could not be computed"
    assert "too many states" in answers.failed.among([0])[0]


def test_outputs_that_the_grammar_forbids_fail_the_row(logged_errors):
    answers = Answers()
    answers.take(0, lark(choice=["abc"]), [120])
    answers.step([0])
    assert answers.failed.among([0])[0].startswith(FAILS)


def test_a_worker_without_the_library_serves_everything_else(monkeypatch, logged_errors):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answers = Answers()
    answers.take(0, "start: /a/")
    answers.take(1, None)
    answers.step([0, 1])
    (reason,) = answers.failed.among([1, 0]).values()
    assert "llguidance, which is not installed on this worker" in reason


@pytest.mark.parametrize("ends", [{"eos_token_id": END}, {}])
def test_a_model_without_a_tokenizer_still_answers(tmp_path, ends, logged_errors):
    """A model without a tokenizer still answers. The API refuses such requests; a worker that gets
    one continues."""
    (tmp_path / "config.json").write_text(json.dumps(ends))
    answers = Answers(str(tmp_path))
    answers.take(0, lark(json=True))
    answers.take(1, None)
    answers.step([0, 1])
    assert list(answers.failed.among([1, 0])) == [1]
    assert len(logged_errors) == 1
