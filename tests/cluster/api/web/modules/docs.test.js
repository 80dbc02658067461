import assert from "node:assert/strict";
import { test } from "node:test";
import { Schemas, grouped, operationsOf } from "./static/docs/schema.js";

const DOCUMENT = {
  paths: {
    "/admin/scale": { post: {} },
    "/v1/chat/completions": { post: {} },
    "/health": { get: {} },
  },
  components: {
    schemas: {
      Node: {
        properties: {
          name: { type: "string", description: "A name.", default: "x" },
          share: { type: "number", minimum: 0, maximum: 1 },
          children: { type: "array", items: { $ref: "#/components/schemas/Node" } },
          kind: { anyOf: [{ enum: ["a", "b"] }, { type: "null" }] },
        },
        required: ["name"],
      },
    },
  },
};
const schemas = new Schemas(DOCUMENT);
const NODE = { $ref: "#/components/schemas/Node" };

test("fields have types, limits and meanings", () => {
  const fields = schemas.fields(NODE).map(({ name, type, isRequired, text }) => [name, type, isRequired, text]);
  assert.deepEqual(fields, [
    ["name", "string", true, 'A name. (default "x")'],
    ["share", "number", false, "(at least 0, at most 1)"],
    ["children", "array of Node", false, ""],
    ["kind", '"a" or "b" or null', false, ""],
  ]);
});

test("a type that contains itself is opened one level at a time", () => {
  const children = schemas.fields(NODE)[2].schema;
  assert.deepEqual(schemas.parts(children), [NODE]);
});

test("every route is in one group, and those of operators come last", () => {
  const groups = grouped(operationsOf(DOCUMENT));
  assert.deepEqual(groups.map(([title, members]) => [title, members.length]), [
    ["Answers", 1], ["Server", 1], ["Operators", 1],
  ]);
});
