"""Checks in a separate process whether a grammar compiles.

A grammar is a program that a client sends. A few hundred bytes can make the compiler work for
minutes, use all memory, or overflow its stack, which no exception reports. The check can crash its
process but not the server. A grammar that passes costs the workers no more than it did there: they
compile it again, with the same limits and a larger stack.

The process runs this file as a script and reads one JSON line for each grammar. It runs until its
standard input is closed, and is restarted after a check that crashed it. Linux only, because the
limits are.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

CPU_S = 0.5
"""Limit on the processor time of one check."""
WALL_S = 30.0
"""Limit on the wait for one check, on a busy machine."""
MEMORY_BYTES = 1 << 30
"""Limit on the address space of the process."""
MAX_REASON_CHARS = 4096
"""Limit on the length of the compiler's error message: it may repeat the grammar."""
MAX_STEPS = 64
"""Number of tokens of one path through a grammar: its parser may exceed its limits after the first
token. This many reach the second member of an object."""
_BYTES = sorted(range(256), key=lambda byte: (byte != 0x22, byte <= 0x20, byte))
"""All bytes in the order in which a path tries them: quotes, which close strings, first; spaces
last."""
STACK_BYTES = 1 << 20
"""Stack size of the check's thread; a worker's threads have at least twice this."""

_TOKEN_IDS = re.compile(r"<\[[0-9,*^-]+\]>")


class GrammarChecker:
    """Checks one grammar at a time; safe to call from several threads."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        """`limits` are arguments of `llguidance.LLParserLimits`."""
        self._limits = json.dumps(limits)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, lark: str) -> str:
        """Returns why the grammar cannot be used, or an empty string if it can."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end(self._process)  # it died for another reason: no verdict on this grammar
            process = self._process or self._start()
            reason = self._request(process, json.dumps(lark).encode() + b"\n")
            if reason is not None:
                return reason
            status = self._end(process)
        if status == -signal.SIGPROF:
            return f"it takes more than {CPU_S:g} s of CPU time to compile"
        if status == -signal.SIGKILL:
            return f"it did not compile within {WALL_S:g} s"
        return f"it needs more than {MEMORY_BYTES >> 20} MiB, or is nested too deeply"

    def close(self) -> None:
        """Kills the process, even one that is suspended; the next check starts another."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._end(self._process)

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: this file's folder holds modules of ours with names of the standard library.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, self._limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return self._process

    def _request(self, process: subprocess.Popen[bytes], line: bytes) -> str | None:
        """Returns the process's answer to a line; None if it does not answer."""
        assert process.stdin is not None and process.stdout is not None
        patience = threading.Timer(WALL_S, process.kill)
        try:
            patience.start()
            process.stdin.write(line)
            process.stdin.flush()
            received = process.stdout.readline()
        except BrokenPipeError:
            return None
        except BaseException:  # an interrupt: the next line would get this answer
            process.kill()
            self._end(process)
            raise
        finally:
            patience.cancel()
        return str(json.loads(received)) if received.endswith(b"\n") else None

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Waits for the process to exit; returns its exit status."""
        self._process = None
        process.communicate()  # closes its pipes and waits for its exit
        return process.returncode


def _serve(limits: Mapping[str, int]) -> None:
    """Answers every line of standard input with the reason why its grammar is refused."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        # The signal is not caught, so it kills the process.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        reason = _reason(json.loads(line), limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reason[:MAX_REASON_CHARS]), flush=True)


def _reason(lark: str, limits: Mapping[str, int]) -> str:
    """Compiles a grammar and takes its first steps, with tokens of one byte."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    parser_limits = LLParserLimits(**limits, verbose_errors=False)  # type: ignore[arg-type]
    reason = LLMatcher.validate_grammar(lark, limits=parser_limits)
    if reason and not reason.startswith("WARNING"):
        return reason
    tokenizer = LLTokenizer("byte")
    # Ids of special tokens are the model's own; here one id replaces all of them.
    lark = _TOKEN_IDS.sub(f"<[{tokenizer.vocab_size - 1}]>", lark)
    matcher = LLMatcher(tokenizer, lark, log_level=0, limits=parser_limits)
    for _ in range(MAX_STEPS):
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in _BYTES if mask[byte // 8] >> byte % 8 & 1]
        if matcher.get_error() or not allowed or not matcher.consume_token(allowed[0]):
            break
    return matcher.get_error()


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_serve, args=[json.loads(sys.argv[1])])
    worker.start()
    worker.join()
