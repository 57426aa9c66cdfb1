// The conversation on the page: asking, streaming, stopping, asking again, editing; and keeping it all.
import { fetchAnswer, newAnswer } from "./answer.js";
import { saveConversation, titleFrom } from "./conversations.js";
import { byId, h } from "./dom.js";
import { MessageView } from "./message_view.js";
import { requestBody, SettingError } from "./request_body.js";
import { hide as hideTokenCard } from "./token_view.js";

const SAVE_EVERY_MS = 2000;
const NEAR_END_PX = 80;

/**
 * The chat. `host` says what it needs from the rest of the page: `model()`, `askForKey()`, `checkSettings()`,
 * `showSetting(name, asking)`, `onChange()` (running or not, title, saved) and `announce(text)`.
 */
export class Chat {
  constructor(host) {
    this.host = host;
    this.log = byId("log");
    this.list = byId("messages");
    this.views = new Map();
    this.chat = null;
    this.abort = null;
    this.follows = true;
    this.log.addEventListener("scroll", () => this.#onScroll(), { passive: true });
    byId("to-end").addEventListener("click", () => this.scrollToEnd());
    addEventListener("pagehide", () => this.save());
    document.addEventListener("visibilitychange", () => document.hidden && this.save());
  }

  get running() {
    return this.abort !== null;
  }

  /** Show another conversation; an answer that is being made is stopped and kept. */
  show(chat) {
    this.stop();
    this.save();
    this.chat = chat;
    this.views.clear();
    hideTokenCard();
    this.list.replaceChildren(...chat.messages.map((message) => this.#viewOf(message).root));
    this.#refresh();
    this.scrollToEnd();
  }

  /** Ask `text`. */
  async send(text) {
    if (this.running || !text.trim()) return;
    if (!this.chat.title) this.chat.title = titleFrom(text);
    this.#dropFailed();
    this.#add({ role: "user", content: text });
    await this.#answer();
  }

  /** End the answer that is being made; what came is kept. */
  stop() {
    this.abort?.abort();
  }

  /** Make the answer `message` anew; what follows it goes. */
  async regenerate(message) {
    if (this.running) return;
    this.#cutAt(this.chat.messages.indexOf(message));
    await this.#answer();
  }

  /** Go on with an answer that was cut off. */
  async goOn(message) {
    if (this.running) return;
    await this.#run(message, this.chat.messages, true);
  }

  /** Replace the text of `message`. A question is asked anew. */
  async edit(message, text) {
    if (this.running) return;
    message.content = text;
    if (message.role === "assistant") {
      message.tokens = null;
      this.views.get(message).update();
      this.save();
      return;
    }
    const index = this.chat.messages.indexOf(message);
    if (index === 0) this.chat.title = titleFrom(text);
    this.views.get(message).update();
    this.#cutAt(index + 1);
    await this.#answer();
  }

  /** Edit the last question. */
  editLast() {
    const last = this.chat.messages.findLast((message) => message.role === "user");
    if (last) this.views.get(last).edit();
  }

  /** Give the results of the last answer's tool calls, in order. */
  async answerCalls(message, results) {
    if (this.running) return;
    message.tool_calls.forEach((call, index) =>
      this.#add({ role: "tool", tool_call_id: call.id, content: results[index] }),
    );
    this.views.get(message).update();
    await this.#answer();
  }

  save() {
    if (!this.chat) return;
    this.savedAt = performance.now();
    this.host.onSaved(saveConversation(this.chat));
  }

  scrollToEnd() {
    this.follows = true;
    this.log.scrollTop = this.log.scrollHeight;
    byId("to-end").hidden = true;
  }

  // --- one answer ---------------------------------------------------------------------------------------------

  async #answer() {
    const asked = [...this.chat.messages];
    const message = newAnswer();
    this.#add(message);
    await this.#run(message, asked, false);
  }

  async #run(message, asked, goOn) {
    const { chat } = this;
    const abort = new AbortController();
    let body;
    try {
      this.host.checkSettings();
      body = requestBody(chat, asked, this.host.model(), goOn);
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      Object.assign(message, { status: "error", error: { message: error.message, status: null, param: error.param } });
      this.#finish(message);
      return;
    }
    this.abort = abort;
    chat.updated = Date.now();
    this.#refresh();
    this.scrollToEnd();
    this.host.announce("The model answers.");
    const painter = new Painter(() => this.#paint(message));
    let needsKey = false;
    try {
      await fetchAnswer(message, body, abort.signal, () => painter.request());
    } catch (error) {
      if (error.status !== 401) throw error;
      needsKey = true;
    } finally {
      painter.cancel();
      if (this.abort === abort) this.abort = null;
      this.#finish(message, chat);
    }
    if (needsKey && (await this.host.askForKey()) && chat === this.chat) await this.regenerate(message);
  }

  #paint(message) {
    const view = this.views.get(message);
    if (!view) return; // another conversation is shown
    view.update();
    if (this.follows) this.log.scrollTop = this.log.scrollHeight;
    if (performance.now() - (this.savedAt ?? 0) > SAVE_EVERY_MS) this.save();
  }

  #finish(message, chat = this.chat) {
    chat.updated = Date.now();
    if (chat === this.chat) {
      this.#paint(message);
      this.save();
    } else saveConversation(chat);
    this.#refresh();
    const said = message.error ? `Error: ${message.error.message}` : message.content;
    this.host.announce(said || (message.status === "stopped" ? "Stopped." : "The answer is empty."));
  }

  // --- the list -----------------------------------------------------------------------------------------------

  #add(message) {
    this.chat.messages.push(message);
    this.list.append(this.#viewOf(message).root);
    this.#refresh();
  }

  #viewOf(message) {
    const view = new MessageView(message, {
      running: () => this.running,
      isLast: () => this.chat.messages.at(-1) === message,
      awaitsResults: () => this.chat.messages.at(-1) === message,
      regenerate: () => this.regenerate(message),
      goOn: () => this.goOn(message),
      save: (text) => this.edit(message, text),
      answerCalls: (results) => this.answerCalls(message, results),
      showSetting: (name, asking) => this.host.showSetting(name, asking),
    });
    this.views.set(message, view);
    return view;
  }

  #cutAt(index) {
    for (const message of this.chat.messages.splice(index)) {
      this.views.get(message).root.remove();
      this.views.delete(message);
    }
  }

  /** An answer that failed before it began says nothing to the model; the next question takes its place. */
  #dropFailed() {
    const last = this.chat.messages.at(-1);
    if (last?.role === "assistant" && !last.content && !last.tool_calls.length) this.#cutAt(this.chat.messages.length - 1);
  }

  #refresh() {
    byId("empty").hidden = this.chat.messages.length > 0;
    this.host.onChange();
  }

  #onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.log;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    byId("to-end").hidden = this.follows;
    hideTokenCard();
  }
}

/** Calls `paint` at most once a frame, and rests between frames in proportion to how long painting took. */
class Painter {
  constructor(paint) {
    this.paint = paint;
    this.frame = null;
    this.notBefore = 0;
  }

  request() {
    this.frame ??= requestAnimationFrame((now) => this.#run(now));
  }

  #run(now) {
    this.frame = null;
    if (now < this.notBefore) {
      this.request();
      return;
    }
    const began = performance.now();
    this.paint();
    this.notBefore = performance.now() + 2 * (performance.now() - began);
  }

  cancel() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
  }
}

/** The examples of an empty conversation. */
export function buildExamples(texts, choose) {
  byId("examples").replaceChildren(
    ...texts.map((text) => h("li", {}, h("button", { type: "button", class: "example", onclick: () => choose(text) }, text))),
  );
}
