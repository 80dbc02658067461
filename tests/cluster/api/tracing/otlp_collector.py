"""`python -m tests.cluster.api.tracing.otlp_collector [STATUS ...]`: an OTLP collector over HTTP.

It prints its port as the first line, then each received span as a line of JSON. It answers the
first batches with the given statuses and accepts all later ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from swell.cluster.api.tracing.exporter import INSTALL, is_installed
from tests.support.deadlines import HANG_S

needs_exporter = pytest.mark.skipif(not is_installed(), reason=f"needs {INSTALL}")


class Handler(BaseHTTPRequestHandler):
    statuses: list[int] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        status = self.statuses.pop(0) if self.statuses else 200
        if self.path != "/v1/traces" or self.headers["content-type"] != "application/x-protobuf":
            status = 404
        if status == 200:
            for span in spans_in(body):
                print(json.dumps(span), flush=True)
        self.send_response(status)
        self.end_headers()
        if status == 200:
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, *_: Any) -> None:
        pass


def spans_in(body: bytes) -> Iterator[dict[str, Any]]:
    for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = values(of_resource.resource.attributes)
        for span in (span for scope in of_resource.scope_spans for span in scope.spans):
            yield {
                "resource": resource,
                "name": span.name,
                "trace_id": span.trace_id.hex(),
                "span_id": span.span_id.hex(),
                "parent_id": span.parent_span_id.hex(),
                "state": span.trace_state,
                "kind": span.kind,
                "status": span.status.code,
                "start_ns": span.start_time_unix_nano,
                "end_ns": span.end_time_unix_nano,
                "attributes": values(span.attributes),
                "events": [[event.name, event.time_unix_nano] for event in span.events],
            }


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: value_of(one.value) for one in attributes}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind)


class Collector:
    """The collector process, as a test uses it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._process = process
        self._reading = Thread(target=self._read)
        self._reading.start()
        self.endpoint = f"http://127.0.0.1:{int(self._lines.get(timeout=HANG_S))}"

    def take(self, count: int, trace_id: str | None = None) -> list[dict[str, Any]]:
        """Returns the next `count` spans in order of arrival. With a `trace_id`, skips and drops
        the spans of other traces."""
        taken: list[dict[str, Any]] = []
        while len(taken) < count:
            span = json.loads(self._lines.get(timeout=HANG_S))
            if trace_id in (None, span["trace_id"]):
                taken.append(span)
        return taken

    def is_empty(self) -> bool:
        return self._lines.empty()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reading.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)


@contextmanager
def start_collector(*statuses: int) -> Iterator[Collector]:
    command = [
        sys.executable,
        "-m",
        "tests.cluster.api.tracing.otlp_collector",
        *map(str, statuses),
    ]
    collector = Collector(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        yield collector
    finally:
        collector.close()


def main() -> None:
    Handler.statuses = [int(status) for status in sys.argv[1:]]
    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
