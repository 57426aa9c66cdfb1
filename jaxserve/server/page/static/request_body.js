// The body of a chat completion request, from a conversation and its settings.

/** Settings that are sent as they are. */
const PLAIN = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
];

/** A setting that cannot be sent; `param` is its name. */
export class SettingError extends Error {
  constructor(message, param) {
    super(message);
    this.param = param;
  }
}

/**
 * The request that continues `messages`.
 *
 * Only what is set is sent: the server's (the model's) defaults hold for the rest. With `goOn` the last message, an
 * answer that was cut off, is continued.
 */
export function requestBody(chat, messages, model, goOn = false) {
  const { settings } = chat;
  const body = {
    messages: requestMessages(settings.system, messages),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (model) body.model = model;
  for (const name of PLAIN) {
    if (settings[name] !== null) body[name] = settings[name];
  }
  const stop = stopStrings(settings.stop);
  if (stop.length) body.stop = stop;
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  if (settings.probabilities) Object.assign(body, { logprobs: true, top_logprobs: settings.top_logprobs });
  const tools = parseTools(settings.tools);
  if (tools.length) body.tools = tools;
  if (goOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return body;
}

function requestMessages(system, messages) {
  const sent = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    if (message.role !== "assistant") {
      const { role, content, tool_call_id: id } = message;
      sent.push(id === undefined ? { role, content } : { role, content, tool_call_id: id });
      continue;
    }
    const calls = message.tool_calls ?? [];
    if (!message.content && !calls.length) continue; // it failed before it began
    const answer = { role: "assistant", content: message.content };
    if (calls.length) {
      answer.tool_calls = calls.map(({ id, name, arguments: text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }));
    }
    sent.push(answer);
  }
  return sent;
}

/** One stop string a line; `\n`, `\t` and `\\` stand for what cannot be typed. */
export function stopStrings(text) {
  const escapes = { n: "\n", t: "\t", "\\": "\\" };
  return text
    .split("\n")
    .filter((line) => line !== "")
    .map((line) => line.replace(/\\([nt\\])/g, (_, name) => escapes[name]));
}

/** The functions in `text`: a JSON list, each as OpenAI's chat takes it or only its inner object. */
export function parseTools(text) {
  if (!text.trim()) return [];
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new SettingError(`Tools: this is no JSON (${error.message}).`, "tools");
  }
  tools = Array.isArray(tools) ? tools : [tools];
  return tools.map((tool) => {
    const known = tool?.type === "function" ? tool : { type: "function", function: tool };
    if (typeof known.function?.name !== "string") throw new SettingError("Tools: each needs a name.", "tools");
    return known;
  });
}
