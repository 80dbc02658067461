"""Whether a grammar compiles, checked in a process of its own.

A grammar is a program that a client sends. Some hundred bytes can make the compiler work for
minutes, take all memory, or overflow its stack, which no exception reports. The check can end its
process but not the server, and a grammar that passes costs the workers no more than it cost there:
they compile it again, with the same limits and a larger stack.

The process runs this file as a script and reads one JSON line for each grammar; it runs as long as
its standard input is open and starts again after a check that ended it. Linux only, as the limits
are.
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
"""Processor time of one check."""
WALL_S = 30.0
"""Longest wait for one check, on a busy machine."""
MEMORY_BYTES = 1 << 30
"""Address space of the process."""
MAX_REASON_CHARS = 4096
"""Longest error message of the compiler: it may repeat the grammar."""
MAX_STEPS = 64
"""Tokens of one way through a grammar: its parser may need more than its limits behind the first.
So many reach the second member of an object."""
_BYTES = sorted(range(256), key=lambda byte: (byte != 0x22, byte <= 0x20, byte))
"""Those that are taken first: quotes, which end strings, and spaces last."""
STACK_BYTES = 1 << 20
"""A worker's threads have at least twice this."""

_TOKEN_IDS = re.compile(r"<\[[0-9,*^-]+\]>")


class GrammarChecker:
    """Checks one grammar at a time; safe to call from several threads."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        """`limits`: arguments of `llguidance.LLParserLimits`."""
        self._limits = json.dumps(limits)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, lark: str) -> str:
        """Why the grammar cannot be used; empty: it can."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end(self._process)  # something else ended it: no verdict on this grammar
            process = self._process or self._start()
            reason = self._request(process, json.dumps(lark).encode() + b"\n")
            if reason is not None:
                return reason
            status = self._end(process)
        if status == -signal.SIGPROF:
            return f"it takes more than {CPU_S:g} s to compile"
        if status == -signal.SIGKILL:
            return f"it is not compiled within {WALL_S:g} s"
        return f"it needs more than {MEMORY_BYTES >> 20} MiB, or nests too deeply"

    def close(self) -> None:
        """End the process, also one that is stopped; the next check starts another."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._end(self._process)

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: this file's folder holds modules of ours whose names are the standard library's.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, self._limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return self._process

    def _request(self, process: subprocess.Popen[bytes], line: bytes) -> str | None:
        """The process's answer to a line; None if it gives none."""
        assert process.stdin is not None and process.stdout is not None
        patience = threading.Timer(WALL_S, process.kill)
        try:
            patience.start()
            process.stdin.write(line)
            process.stdin.flush()
            received = process.stdout.readline()
        except BrokenPipeError:
            return None
        except BaseException:  # an interrupt: the answer would be taken for that of the next line
            process.kill()
            self._end(process)
            raise
        finally:
            patience.cancel()
        return str(json.loads(received)) if received.endswith(b"\n") else None

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Its exit status."""
        self._process = None
        process.communicate()  # closes its pipes and waits for its end
        return process.returncode


def _serve(limits: Mapping[str, int]) -> None:
    """Answer every line of standard input with the reason for which its grammar is refused."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        # Its signal is not caught, so it ends the process.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        reason = _reason(json.loads(line), limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reason[:MAX_REASON_CHARS]), flush=True)


def _reason(lark: str, limits: Mapping[str, int]) -> str:
    """Compile a grammar and take its first steps, with tokens of one byte."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    parser_limits = LLParserLimits(**limits, verbose_errors=False)  # type: ignore[arg-type]
    reason = LLMatcher.validate_grammar(lark, limits=parser_limits)
    if reason and not reason.startswith("WARNING"):
        return reason
    tokenizer = LLTokenizer("byte")
    # Ids of special tokens are the model's own; here one id replaces all.
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
