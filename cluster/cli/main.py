"""The command `swell`: a table of subcommands, each imported on use."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple, NoReturn

DEFAULT_URL = "http://127.0.0.1:8000"


class Command(NamedTuple):
    summary: str
    run: str
    """`module:function`; the function accepts the parsed arguments and returns an exit code."""
    arguments: Callable[[argparse.ArgumentParser], None]


class Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line, like all other errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"swell: {message} (see '{self.prog} --help')\n")


def _serve(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("--host", help="address to listen on (serve.host)")
    parser.add_argument("--port", type=int, help="port to listen on; 0: any free port (serve.port)")
    parser.add_argument(
        "--address",
        metavar="RAY",
        help="HOST:PORT of a running Ray; default: start Ray on this machine",
    )
    parser.add_argument(
        "--explain-start",
        action="store_true",
        help="print how long each phase of the start took",
    )


def _status(parser: argparse.ArgumentParser) -> None:
    _server(parser)
    parser.add_argument("--json", action="store_true", help="print the state as JSON")


def _scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engines", metavar="N", type=int, help="target number of engines")
    _server(parser)
    parser.add_argument(
        "--drain-timeout",
        metavar="S",
        type=float,
        help="seconds that leaving engines may take to finish their requests (default: "
        "cluster.drain_timeout_s)",
    )


def _drain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rank", metavar="RANK", type=int, help="rank of the engine to remove")
    _server(parser)


def _sleep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--level", metavar="L", type=int, choices=(1, 2), default=1,
        help=
            "1: free the KV cache and keep the weights in host memory; 2: also free the weights, "
            "and load them again at wake-up (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--refuse", action="store_true", help="refuse requests instead of letting them wait"
    )
    _status(parser)


def _upgrade(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    _server(parser)


def _update_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="FOLDER", help="folder of the new weights, at the same path on every host"
    )
    _server(parser)


def _generate(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="+", help="one or more prompts")
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        default=64,
        help="length limit of an answer (default 64)",
    )
    parser.add_argument("--temperature", metavar="T", type=float, default=0.0, help="default 0")
    parser.add_argument("--seed", metavar="N", type=int, help="default: a new seed each time")
    parser.add_argument("--chat", action="store_true", help="send the prompts as chat messages")


def _run_batch(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("input", metavar="IN", help="the file with the requests; -: standard input")
    parser.add_argument(
        "output",
        metavar="OUT",
        help="the file for the answers, to which a repeated run adds the missing ones; "
        "-: standard output",
    )
    parser.add_argument(
        "--in-flight",
        metavar="N",
        type=_positive,
        help="most requests that are computed or wait at once (default: twice scheduler.max_rows)",
    )


def _save_sharded(parser: argparse.ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("out", metavar="OUT", help="a new folder for the saved model")


def _chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", metavar="URL", nargs="?", default=DEFAULT_URL, help=f"default {DEFAULT_URL}"
    )
    _key(parser)
    parser.add_argument("--model", metavar="NAME", help="default: the first served model")
    parser.add_argument("--system", metavar="TEXT", help="a system message to start with")
    parser.add_argument("--temperature", metavar="T", type=float, help="default: the server's")
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, help="maximum length of an answer, in tokens"
    )


def _bench(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--url", metavar="U", help="a server to measure over HTTP")
    what.add_argument(
        "--model", metavar="M", help="a configuration or model to run in this process"
    )
    _key(parser)
    _set(parser)
    for name, letter, default, text in (
        ("input-tokens", "I", 128, "tokens of each prompt"),
        ("output-tokens", "O", 64, "tokens of each answer"),
        ("concurrency", "C", 16, "concurrent requests"),
        ("requests", "R", 64, "total requests"),
    ):
        parser.add_argument(
            f"--{name}", metavar=letter, type=_positive, default=default,
            help=f"{text} (default {default})",
        )  # fmt: skip
    parser.add_argument(
        "--seed", metavar="S", type=int, default=0, help="seed of the random prompts"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="a configuration to check as well"
    )
    _set(parser)
    parser.add_argument(
        "--address",
        metavar="RAY",
        help="check every host of this Ray cluster; default: only this machine",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument(
        "--timeout", metavar="S", type=_timeout, default=60.0,
        help="seconds that a host may take to answer (default 60)",
    )  # fmt: skip


COMMANDS = {
    "serve": Command("serve a model", "swell.cluster.cli.launch:serve", _serve),
    "status": Command(
        "show the state of a cluster", "swell.cluster.cli.admin_commands:status", _status
    ),
    "scale": Command("grow or shrink a cluster", "swell.cluster.cli.admin_commands:scale", _scale),
    "drain": Command("remove an engine", "swell.cluster.cli.admin_commands:drain", _drain),
    "upgrade": Command(
        "replace the engines by those of another configuration, one by one",
        "swell.cluster.cli.admin_commands:upgrade",
        _upgrade,
    ),
    "update-weights": Command(
        "load other weights into the engines, one after the other",
        "swell.cluster.cli.admin_commands:update_weights",
        _update_weights,
    ),
    "pause": Command("pause all engines", "swell.cluster.cli.admin_commands:pause", _status),
    "resume": Command("resume all engines", "swell.cluster.cli.admin_commands:resume", _status),
    "reset-prefix-cache": Command(
        "let later requests compute their whole prompts again",
        "swell.cluster.cli.admin_commands:reset_prefix_cache",
        _status,
    ),
    "sleep": Command(
        "pause all engines and free their memory",
        "swell.cluster.cli.admin_commands:sleep",
        _sleep,
    ),
    "wake": Command(
        "restore the memory of all engines and resume them",
        "swell.cluster.cli.admin_commands:wake",
        _status,
    ),
    "generate": Command(
        "answer prompts in this process", "swell.cluster.cli.generate:generate", _generate
    ),
    "run-batch": Command(
        "answer the requests of a file in this process",
        "swell.cluster.cli.run_batch:run_batch",
        _run_batch,
    ),
    "save-sharded": Command(
        "save a model in the form that its workers load fastest",
        "swell.cluster.cli.save_sharded:save_sharded",
        _save_sharded,
    ),
    "chat": Command("chat with a served model", "swell.cluster.cli.terminal_chat:chat", _chat),
    "bench": Command("measure a server or a model", "swell.cluster.cli.bench:bench", _bench),
    "doctor": Command(
        "check this machine or a cluster",
        "swell.cluster.cli.doctor.doctor_command:doctor",
        _doctor,
    ),
}

EXPECTED = (
    "swell.configs.section:ConfigError",
    "swell.cluster.cli.start.start_reasons:StartupError",
    "swell.cluster.text.errors:BadRequest",
    "swell.cluster.cli.http_client:ServerError",
    "swell.engine.executor:ExecutorError",
    "builtins:OSError",
)
"""Expected errors, as `module:class`: shown as a message without a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 1 for an error, 2 for wrong usage."""
    args = _parser().parse_args(argv)
    try:
        return int(resolve_name(COMMANDS[args.command].run)(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        kinds = {f"{kind.__module__}:{kind.__qualname__}" for kind in type(error).__mro__}
        if kinds.isdisjoint(EXPECTED):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"swell: {message}", file=sys.stderr)
        return 1


def _parser() -> Parser:
    parser = Parser(prog="swell", description="Serve large language models on a Ray cluster.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        child = commands.add_parser(name, help=command.summary, description=command.summary)
        command.arguments(child)
    return parser


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG_OR_MODEL",
        help="a YAML configuration, a model folder, a GGUF file, or a hub id",
    )
    _set(parser)


def _set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        metavar="section.key=value",
        type=_override,
        action="append",
        default=[],
        help="change one key of the configuration; may be repeated",
    )


def _server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="U", default=DEFAULT_URL, help=f"default {DEFAULT_URL}")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("SWELL_ADMIN_KEY") or os.environ.get("SWELL_API_KEY"),
        help="a key of serve.admin_keys_file; default: $SWELL_ADMIN_KEY, otherwise $SWELL_API_KEY",
    )


def _key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("SWELL_API_KEY"),
        help="default: $SWELL_API_KEY",
    )


def _override(text: str) -> tuple[str, Any]:
    from swell.configs.schema import ConfigError, parse_override

    try:
        return parse_override(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _timeout(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 600:
        raise argparse.ArgumentTypeError(f"{text} s must be from 1 to 600")
    return value
