// Reads server-sent events from the chunks of a response body.

export class EventParser {
  #rest = "";

  // Returns the events that `text` completes: {event, data} or {comment}.
  push(text) {
    const blocks = (this.#rest + text).split(/\r?\n\r?\n/);
    this.#rest = blocks.pop();
    return blocks.flatMap(parseBlock);
  }
}

function parseBlock(block) {
  const found = [];
  let event = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith(":")) found.push({ comment: line.slice(1).trim() });
    const [, name, value] = line.match(/^([^:]+):? ?(.*)$/s) ?? [];
    if (name === "event") event = value;
    if (name === "data") data.push(value);
  }
  if (data.length) found.push({ event, data: data.join("\n") });
  return found;
}

// Yields the events of a response until it ends.
export async function* eventsOf(response) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
