// A request as text for a shell, and for Python.

export function curlText(base, body, hasKey) {
  const lines = [`curl ${base}/v1/chat/completions`];
  if (body.stream) lines[0] = `curl -N ${base}/v1/chat/completions`;
  if (hasKey) lines.push(`  -H "authorization: Bearer $SWELL_KEY"`);
  lines.push(`  -H 'content-type: application/json'`);
  lines.push(`  -d ${shellQuoted(JSON.stringify(body, null, 2))}`);
  return lines.join(" \\\n");
}

function shellQuoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

// Parameters that OpenAI's client does not know go through its `extra_body`.
const EXTRA = new Set(["top_k", "min_p"]);

export function pythonText(base, body, hasKey) {
  const fields = Object.entries(body).filter(([name]) => !EXTRA.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => EXTRA.has(name)));
  const lines = fields.map(([name, value]) => `    ${name}=${pythonValue(value, 1)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${pythonValue(extra, 1)},`);
  const key = hasKey ? `os.environ["SWELL_KEY"]` : `"none"`;
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${pythonString(`${base}/v1`)}, api_key=${key})`,
    "stream = client.chat.completions.create(",
    ...lines,
    ")",
    "for chunk in stream:",
    "    for choice in chunk.choices:",
    `        print(choice.delta.content or "", end="", flush=True)`,
    "",
  ].join("\n");
}

export function pythonValue(value, depth = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "number") return String(value);
  if (typeof value === "string") return pythonString(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const inner = "    ".repeat(depth + 1);
  const parts = Array.isArray(value)
    ? value.map((one) => inner + pythonValue(one, depth + 1))
    : Object.entries(value).map(
        ([name, one]) => `${inner}${pythonString(name)}: ${pythonValue(one, depth + 1)}`,
      );
  if (!parts.length) return open + close;
  return `${open}\n${parts.join(",\n")},\n${"    ".repeat(depth)}${close}`;
}

// A JSON string is a Python string, except for the escapes of surrogates, which JSON.stringify only
// writes for lone ones.
function pythonString(text) {
  return JSON.stringify(text.toWellFormed());
}
