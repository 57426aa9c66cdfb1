// The settings of a conversation: system prompt, sampling, tools. What is left empty is the server's to choose.
import { byId, h, icon } from "./dom.js";
import { DEFAULT_SETTINGS } from "./conversations.js";
import { parseTools, SettingError } from "./request_body.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1, help: "0 always takes the most likely token; higher is more varied." },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.05, help: "Only the most likely tokens that together have this probability." },
  { name: "top_k", label: "Top k", min: -1, step: 1, help: "Only so many of the most likely tokens; -1 is all." },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, help: "Only tokens at least so likely, relative to the most likely one." },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, help: "The longest answer." },
  { name: "seed", label: "Seed", step: 1, help: "The same seed gives the same answer." },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, help: "Against tokens that the answer has already." },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, help: "The same, for each time." },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, step: 0.05, help: "Above 1: against tokens of prompt and answer." },
];
const WHOLE = new Set(["top_k", "max_tokens", "seed"]);
const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

export class SettingsView {
  /** `onChange()` is called when the settings of the conversation have changed. */
  constructor(onChange) {
    this.onChange = onChange;
    this.inputs = {};
    this.settings = { ...DEFAULT_SETTINGS };
    this.#build();
  }

  /** Edit the settings object of another conversation. */
  show(settings) {
    this.settings = settings;
    for (const [name, input] of Object.entries(this.inputs)) {
      if (input.type === "checkbox") input.checked = settings[name];
      else input.value = settings[name] ?? "";
      this.#mark(input, "");
    }
    this.#check("tools");
  }

  /** Bring a setting into view; `asking`: only say whether there is one of that name. */
  focus(name, asking = false) {
    const input = this.inputs[name.replace(/^body\./, "").split(".")[0]];
    if (!input || asking) return Boolean(input);
    input.closest("details")?.setAttribute("open", "");
    input.scrollIntoView({ block: "center" });
    input.focus();
    return true;
  }

  /** Throws SettingError for a setting that holds something else than what would be sent. */
  check() {
    for (const [name, input] of Object.entries(this.inputs)) {
      const problem = input.validationMessage;
      if (problem && name !== "tools") throw new SettingError(`${input.labels?.[0]?.textContent ?? name}: ${problem}`, name);
    }
  }

  #build() {
    const system = this.#area("system", "System prompt", 4, "How the model should behave.");
    const numbers = NUMBERS.map((setting) => this.#number(setting));
    const stop = this.#area("stop", "Stop strings", 2, "One a line; \\n stands for a line break.");
    const effort = h(
      "select",
      { id: "set-reasoning_effort", onchange: () => this.#take("reasoning_effort") },
      h("option", { value: "" }, "default"),
      ...EFFORTS.map((value) => h("option", { value }, value)),
    );
    this.inputs.reasoning_effort = effort;
    const tools = this.#area("tools", "Functions, as JSON", 5, "A JSON list of functions: name, description, parameters.");
    this.inputs.tools.classList.add("mono");
    this.inputs.tools.spellcheck = false;
    byId("settings").append(
      system,
      h("div", { class: "grid" }, ...numbers, field("Reasoning effort", effort, "For models whose template knows it.")),
      stop,
      this.#probabilities(),
      h("details", { class: "fold" }, h("summary", {}, icon("chevron"), "Tools"), tools),
      h("button", { type: "button", class: "button", onclick: () => this.#reset() }, "Reset all settings"),
    );
  }

  #number({ name, label, min, max, step, help }) {
    const input = h("input", {
      id: `set-${name}`,
      type: "number",
      inputMode: WHOLE.has(name) ? "numeric" : "decimal",
      placeholder: "default",
      min: min === undefined ? null : String(min),
      max: max === undefined ? null : String(max),
      step: "any",
      oninput: () => this.#take(name),
    });
    // Arrow keys move by sensible steps; any value may be typed.
    input.addEventListener("keydown", (event) => {
      const direction = { ArrowUp: 1, ArrowDown: -1 }[event.key];
      if (!direction) return;
      event.preventDefault();
      const from = input.value === "" ? { temperature: 1, top_p: 1, repetition_penalty: 1, top_k: 0, max_tokens: 0 }[name] ?? 0 : Number(input.value);
      const next = Math.min(max ?? Infinity, Math.max(min ?? -Infinity, from + direction * step));
      input.value = String(Math.round(next * 1e6) / 1e6);
      this.#take(name);
    });
    this.inputs[name] = input;
    return field(label, input, help);
  }

  #area(name, label, rows, placeholder) {
    const input = h("textarea", { id: `set-${name}`, rows, placeholder, oninput: () => this.#take(name) });
    this.inputs[name] = input;
    return field(label, input);
  }

  #probabilities() {
    const on = h("input", { type: "checkbox", id: "set-probabilities", onchange: () => this.#take("probabilities") });
    const top = h("input", {
      type: "number", id: "set-top_logprobs", min: "0", max: "20", step: "1", class: "short",
      "aria-label": "Alternatives listed", oninput: () => this.#take("top_logprobs"),
    });
    Object.assign(this.inputs, { probabilities: on, top_logprobs: top });
    return h(
      "div",
      { class: "row spread" },
      h("label", { class: "check" }, on, "Token probabilities"),
      h("label", { class: "row" }, h("span", { class: "muted" }, "top"), top),
    );
  }

  #take(name) {
    const input = this.inputs[name];
    let value = input.type === "checkbox" ? input.checked : input.value;
    if (input.type === "number") {
      const problem = numberProblem(input, WHOLE.has(name) || name === "top_logprobs");
      this.#mark(input, problem);
      if (problem) return;
      value = input.value === "" ? (name === "top_logprobs" ? DEFAULT_SETTINGS.top_logprobs : null) : Number(input.value);
    }
    this.settings[name] = value;
    this.#check(name);
    this.onChange();
  }

  #check(name) {
    if (name !== "tools") return;
    try {
      parseTools(this.settings.tools);
      this.#mark(this.inputs.tools, "");
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      this.#mark(this.inputs.tools, error.message);
    }
  }

  #mark(input, problem) {
    input.setCustomValidity(problem);
    input.setAttribute("aria-invalid", String(problem !== ""));
    const hint = input.closest(".field")?.querySelector(".problem");
    if (hint) hint.textContent = problem;
  }

  #reset() {
    Object.assign(this.settings, DEFAULT_SETTINGS);
    this.show(this.settings);
    this.onChange();
  }
}

/** What is wrong with a number, "" if nothing: it is not taken then, and the last right one holds. */
function numberProblem(input, whole) {
  if (input.validity.badInput) return "Not a number.";
  if (input.value === "") return "";
  const value = Number(input.value);
  if (whole && !Number.isSafeInteger(value)) return "A whole number, please.";
  if (input.min !== "" && value < Number(input.min)) return `At least ${input.min}.`;
  if (input.max !== "" && value > Number(input.max)) return `At most ${input.max}.`;
  return "";
}

function field(label, input, help) {
  input.title = help ?? "";
  return h("div", { class: "field" }, h("label", { htmlFor: input.id }, label), input, h("p", { class: "problem", role: "status" }));
}
