// Conversations, kept in the browser under one name each, so that two tabs do not overwrite each other's.
import { namesOf, readJSON, readText, removeText, writeJSON, writeText } from "./storage.js";

const CHAT = "chat:";
const CURRENT = "current";

/** What a request may set; null, "" and false leave it to the server. */
export const DEFAULT_SETTINGS = {
  system: "",
  temperature: null,
  top_p: null,
  top_k: null,
  min_p: null,
  max_tokens: null,
  seed: null,
  presence_penalty: null,
  frequency_penalty: null,
  repetition_penalty: null,
  stop: "",
  reasoning_effort: "",
  probabilities: false,
  top_logprobs: 5,
  tools: "",
};

/**
 * A new conversation with the settings of the last one. Messages are {role: "user", content}, {role: "tool",
 * tool_call_id, content} and {role: "assistant", content, reasoning, tool_calls: [{id, name, arguments}], status,
 * error, finish_reason, tokens, stats}; `status` is streaming, waiting, done, stopped or error.
 */
export function newConversation(settings = DEFAULT_SETTINGS) {
  const now = Date.now();
  const id = `${now.toString(36)}-${Math.floor(Math.random() * 0xffffffff).toString(36)}`;
  return { id, title: "", created: now, updated: now, settings: { ...DEFAULT_SETTINGS, ...settings }, messages: [] };
}

/** All that are kept, the last used first. */
export function listConversations() {
  const found = namesOf(CHAT).map((name) => readJSON(name, null));
  return found.filter((chat) => isConversation(chat)).sort((one, other) => other.updated - one.updated);
}

const isConversation = (chat) => typeof chat?.id === "string" && Array.isArray(chat.messages);

export function loadConversation(id) {
  const chat = readJSON(CHAT + id, null);
  if (!isConversation(chat)) return null;
  chat.settings = { ...DEFAULT_SETTINGS, ...chat.settings };
  for (const message of chat.messages) {
    // The page was left while it came.
    if (message.status === "streaming" || message.status === "waiting") message.status = "stopped";
  }
  return chat;
}

/** Keep it. Where the storage is full, the token probabilities go first. Returns whether it is kept. */
export function saveConversation(chat) {
  if (!chat.messages.length) return true;
  if (writeJSON(CHAT + chat.id, chat)) return true;
  const messages = chat.messages.map(({ tokens, ...message }) => message);
  return writeJSON(CHAT + chat.id, { ...chat, messages });
}

export const deleteConversation = (id) => removeText(CHAT + id);
export const deleteAllConversations = () => namesOf(CHAT).forEach((name) => removeText(name));

/** The conversation that this tab shows, over a reload; a new tab begins with the last one. */
export const currentId = () => readText(CURRENT, "sessionStorage") ?? readText(CURRENT);
export function setCurrentId(id) {
  writeText(CURRENT, id, "sessionStorage");
  writeText(CURRENT, id);
}

export const titleOf = (chat) => chat.title || "New conversation";

/** The beginning of the first question. */
export function titleFrom(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line;
}

/** A conversation as a Markdown document. */
export function asMarkdown(chat) {
  const parts = [`# ${titleOf(chat)}`];
  if (chat.settings.system) parts.push(`**System**\n\n${chat.settings.system}`);
  for (const message of chat.messages) {
    const name = { user: "You", assistant: "Assistant", tool: "Tool result" }[message.role];
    const calls = (message.tool_calls ?? []).map((call) => `\`\`\`json\n${call.name} ${call.arguments}\n\`\`\``);
    parts.push([`**${name}**`, message.content, ...calls].filter(Boolean).join("\n\n"));
  }
  return `${parts.join("\n\n")}\n`;
}
