// One answer as it comes: the request, its chunks gathered into a message, its times, and another try when the server
// is busy.
import { ServerError, streamChat } from "./api.js";

const MAX_TRIES = 5;
const LONGEST_WAIT_SECONDS = 60;

/** The model's next message, still empty. */
export const newAnswer = () => ({
  role: "assistant",
  content: "",
  reasoning: "",
  tool_calls: [],
  status: "streaming",
  error: null,
  finish_reason: null,
  tokens: null,
  stats: null,
});

/**
 * Fill `message` from the server; `onChange` is called after every change. Resolves when it is complete, stopped
 * (`signal`) or failed: `message.status` and `message.error` say which. Only an API key's lack is thrown.
 */
export async function fetchAnswer(message, body, signal, onChange) {
  Object.assign(message, { status: "streaming", error: null, finish_reason: null });
  const timer = new Timer(message);
  for (let tries = 1; ; tries += 1) {
    try {
      timer.begin();
      for await (const chunk of streamChat(body, signal)) {
        addChunk(message, chunk, timer);
        onChange();
      }
      message.status = "done";
    } catch (error) {
      if (error.name === "AbortError" || signal.aborted) message.status = "stopped";
      else if (!(error instanceof ServerError)) {
        Object.assign(message, { status: "error", error: { message: String(error), status: 0, param: null } });
        throw error;
      } else if (error.status === 401) {
        message.status = "error";
        message.error = describe(error);
        throw error;
      } else if (error.status === 503 && error.retryAfter !== null && tries < MAX_TRIES) {
        await waitFor(message, error, signal, onChange);
        if (!signal.aborted) continue;
        message.status = "stopped";
      } else {
        message.status = "error";
        message.error = describe(error);
      }
    }
    timer.end();
    onChange();
    return;
  }
}

const describe = ({ message, status, param }) => ({ message, status, param });

/** Count down to the next try. */
async function waitFor(message, error, signal, onChange) {
  message.status = "waiting";
  for (let left = Math.min(LONGEST_WAIT_SECONDS, Math.max(1, Math.ceil(error.retryAfter))); left > 0; left -= 1) {
    message.error = { ...describe(error), retryIn: left };
    onChange();
    await new Promise((resolve) => {
      const timeout = setTimeout(resolve, 1000);
      signal.addEventListener("abort", () => (clearTimeout(timeout), resolve()), { once: true });
    });
    if (signal.aborted) break;
  }
  Object.assign(message, { status: "streaming", error: null });
  onChange();
}

function addChunk(message, chunk, timer) {
  if (chunk.usage) timer.usage(chunk.usage);
  const [choice] = chunk.choices;
  if (!choice) return;
  const { delta, logprobs } = choice;
  if (delta.content || delta.reasoning || delta.tool_calls) timer.token();
  if (delta.reasoning) {
    message.reasoning += delta.reasoning;
    timer.reasoning();
  }
  if (delta.content) message.content += delta.content;
  for (const part of delta.tool_calls ?? []) addToolCall(message, part);
  if (logprobs?.content) (message.tokens ??= []).push(...compactTokens(logprobs.content));
  if (choice.finish_reason) message.finish_reason = choice.finish_reason;
}

function addToolCall(message, { index, id, function: part }) {
  const calls = message.tool_calls;
  while (calls.length <= index) calls.push({ id: "", name: "", arguments: "" });
  if (id) calls[index].id = id;
  if (part?.name) calls[index].name += part.name;
  if (part?.arguments) calls[index].arguments += part.arguments;
}

/** Tokens as [text, logprob, bytes or null, [[text, logprob], …]]: they are kept in the browser, which has little room. */
function compactTokens(content) {
  return content.map(({ token, logprob, bytes, top_logprobs: top }) => [
    token,
    round(logprob),
    token.includes("�") ? bytes : null,
    top.map((other) => [other.token, round(other.logprob)]),
  ]);
}

const round = (logprob) => Math.round(logprob * 1e4) / 1e4;

/** The times of an answer, as its reader sees them, into `message.stats` (milliseconds). */
class Timer {
  constructor(message) {
    this.message = message;
  }

  begin() {
    this.began = performance.now();
    this.first = null;
    this.message.stats = null;
    this.counts = null;
    this.reasoned = null;
  }

  token() {
    this.last = performance.now();
    this.first ??= this.last;
  }

  reasoning() {
    this.reasoned = performance.now();
    this.message.reasoning_ms = Math.round(this.reasoned - this.first);
  }

  usage(counts) {
    this.counts = counts;
  }

  end() {
    if (this.first === null) return;
    this.message.stats = {
      ttft_ms: Math.round(this.first - this.began),
      stream_ms: Math.round(this.last - this.first),
      prompt_tokens: this.counts?.prompt_tokens ?? null,
      completion_tokens: this.counts?.completion_tokens ?? null,
    };
  }
}
