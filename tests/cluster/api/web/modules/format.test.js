import assert from "node:assert/strict";
import { test } from "node:test";
import { bytes, count, percent, plural, seconds } from "./static/lib/format.js";

test("numbers are short", () => {
  assert.deepEqual([0, 1.25, 12.6, 9999, 12345, 2.5e6].map(count), ["0", "1.3", "13", "9999", "12k", "2.5M"]);
  assert.equal(count(null), "–");
});

test("times have the unit that suits them", () => {
  const texts = [0, 0.0021, 0.0999, 0.5, 1.5, 90, 300].map(seconds);
  assert.deepEqual(texts, ["0 ms", "2.1 ms", "100 ms", "500 ms", "1.5 s", "90 s", "5 min"]);
});

test("shares and sizes are short", () => {
  assert.deepEqual([0, 0.056, 1].map(percent), ["0 %", "5.6 %", "100 %"]);
  assert.deepEqual([0, 1023, 1024, 3 * 2 ** 30].map(bytes), ["0 B", "1023 B", "1 KiB", "3 GiB"]);
});

test("a noun has its number", () => {
  assert.deepEqual([0, 1, 2].map((number) => plural(number, "engine")), ["0 engines", "1 engine", "2 engines"]);
});
