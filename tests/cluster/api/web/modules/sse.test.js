import assert from "node:assert/strict";
import { test } from "node:test";
import { EventParser } from "./static/lib/sse.js";

const STREAM = ': x-swell-engine 0,1\n\nevent: state\ndata: {"a":1}\n\ndata: one\ndata: two\n\r\ndata:bare\r\n\r\n';
const EVENTS = [
  { comment: "x-swell-engine 0,1" },
  { event: "state", data: '{"a":1}' },
  { event: "message", data: "one\ntwo" },
  { event: "message", data: "bare" },
];

test("a stream has the same events however it is cut", () => {
  for (let cut = 0; cut <= STREAM.length; cut += 1) {
    const parser = new EventParser();
    const found = [...parser.push(STREAM.slice(0, cut)), ...parser.push(STREAM.slice(cut))];
    assert.deepEqual(found, EVENTS, `cut at ${cut}`);
  }
});

test("a line may contain the line separators of Unicode", () => {
  const parser = new EventParser();
  assert.deepEqual(parser.push("data: a\u2028b\u2029c\n\n"), [{ event: "message", data: "a\u2028b\u2029c" }]);
});

test("an unfinished event is kept back", () => {
  const parser = new EventParser();
  assert.deepEqual(parser.push("data: hal"), []);
  assert.deepEqual(parser.push("f\n\n"), [{ event: "message", data: "half" }]);
});
