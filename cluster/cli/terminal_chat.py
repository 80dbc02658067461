"""`swell chat`: a small terminal chat with a served model."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import Any

import msgspec

from swell.cluster.api.admin.protocol import ModelList
from swell.cluster.api.chat.protocol import ChatChunk
from swell.cluster.cli.http_client import Client, ServerError, read_events

_PROMPT = "> "
_HELP = "Ctrl-C stops an answer, /clear starts a new conversation, /quit or Ctrl-D exits"


class Conversation:
    """The messages so far, and the request parameters of the next one."""

    def __init__(self, client: Client, model: str, system: str | None, **options: Any) -> None:
        self._client = client
        self._system = [{"role": "system", "content": system}] if system else []
        given = {name: value for name, value in options.items() if value is not None}
        self._fields = {"model": model, "stream": True, **given}
        self.clear()

    def clear(self) -> None:
        self.messages: list[dict[str, str]] = list(self._system)

    def send(self, text: str) -> None:
        """Sends a message and prints the response as it streams. Ctrl-C stops it and keeps the text
        so far.

        After a ServerError the conversation is as before.
        """
        self.messages.append({"role": "user", "content": text})
        parts: list[str] = []
        try:
            asyncio.run(self._stream(parts))
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except ServerError:
            self.messages.pop()
            raise
        finally:
            print(flush=True)
        self.messages.append({"role": "assistant", "content": "".join(parts)})

    async def _stream(self, parts: list[str]) -> None:
        body = msgspec.json.encode({**self._fields, "messages": self.messages})
        async with self._client.open("POST", "/v1/chat/completions", body) as response:
            async for data in read_events(response):
                for choice in msgspec.json.decode(data, type=ChatChunk).choices:
                    text = choice.delta.content
                    if isinstance(text, str) and text:
                        parts.append(text)
                        print(text, end="", flush=True)


def chat(args: argparse.Namespace) -> int:
    client = Client(args.url, args.api_key)
    model = args.model or asyncio.run(client.get("/v1/models", ModelList)).data[0].id
    conversation = Conversation(
        client, model, args.system, temperature=args.temperature, max_tokens=args.max_tokens
    )
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives `input` line editing and a history
        print(f"{model} at {client.url}. {_HELP}.")
    while True:
        try:
            text = input(_PROMPT if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return 0
        except KeyboardInterrupt:
            print(f"\n({_HELP})")
            continue
        match text:
            case "":
                continue
            case "/quit" | "/exit":
                return 0
            case "/clear":
                conversation.clear()
            case _ if text.startswith("/"):
                print(f"unknown command {text.split()[0]!r}: {_HELP}")
            case _:
                try:
                    conversation.send(text)
                except ServerError as error:  # an interactive chat continues, but a script stops
                    if not interactive:
                        raise
                    print(f"swell: {error}", file=sys.stderr)
