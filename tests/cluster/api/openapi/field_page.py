"""Writes `docs/reference/fields.md` from the code.

python -m tests.cluster.api.openapi.field_page
"""

from __future__ import annotations

import json
from typing import Any

from swell.cluster.api.bodies.generation_body import STRUCTURED_OUTPUT_ALIASES
from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.api.responses.protocol import ResponsesRequest
from swell.cluster.text.schema.request_body import RequestBody, not_served
from tests.cluster.api.bodies.field_lists import ROUTES, SERVERS
from tests.cluster.api.bodies.test_request_fields import EFFECTIVE, without_effect
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "fields.md"
KINDS: dict[str, type[RequestBody]] = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
}
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}
MEANS = {
    **{name: f"structured_outputs.{form}" for name, form in STRUCTURED_OUTPUT_ALIASES.items()},
    "max_completion_tokens": "max_tokens",
}
HEAD = """# Fields of other servers

This page is for people whose clients were written for another server: every field at the top of the
request bodies of OpenAI, vLLM and SGLang, and how Swell handles it. It is written from the code by
`python -m tests.cluster.api.openapi.field_page`, and `tests/cluster/api/openapi/test_field_page.py`
tests each row.

- *served*: the field has the effect that its name means ([requests.md](../guide/requests.md)).
- *means*: another name for a field of Swell; both together are a 400.
- *accepted*: any value is accepted and has no effect
  ([fields-without-effect.md](fields-without-effect.md)).
- *refused*: a 400 that names the field, unless its value is neutral: null, or a listed value.

`null` is accepted for every field that is not required, and means that the field is absent. A name
that is not listed is a 400, or is ignored with a warning (`serve.unknown_fields`). Unknown fields
of messages, content parts, calls, items and tools are ignored.

`include_timings` is a field of Swell only: with `true` the response, or the last event of its
stream, has `timings`, on all of these routes and on `/v1/messages`
([timings.md](../guide/timings.md)).
"""


def names(route: str) -> list[str]:
    return sorted(set().union(*(fields[route] for fields in SERVERS.values())))


def does(route: str, name: str) -> tuple[str, Any]:
    """Returns how a field is handled: "served", "means", "accepted" or
    "refused". The second value is
    the field that it stands for ("means") or the values that are accepted all the same ("refused").
    Raises KeyError for an unknown field."""
    kind = KINDS[route]
    table, own = kind.ECOSYSTEM, name in kind.__struct_fields__
    if name in table.means:
        return "means", table.means[name]
    if name in table.accepted:
        return "accepted", None
    if name in table.neutral or name in not_served(kind):
        return "refused", {**table.neutral, **not_served(kind)}[name]
    if own and name in without_effect(kind.__name__):
        return "accepted", None
    if own and name in EFFECTIVE[kind.__name__].split():
        meant = MEANS.get(name)
        return ("means", meant) if meant else ("served", None)
    raise KeyError(f"{route}: {name}")


def describe(route: str, name: str) -> str:
    what, of = does(route, name)
    if what == "means":
        return f"means `{of}`"
    if what != "refused":
        return what
    values = " or ".join(f"`{json.dumps(value)}`" for value in of)
    return f"refused unless it is {values}" if values else "refused"


def page() -> str:
    lines = [HEAD]
    for route in ROUTES:
        lines += [f"## `{PATHS[route]}`", "", "| field | of | Swell |", "|---|---|---|"]
        for name in names(route):
            servers = ", ".join(server for server, f in SERVERS.items() if name in f[route])
            lines.append(f"| `{name}` | {servers} | {describe(route, name)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
