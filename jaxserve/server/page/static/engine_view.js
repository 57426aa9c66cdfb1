// The live view of the engine: /metrics, read every second while somebody looks, as numbers and small lines.
import { getText } from "./api.js";
import { byId, h } from "./dom.js";
import { batchBetween, between, reading } from "./metrics.js";
import { Sparkline } from "./sparkline.js";

const EVERY_MS = 1000;
const WINDOW_MS = 30_000;

export class EngineView {
  constructor() {
    this.readings = [];
    this.timer = null;
    this.asking = false;
    this.visible = false;
    this.#build();
    document.addEventListener("visibilitychange", () => this.#schedule());
  }

  /** Read while the panel is shown (and the tab: a hidden one asks for nothing). */
  setVisible(visible) {
    this.visible = visible;
    this.#schedule();
  }

  #schedule() {
    clearTimeout(this.timer);
    this.timer = null;
    if (this.visible && !document.hidden && !this.asking) this.#read();
  }

  async #read() {
    this.asking = true;
    const began = performance.now();
    try {
      this.#take(reading(await getText("metrics"), performance.now()));
      this.state.hidden = true;
    } catch (error) {
      this.state.textContent = error.status === 401 ? "The metrics need the API key." : "No metrics: " + error.message;
      this.state.hidden = false;
    }
    this.asking = false;
    if (this.visible && !document.hidden) {
      this.timer = setTimeout(() => this.#read(), Math.max(200, EVERY_MS - (performance.now() - began)));
    }
  }

  #take(now) {
    const last = this.readings.at(-1);
    if (last && (now.generated < last.generated || now.steps.count < last.steps.count)) this.#forget(); // it was restarted
    this.readings.push(now);
    while (this.readings.length > 2 && now.time - this.readings[1].time > WINDOW_MS) this.readings.shift();
    this.#showState(now);
    if (this.readings.length > 1) this.#showRates(now, this.readings.at(-2), this.readings[0]);
  }

  #forget() {
    this.readings = [];
    for (const line of Object.values(this.lines)) line.clear();
  }

  #showState(now) {
    this.text("running", now.running);
    this.text("waiting", now.waiting);
    this.text("cache", percent(now.cacheUsage));
    this.text("compilations", now.compilations);
    this.text("preemptions", now.preemptions);
    this.values.compilations.closest(".fact").classList.toggle("bad", now.compilations > 0);
    this.lines.requests.push(now.running, now.waiting);
    this.lines.cache.push(now.cacheUsage);
    const queries = now.queries;
    this.text("hits", queries ? percent(now.hits / queries) : "–");
  }

  #showRates(now, last, first) {
    const seconds = (now.time - last.time) / 1000;
    const rate = (now.generated - last.generated) / seconds;
    this.text("generated", number(rate));
    this.text("prompted", number((now.prompted - last.prompted) / seconds));
    this.lines.tokens.push(rate, (now.prompted - last.prompted) / seconds);
    for (const name of ["ttft", "itl"]) {
      const seen = between(first[name], now[name]);
      this.text(`${name}50`, milliseconds(seen.quantile(0.5)));
      this.text(`${name}95`, milliseconds(seen.quantile(0.95)));
    }
    const itl = between(last.itl, now.itl);
    this.lines.itl.push(itl.count ? (1000 * itl.sum) / itl.count : 0);
    this.#showBatch(batchBetween(first, now), (now.time - first.time) / 1000);
    for (const name of ["host", "device"]) {
      const seen = between(first[name], now[name]);
      this.text(name, seen.count ? milliseconds(seen.sum / seen.count) : "–");
    }
  }

  #showBatch({ steps, shapes, perStep, paddingShare }, seconds) {
    this.text("perStep", perStep === null ? "–" : number(perStep));
    this.text("padding", paddingShare === null ? "–" : percent(paddingShare));
    this.text("steps", number(steps / seconds));
    const total = shapes.reduce((sum, [, count]) => sum + count, 0);
    const shown = shapes.map(([size, count]) => {
      const bar = h("span", { class: "bar" });
      bar.style.setProperty("--share", String(count / total));
      return h("div", { class: "shape" }, h("span", {}, String(size)), bar, h("span", {}, percent(count / total)));
    });
    this.shapes.replaceChildren(...(shown.length ? shown : [h("p", { class: "muted" }, "No steps in the last 30 s.")]));
  }

  text(name, value) {
    const text = String(value);
    if (this.values[name].textContent !== text) this.values[name].textContent = text;
  }

  // --- what is shown ------------------------------------------------------------------------------------------

  #build() {
    this.values = {};
    this.lines = {
      requests: new Sparkline("Running requests", { series: 2 }),
      tokens: new Sparkline("Tokens per second", { floor: 10, series: 2 }),
      cache: new Sparkline("Share of the cache in use", { floor: 0.1 }),
      itl: new Sparkline("Milliseconds between tokens", { floor: 10 }),
    };
    this.shapes = h("div", { class: "shapes" });
    this.state = h("p", { class: "note error", role: "status", hidden: true });
    byId("engine").append(
      this.state,
      card("Throughput", "tokens/s", this.lines.tokens.root, this.#big("generated", "generated"), this.#big("prompted", "prompt")),
      card("Requests", "", this.lines.requests.root, this.#big("running", "running"), this.#big("waiting", "waiting")),
      card("KV cache", "", this.lines.cache.root, this.#big("cache", "in use"), this.#big("hits", "prefix hits")),
      card("Latency", "last 30 s", this.lines.itl.root, this.#pair("ttft", "first token"), this.#pair("itl", "between tokens")),
      card("Batch", "last 30 s", this.shapes, this.#big("perStep", "tokens a step"), this.#big("padding", "padding")),
      h(
        "dl",
        { class: "facts" },
        this.#fact("compilations", "Compilations while serving"),
        this.#fact("steps", "Steps per second"),
        this.#fact("host", "Host’s work a step"),
        this.#fact("device", "Device’s work a step"),
        this.#fact("preemptions", "Preemptions"),
      ),
    );
  }

  #value(name) {
    this.values[name] = h("span", { class: "value" }, "–");
    return this.values[name];
  }

  #big(name, label) {
    return h("div", { class: "figure" }, h("span", { class: "big" }, this.#value(name)), h("span", { class: "muted" }, label));
  }

  #pair(name, label) {
    return h(
      "div",
      { class: "figure" },
      h("span", { class: "big" }, this.#value(`${name}50`)),
      h("span", { class: "muted" }, label),
      h("span", { class: "muted small" }, "p95 ", this.#value(`${name}95`)),
    );
  }

  #fact(name, label) {
    return h("div", { class: "fact" }, h("dt", {}, label), h("dd", {}, this.#value(name)));
  }
}

function card(title, unit, picture, ...figures) {
  return h(
    "section",
    { class: "card", "aria-label": title },
    h("h3", {}, title, unit ? h("span", { class: "muted" }, unit) : null),
    h("div", { class: "figures" }, ...figures),
    picture,
  );
}

const percent = (share) => `${(100 * share).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %`;

function number(value) {
  if (value >= 10_000) return `${(value / 1000).toFixed(1)}k`;
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

function milliseconds(seconds) {
  if (seconds === null) return "–";
  const value = 1000 * seconds;
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 10 ? Math.round(value) : value.toFixed(1)} ms`;
}
