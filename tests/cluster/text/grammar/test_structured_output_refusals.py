"""Formats that cannot be enforced are refused with the reason. A hostile grammar fails only its own
check."""

from __future__ import annotations

import array
import fcntl
import json
import os
import signal
import termios
import threading
import time
from typing import IO

import pytest

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.grammar.grammar_check import GrammarChecker
from swell.cluster.text.grammar.structured_output import compile_grammar
from swell.cluster.text.params.sampling_params import StructuredOutputs
from swell.worker.sampler_wire import GRAMMAR_LIMITS
from tests.support.structured_schemas import Schema

REFUSED: dict[str, Schema] = {
    "unknown type": {"type": "text"},
    "type of the wrong kind": {"type": 7},
    "properties of the wrong kind": {"type": "object", "properties": ["a"]},
    "reference to nothing": {"$ref": "#/$defs/missing"},
    "nothing fits": False,
    "bounds that exclude all": {"type": "integer", "minimum": 5, "maximum": 4},
    "pattern that is none": {"type": "string", "pattern": "(["},
    "look-ahead in the middle": {"type": "string", "pattern": "^a(?=b)"},
    "look-ahead that excludes all": {"type": "string", "pattern": "^(?=a)b"},
    "not": {"not": {"type": "string"}},
    "if then else": {
        "if": {"type": "string"},
        "then": {"minLength": 1},
        "else": {"type": "integer"},
    },
    "unique items": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    "property names": {"type": "object", "propertyNames": {"format": "uuid"}},
    "dependent": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "array of itself": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "object of itself": {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"},
    "evaluated by a choice": {
        "type": "object",
        "anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}],
        "unevaluatedProperties": False,
    },
    "bound of too many digits": {"type": "integer", "minimum": 10**450},
    "divisor beyond floats": {
        "type": "number",
        "multipleOf": 10**400,
        "minimum": 1,
        "maximum": 2,
    },
    "divisor of no decimal number of digits": {"type": "number", "multipleOf": 1e-50},
    "one of that may overlap": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]},
}


def refused(schema: Schema) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        compile_grammar(StructuredOutputs(json=schema))
    return caught.value


@pytest.mark.parametrize("name", REFUSED)
def test_formats_that_cannot_be_enforced_are_refused_with_the_reason(name):
    error = refused(REFUSED[name])
    assert error.param == "structured_outputs.json"
    assert error.message.startswith("structured_outputs.json")
    assert 10 < len(error.message) < 500
    assert "start:" not in error.message and "x-guidance" not in error.message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unknown type", "has type 'text', which is not"),
        ("reference to nothing", "'/$defs/missing', which does not exist"),
        ("bounds that exclude all", "no number is an integer and at least 5 and at most 4"),
        ("pattern that is none", "unclosed character class"),
        ("look-ahead in the middle", "serve.schema_keywords=ignore"),
        ("unique items", "has uniqueItems=True"),
        ("one of that may overlap", "use anyOf"),
    ],
)
def test_reasons_name_the_way_out(name, reason):
    assert reason in refused(REFUSED[name]).message


# ---------------------------------------------------------------------------- hostile grammars


def _chain(length: int) -> dict[str, object]:
    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$defs": {**links, f"d{length}": {}}, "$ref": "#/$defs/d0"}


HOSTILE = {
    # Overflows the compiler's stack, which kills its process.
    "rules": "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(9000)) + 'r9000: "b"',
    "references": f"start: %json {json.dumps(_chain(3000))}",
    # Takes minutes of work and gigabytes of memory, from one kilobyte of text.
    "patterns": "start: %json "
    + json.dumps(
        {"allOf": [{"type": "string", "pattern": f"(a|b)*c{{{i}}}d*"} for i in range(40)]}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_stops_only_its_own_check(name):
    checker = GrammarChecker(GRAMMAR_LIMITS)
    try:
        assert checker.check('start: "a"') == ""
        reasons = ("it takes more than", "it needs more")  # on a slow core time may run out first
        assert checker.check(HOSTILE[name]).startswith(reasons[: 1 if name == "patterns" else 2])
        assert checker.check('start: "a"') == ""
        assert checker.check("start: b") != ""
    finally:
        checker.close()


def test_an_interrupted_reply_is_not_mistaken_for_the_next_one():
    """Ctrl-C in a notebook during the check. SIGUSR1 stands in for SIGINT, which may be ignored
    where tests run."""

    def interrupt(_number, _frame):
        raise KeyboardInterrupt

    checker = GrammarChecker(GRAMMAR_LIMITS)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        assert checker.check('start: "a"') == ""
        process = checker._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        main = threading.get_ident()

        def interrupt_once_asked() -> None:
            while not unread_bytes(process.stdin):
                time.sleep(0.01)
            signal.pthread_kill(main, signal.SIGUSR1)

        interrupter = threading.Thread(target=interrupt_once_asked)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            checker.check("start: b")
        interrupter.join()
        assert checker.check('start: "a"') == ""
        assert checker.check("start: b") != ""
    finally:
        signal.signal(signal.SIGUSR1, before)
        checker.close()


def unread_bytes(pipe: IO[bytes]) -> int:
    """Returns the number of bytes that were written to a pipe and not yet read."""
    (count,) = array.array("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return count


def test_a_checker_whose_process_is_stopped_closes():
    checker = GrammarChecker(GRAMMAR_LIMITS)
    assert checker.check('start: "a"') == ""
    os.kill(checker._process.pid, signal.SIGSTOP)
    checker.close()
    assert checker.check('start: "a"') == ""
    checker.close()


def test_a_check_killed_from_outside_has_no_verdict():
    checker = GrammarChecker(GRAMMAR_LIMITS)
    try:
        assert checker.check('start: "a"') == ""
        process = checker._process
        assert process is not None
        process.kill()
        process.wait()
        assert checker.check('start: "b"') == ""
    finally:
        checker.close()
    checker.close()
