// Requests to the API of this server. Keys stay in this module's memory until the page is reloaded.

import { askForKey } from "./key_dialog.js";

const keys = { user: "", admin: "" };

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function hasKey(kind) {
  return keys[kind] !== "";
}

// Sends a request, and returns its response if it succeeded. `key` is "user" or "admin": the page
// asks for this key when the server refuses the request without it.
export async function send(path, { key = "user", method = "GET", body, signal } = {}) {
  for (;;) {
    const response = await once(path, key, method, body, signal);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (error.status !== 401) throw error;
    const given = await askForKey(key, hasKey(key) ? error.message : "");
    if (given === null) throw error;
    keys[key] = given;
  }
}

export async function sendJson(path, options) {
  return (await send(path, options)).json();
}

async function once(path, key, method, body, signal) {
  const headers = {};
  if (keys[key]) headers.authorization = `Bearer ${keys[key]}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const text = typeof body === "string" || body === undefined ? body : JSON.stringify(body);
  try {
    return await fetch(relative(path), { method, headers, body: text, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.", 0, "unreachable");
  }
}

// The page may be served under a prefix, which only the browser knows.
export function relative(path) {
  return path.replace(/^\//, "");
}

async function errorOf(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new ApiError(error.message, response.status, error.code);
  } catch {
    return new ApiError(text || response.statusText, response.status, null);
  }
}
