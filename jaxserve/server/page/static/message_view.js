// One message on the page: its text, what is folded (reasoning, tool calls), what went wrong, and what can be done.
import { copyButton, h, icon, iconButton } from "./dom.js";
import { codeBlock, MarkdownStream } from "./markdown.js";
import { TokenView } from "./token_view.js";

const NOTES = {
  length: "The answer was cut off at the token limit.",
  stopped: "Stopped.",
};

/**
 * The view of `message`. `actions`: regenerate(), goOn(), save(text), answerCalls(results) – whatever of them is
 * possible, and `running()`: whether some answer is being made.
 */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.root = h("article", { class: `message ${message.role}`, "aria-label": NAMES[message.role] });
    this.body = h("div", { class: "text" });
    if (message.role === "assistant") this.#buildAnswer();
    else this.#buildQuestion();
    this.update();
  }

  // --- what people write --------------------------------------------------------------------------------------

  #buildQuestion() {
    if (this.message.role === "tool") this.root.append(h("p", { class: "label" }, "Tool result"));
    this.toolbar = h(
      "div",
      { class: "toolbar" },
      iconButton("edit", "Edit this message", () => this.edit()),
      copyButton(() => this.message.content, "Copy message"),
    );
    this.root.append(this.body, this.toolbar);
  }

  /** Write over the message; a question is asked anew, and what followed it goes. */
  edit() {
    if (this.actions.running()) return;
    const asked = this.message.role !== "assistant";
    const area = h("textarea", { class: "edit", value: this.message.content, "aria-label": "Edit the message", rows: 3 });
    const close = () => {
      form.replaceWith(this.content());
      this.root.classList.remove("editing");
      this.toolbar.querySelector("button")?.focus();
    };
    const save = () => {
      if (this.actions.running() || (asked && !area.value.trim())) return;
      close();
      this.actions.save(area.value);
    };
    const form = h(
      "div",
      { class: "editor" },
      area,
      h(
        "div",
        { class: "row end" },
        asked ? h("p", { class: "muted grow" }, "What follows this message is replaced.") : null,
        h("button", { type: "button", class: "button", onclick: close }, "Cancel"),
        h("button", { type: "button", class: "button primary", onclick: save }, asked ? "Send" : "Save"),
      ),
    );
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    });
    this.content().replaceWith(form);
    this.root.classList.add("editing");
    area.style.height = `${Math.min(area.scrollHeight + 4, innerHeight / 2)}px`;
    area.focus();
  }

  content() {
    return this.answer ?? this.body;
  }

  // --- what the model writes ----------------------------------------------------------------------------------

  #buildAnswer() {
    this.markdown = new MarkdownStream(this.body);
    this.reasoningText = h("div", { class: "text" });
    this.reasoningMarkdown = new MarkdownStream(this.reasoningText);
    this.reasoningLabel = h("span", {}, "Reasoning");
    this.reasoning = h(
      "details",
      { class: "fold reasoning", hidden: true, ontoggle: () => this.#updateReasoning() },
      h("summary", {}, icon("chevron"), this.reasoningLabel),
      this.reasoningText,
    );
    this.tokens = h("div", { class: "tokens", hidden: true });
    this.tokenView = new TokenView(this.tokens);
    this.calls = h("div", { class: "calls" });
    this.answer = h("div", { class: "answer" }, this.body, this.tokens);
    this.dots = h("div", { class: "dots", "aria-hidden": "true" }, h("i"), h("i"), h("i"));
    this.note = h("div", { class: "note", hidden: true });
    this.stats = h("span", { class: "stats" });
    this.tokensButton = iconButton("tokens", "Token probabilities", () => this.#toggleTokens(), { "aria-pressed": "false" });
    this.textButtons = [
      copyButton(() => this.message.content, "Copy answer"),
      iconButton("edit", "Edit this answer", () => this.edit()),
    ];
    this.toolbar = h(
      "div",
      { class: "toolbar" },
      iconButton("refresh", "Regenerate this answer", () => this.actions.regenerate()),
      ...this.textButtons,
      this.tokensButton,
      this.stats,
    );
    this.showsTokens = this.message.tokens !== null;
    this.root.append(this.reasoning, this.answer, this.dots, this.calls, this.note, this.toolbar);
  }

  #toggleTokens() {
    this.showsTokens = !this.showsTokens;
    this.update();
  }

  /** Bring the view up to date with the message. */
  update() {
    const { message } = this;
    if (message.role !== "assistant") {
      this.body.textContent = message.content;
      return;
    }
    const busy = message.status === "streaming" || message.status === "waiting";
    if (busy && !this.wasBusy && message.tokens === null) this.showsTokens = true;
    this.wasBusy = busy;
    this.root.classList.toggle("streaming", message.status === "streaming");
    this.root.setAttribute("aria-busy", String(busy));
    const asTokens = this.showsTokens && message.tokens !== null;
    this.body.hidden = asTokens || message.content === "";
    this.tokens.hidden = !asTokens;
    if (asTokens) this.tokenView.update(message.tokens);
    else this.markdown.update(message.content, !busy);
    this.tokensButton.hidden = message.tokens === null;
    this.tokensButton.setAttribute("aria-pressed", String(asTokens));
    this.dots.hidden = message.status !== "streaming" || message.content !== "" || message.tool_calls.length > 0;
    this.#updateReasoning();
    this.#updateCalls(busy);
    this.#updateNote();
    this.stats.textContent = statsText(message);
    this.toolbar.hidden = busy;
    for (const button of this.textButtons) button.hidden = message.content === "";
  }

  #updateReasoning() {
    const { reasoning, content, status, reasoning_ms: ms } = this.message;
    this.reasoning.hidden = !reasoning;
    if (!reasoning) return;
    const thinking = status === "streaming" && !content;
    this.reasoning.classList.toggle("thinking", thinking);
    this.reasoningLabel.textContent = thinking ? "Thinking…" : ms ? `Reasoning, ${(ms / 1000).toFixed(1)} s` : "Reasoning";
    // While it is folded nobody sees it.
    if (this.reasoning.open) this.reasoningMarkdown.update(reasoning, !thinking);
  }

  #updateCalls(busy) {
    const calls = this.message.tool_calls;
    const shown = JSON.stringify(calls) + busy + this.actions.awaitsResults();
    if (shown === this.shownCalls) return;
    this.shownCalls = shown;
    const open = [...this.calls.querySelectorAll("details")].map((details) => details.open);
    const folds = calls.map((call, index) =>
      h(
        "details",
        { class: "fold call", open: open[index] ?? false },
        h("summary", {}, icon("chevron"), h("span", {}, "Tool call ", h("code", {}, call.name || "…"))),
        codeBlock("json", pretty(call.arguments)),
      ),
    );
    this.calls.replaceChildren(...folds, ...(calls.length && !busy && this.actions.awaitsResults() ? [this.#resultForm()] : []));
  }

  #resultForm() {
    const areas = this.message.tool_calls.map((call) =>
      h("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}` }),
    );
    const send = () => this.actions.answerCalls(areas.map((area) => area.value));
    return h(
      "div",
      { class: "results" },
      ...areas,
      h("div", { class: "row end" }, h("button", { type: "button", class: "button", onclick: send }, areas.length > 1 ? "Send results" : "Send result")),
    );
  }

  #updateNote() {
    const { error, status, finish_reason: reason } = this.message;
    const text = error ? "" : status === "stopped" ? NOTES.stopped : reason === "length" ? NOTES.length : "";
    const shown = JSON.stringify([error, text, status]);
    if (shown === this.shownNote) return;
    this.shownNote = shown;
    this.note.hidden = !error && !text;
    this.note.classList.toggle("error", error !== null && status === "error");
    if (error) this.note.replaceChildren(...this.#errorNodes(error, status));
    else this.note.replaceChildren(h("p", {}, text), this.#goOnButton());
  }

  #errorNodes({ message, status, param, retryIn }, state) {
    if (state === "waiting") {
      return [h("p", {}, h("strong", {}, "The server is busy. "), message), h("p", { class: "muted" }, `Trying again in ${retryIn} s. Esc gives up.`)];
    }
    const kept = this.message.content ? " What arrived is kept." : "";
    const head = status === null ? "Not sent. " : status === 0 ? "No connection. " : status === 400 ? "The server refused this request. " : `Error ${status}. `;
    const buttons = [h("button", { type: "button", class: "button", onclick: () => this.actions.regenerate() }, "Try again")];
    if (param && this.actions.showSetting(param, true)) {
      buttons.push(h("button", { type: "button", class: "button", onclick: () => this.actions.showSetting(param) }, "Show the setting"));
    }
    return [h("p", { role: "alert" }, h("strong", {}, head), message, kept), h("div", { class: "row" }, ...buttons)];
  }

  #goOnButton() {
    if (!this.message.content || this.message.tool_calls.length || !this.actions.isLast()) return "";
    return h("button", { type: "button", class: "button", onclick: () => this.actions.goOn() }, "Continue");
  }
}

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool result" };

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is still coming, or no JSON
  }
}

function statsText({ stats }) {
  if (!stats) return "";
  const { ttft_ms: ttft, stream_ms: ms, completion_tokens: tokens, prompt_tokens: prompt } = stats;
  const parts = [];
  if (tokens !== null) parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (tokens > 1 && ms > 0) parts.push(`${((1000 * (tokens - 1)) / ms).toFixed(1)} tokens/s`);
  parts.push(`first after ${ttft < 1000 ? `${ttft} ms` : `${(ttft / 1000).toFixed(1)} s`}`);
  if (prompt !== null) parts.push(`prompt ${prompt}`);
  return parts.join(" · ");
}
