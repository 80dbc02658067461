// Reads the schemas of an OpenAPI document. Without elements of the page.

export class Schemas {
  constructor(document) {
    this.document = document;
  }

  // Follows a reference.
  resolve(schema) {
    if (!schema?.$ref) return schema ?? {};
    const parts = schema.$ref.replace(/^#\//, "").split("/");
    return parts.reduce((place, part) => place[part], this.document);
  }

  // Returns the type in one line, such as "integer or null" or "array of Message".
  typeText(schema) {
    if (schema.$ref) return schema.$ref.split("/").pop();
    const choices = schema.anyOf ?? schema.oneOf;
    if (choices) return [...new Set(choices.map((one) => this.typeText(one)))].join(" or ");
    if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
    if ("const" in schema) return JSON.stringify(schema.const);
    if (schema.type === "array") return `array of ${this.typeText(schema.items ?? {})}`;
    return [schema.type ?? "any"].flat().join(" or ");
  }

  // Returns the fields of an object: {name, type, isRequired, text, schema}.
  fields(schema) {
    const { properties = {}, required = [] } = this.resolve(schema);
    return Object.entries(properties).map(([name, field]) => ({
      name,
      type: this.typeText(field),
      isRequired: required.includes(name),
      text: [field.description, limitsText(field)].filter(Boolean).join(" "),
      schema: field,
    }));
  }

  // Returns the object types that a field leads to.
  parts(schema) {
    const found = [schema.items, ...(schema.anyOf ?? []), ...(schema.oneOf ?? [])].filter(Boolean);
    if (schema.$ref && this.resolve(schema).properties) return [schema];
    return found.flatMap((one) => this.parts(one));
  }
}

function limitsText(schema) {
  const names = { minimum: "at least", maximum: "at most", exclusiveMinimum: "more than" };
  const limits = Object.entries(names).filter(([name]) => name in schema);
  const texts = limits.map(([name, text]) => `${text} ${schema[name]}`);
  if (schema.default !== undefined && schema.default !== null) {
    texts.push(`default ${JSON.stringify(schema.default)}`);
  }
  return texts.length ? `(${texts.join(", ")})` : "";
}

export function operationsOf(document) {
  return Object.entries(document.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, ...operation })),
  );
}

const GROUPS = [
  ["Operators", /^\/admin|lora_adapter/],
  ["Embeddings, scores", /embeddings|classify|score|rerank/],
  ["Sessions", /sessions/],
  ["Answers", /^\/v1\/(chat|completions|responses|messages)/],
  ["Models and tokens", /^\/v1\/models|tokenize/],
  ["Server", /./],
];
const ORDER = ["Answers", "Models and tokens", GROUPS[1][0], "Sessions", "Server", "Operators"];

// Returns [title, operations] for each group, in the order of the page.
export function grouped(operations) {
  const groups = new Map(ORDER.map((title) => [title, []]));
  for (const operation of operations) {
    groups.get(GROUPS.find(([, pattern]) => pattern.test(operation.path))[0]).push(operation);
  }
  return [...groups].filter(([, members]) => members.length);
}
