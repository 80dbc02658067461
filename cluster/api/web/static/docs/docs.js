// The OpenAPI document as a page: a list of routes, and one route with its fields and a request.

import { byId, el, setText } from "../lib/dom.js";
import { send, sendJson } from "../lib/http.js";
import { seconds } from "../lib/format.js";
import { exampleBody } from "./examples.js";
import { Schemas, grouped, operationsOf } from "./schema.js";

const JSON_TYPE = "application/json";
let schemas;
let operations;
let model = "";

async function start() {
  try {
    schemas = new Schemas(await sendJson("/openapi.json"));
  } catch (error) {
    byId("routes").replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
    return;
  }
  operations = operationsOf(schemas.document);
  byId("contents").replaceChildren(...grouped(operations).map(groupElement));
  window.addEventListener("hashchange", show);
  model = await servedModel();
  show();
}

// The examples name a model that exists. A server with keys shows its models only with one, for
// which a reader of the documentation is not asked.
async function servedModel() {
  const response = await fetch("v1/models", { cache: "no-store" });
  return response.ok ? (await response.json()).data[0].id : "MODEL";
}

function groupElement([title, members]) {
  const links = members.map(({ operationId, method, path }) =>
    el("li", {}, el("a", { href: `#${operationId}` }, badge(method), ` ${path}`)),
  );
  return el("section", {}, el("h2", {}, title), el("ul", {}, ...links));
}

function badge(method) {
  return el("span", { class: `method ${method}` }, method.toUpperCase());
}

function show() {
  const id = location.hash.slice(1) || "post_v1_chat_completions";
  const operation = operations.find((one) => one.operationId === id) ?? operations[0];
  for (const link of document.querySelectorAll("#contents a")) {
    if (link.hash === `#${operation.operationId}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  byId("routes").replaceChildren(operationElement(operation));
  byId("routes").scrollTop = 0;
}

function operationElement(operation) {
  const { method, path, summary, parameters = [], requestBody, responses } = operation;
  const schema = requestBody?.content[JSON_TYPE].schema;
  return el(
    "article",
    {},
    el("h2", {}, badge(method), " ", el("code", {}, path)),
    el("p", {}, summary),
    tryElement(operation),
    ...(parameters.length ? [el("h3", {}, "Parameters"), parameterTable(parameters)] : []),
    ...(schema ? [el("h3", {}, "Body"), fieldTable(schema)] : []),
    el("h3", {}, "Answers"),
    ...Object.entries(responses).map(answerElement),
  );
}

function parameterTable(parameters) {
  const rows = parameters.map((one) => ({
    name: one.name,
    type: `${schemas.typeText(one.schema)}, ${one.in}`,
    isRequired: one.required,
    text: one.description ?? "",
    schema: one.schema,
  }));
  return table(rows);
}

function fieldTable(schema) {
  return table(schemas.fields(schema));
}

function table(rows) {
  const heads = ["Field", "Type", "Meaning"].map((text) => el("th", { scope: "col" }, text));
  const body = rows.map(({ name, type, isRequired, text, schema }) =>
    el(
      "tr",
      {},
      el("td", {}, el("code", {}, name), ...(isRequired ? [required()] : [])),
      el("td", {}, type),
      el("td", {}, text, ...schemas.parts(schema).map(partElement)),
    ),
  );
  const made = el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...body));
  return el("div", { class: "scroll" }, made);
}

function required() {
  return el("span", { class: "meta" }, " required");
}

// Shows the fields of an inner object when it is opened: types may contain themselves.
function partElement(schema) {
  const details = el("details", {}, el("summary", {}, schemas.typeText(schema)));
  const text = schemas.resolve(schema).description;
  const fill = () => details.append(...(text ? [el("p", {}, text)] : []), fieldTable(schema));
  details.addEventListener("toggle", fill, { once: true });
  return details;
}

function answerElement([status, { description, content = {} }]) {
  const tables = Object.entries(content).flatMap(([type, { schema }]) => {
    const fields = schemas.fields(schema);
    return [el("p", { class: "meta" }, type), ...(fields.length ? [table(fields)] : [])];
  });
  const summary = el("summary", {}, el("code", {}, status), ` ${description}`);
  return el("details", { class: "answer-kind" }, summary, ...tables);
}

function tryElement(operation) {
  const { path, method, requestBody } = operation;
  const names = [...path.matchAll(/{(\w+)}/g)].map(([, name]) => name);
  const inputs = names.map((name) => el("input", { name, value: name === "model" ? model : "" }));
  const body = el("textarea", { class: "code", rows: 12, spellcheck: "false" });
  body.value = requestBody ? JSON.stringify(exampleBody(path, model), null, 2) : "";
  const output = el("pre", { class: "block", hidden: true, tabindex: 0, "aria-label": "Answer" });
  const status = el("span", { class: "meta", role: "status" });
  const submit = el("button", { type: "submit", class: "primary" }, "Send");
  const onsubmit = (event) => {
    event.preventDefault();
    const target = inputs.reduce(
      (place, input) => place.replace(`{${input.name}}`, encodeURIComponent(input.value)),
      path,
    );
    const sent = { method, body: requestBody ? body.value : undefined };
    sendTo(target, sent, { output, status, submit });
  };
  return el(
    "form",
    { class: "try", "aria-label": "Try it", onsubmit },
    ...inputs.map((input) => el("label", {}, `${input.name} `, input)),
    requestBody ? el("label", {}, "Body ", body) : null,
    el("div", { class: "row" }, submit, status),
    output,
  );
}

async function sendTo(path, { method, body }, { output, status, submit }) {
  const key = /^\/admin|lora_adapter/.test(path) ? "admin" : "user";
  const began = performance.now();
  submit.disabled = true;
  output.hidden = true;
  setText(status, "waits for the answer");
  try {
    const response = await send(path, { key, method: method.toUpperCase(), body });
    output.hidden = false;
    await showBody(response, output);
    setText(status, `${response.status} after ${seconds((performance.now() - began) / 1000)}`);
  } catch (error) {
    output.hidden = false;
    setText(output, error.message);
    setText(status, error.status ? String(error.status) : "");
  }
  submit.disabled = false;
}

async function showBody(response, output) {
  if (response.headers.get("content-type")?.startsWith(JSON_TYPE)) {
    setText(output, JSON.stringify(await response.json(), null, 2));
    return;
  }
  output.textContent = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    output.append(part.value);
  }
}

start();
