// An answer token by token, coloured by probability, with the alternatives of the one that is pointed at.
import { byId, h } from "./dom.js";

/** Lower bounds of the probability's classes, `p4` (likely) to `p0`. */
const CLASSES = [0.02, 0.1, 0.3, 0.7];

/** The spans of a growing list of tokens in `container`: only new ones are made. */
export class TokenView {
  constructor(container) {
    this.container = container;
    this.tokens = [];
    this.decoder = new TextDecoder();
    container.setAttribute("role", "group");
    container.setAttribute("aria-label", "Tokens; arrow keys move between them");
    for (const type of ["pointerover", "focusin", "click"]) container.addEventListener(type, (event) => this.#point(event));
    container.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
    container.addEventListener("focusout", hide);
    container.addEventListener("keydown", (event) => this.#move(event));
  }

  update(tokens) {
    if (tokens.length < this.tokens.length) {
      this.container.replaceChildren();
      this.tokens = [];
      this.decoder = new TextDecoder();
    }
    this.container.append(...tokens.slice(this.tokens.length).map((token, index) => this.#span(token, index)));
    this.tokens = tokens.slice();
    const [first] = this.container.children;
    if (first && !this.container.querySelector('[tabindex="0"]')) first.tabIndex = 0;
  }

  #span(token, index) {
    const [text, logprob, bytes] = token;
    // A token may end within a character: the one that completes it shows it.
    const shown = bytes ? this.decoder.decode(new Uint8Array(bytes), { stream: true }) : text;
    const probability = Math.exp(logprob);
    const level = CLASSES.filter((bound) => probability >= bound).length;
    const at = this.tokens.length + index;
    return h("span", { class: `token p${level}`, dataset: { at: String(at) }, tabIndex: -1 }, shown || "·");
  }

  #point(event) {
    const span = event.target.closest?.(".token");
    if (span) show(span, this.tokens[Number(span.dataset.at)]);
  }

  #move(event) {
    const span = event.target.closest(".token");
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const next = span && step && span[step];
    if (!next) return;
    event.preventDefault();
    span.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

function show(span, token) {
  const [text, logprob, , top] = token;
  const card = byId("token-card");
  const rows = top.map(([other, value]) => row(other, value, other === text && value === logprob));
  const listed = top.some(([other, value]) => other === text && value === logprob);
  card.replaceChildren(
    h("p", { class: "token-head" }, h("code", {}, visible(text)), h("strong", {}, percent(logprob))),
    h("p", { class: "muted" }, `log probability ${Math.abs(logprob) < 5e-4 ? 0 : logprob.toFixed(3).replace("-", "−")}`),
    rows.length ? h("div", { class: "alternatives" }, ...rows, listed ? null : row(text, logprob, true)) : "",
  );
  card.hidden = false;
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const size = card.getBoundingClientRect();
  const room = byId("log").getBoundingClientRect(); // not over the panel
  const left = Math.min(Math.max(room.left + 8, at.left), room.right - size.width - 8);
  const below = at.bottom + 6 + size.height < innerHeight;
  card.style.left = `${left}px`;
  card.style.top = `${below ? at.bottom + 6 : Math.max(8, at.top - size.height - 6)}px`;
}

export function hide() {
  byId("token-card").hidden = true;
}

function row(text, logprob, chosen) {
  const bar = h("span", { class: "bar" });
  bar.style.setProperty("--share", String(Math.exp(logprob)));
  return h("div", { class: chosen ? "alternative chosen" : "alternative" }, h("code", {}, visible(text)), bar, h("span", {}, percent(logprob)));
}

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return value >= 99.95 ? "100 %" : value >= 0.1 ? `${value.toFixed(1)} %` : "< 0.1 %";
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
