// Talking to the server that served this page: the API key, requests, event streams, and what goes wrong.
import { BASE } from "./base.js";
import { readText, removeText, writeText } from "./storage.js";

const KEY = "api-key";

/** A request that failed. `status` 0: no (whole) answer came. `retryAfter` is in seconds. */
export class ServerError extends Error {
  constructor(message, { status = 0, param = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

let apiKey = readText(KEY, "sessionStorage") ?? readText(KEY) ?? "";

export const hasKey = () => apiKey !== "";

/** Use `key` from now on: until the tab is closed, or for good where `remember`. */
export function setKey(key, remember) {
  apiKey = key;
  removeText(KEY);
  removeText(KEY, "sessionStorage");
  if (key) writeText(KEY, key, remember ? "localStorage" : "sessionStorage");
}

async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  if (apiKey) headers.set("authorization", `Bearer ${apiKey}`);
  let response;
  try {
    response = await fetch(new URL(path, BASE), { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is it running?");
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  let error = {};
  const text = await response.text().catch(() => "");
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    // Not this server's own answer: a proxy's, perhaps.
  }
  const message = error.message ?? `The server answered ${response.status} ${response.statusText}.`;
  const seconds = Number.parseFloat(response.headers.get("retry-after") ?? "");
  return new ServerError(message, {
    status: response.status,
    param: error.param ?? null,
    retryAfter: Number.isFinite(seconds) ? seconds : null,
  });
}

export const getJSON = async (path, options) => (await request(path, options)).json();
export const getText = async (path, options) => (await request(path, options)).text();

/** Whether the server answers and its engine lives: "ok", "dead" (the engine) or "away". */
export async function health() {
  try {
    await request("health", { signal: AbortSignal.timeout(5000) });
    return "ok";
  } catch (error) {
    return error instanceof ServerError && error.status === 503 ? "dead" : "away";
  }
}

/** The chunks of a streamed chat completion; throws ServerError for whatever keeps it from being complete. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of serverSentEvents(response)) {
    if (data === "[DONE]") return;
    const chunk = parseEvent(data);
    if (chunk.error) throw new ServerError(chunk.error.message, { status: chunk.error.code, param: chunk.error.param });
    yield chunk;
  }
  throw new ServerError("The connection to the server broke off before the answer was complete.");
}

function parseEvent(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ServerError("What came is no part of an answer: something between here and the server changed it.");
  }
}

/** The data of each event of a response. Comments and other fields are skipped. */
async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError("The connection to the server broke off before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
