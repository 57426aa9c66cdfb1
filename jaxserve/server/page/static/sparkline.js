// A small line of the last values, as SVG.
import { s } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 40;

/** The last `length` values of one or two series, scaled to the largest (at least `floor`). */
export class Sparkline {
  constructor(label, { length = 60, floor = 1, series = 1 } = {}) {
    Object.assign(this, { label, length, floor, values: Array.from({ length: series }, () => []) });
    this.area = s("path", { class: "area" });
    this.lines = this.values.map((_, index) => s("path", { class: `line series-${index}` }));
    this.root = s("svg", { class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, this.area, ...this.lines);
    this.#draw();
  }

  push(...values) {
    this.values.forEach((series, index) => {
      series.push(values[index] ?? 0);
      if (series.length > this.length) series.shift();
    });
    this.#draw();
  }

  clear() {
    for (const series of this.values) series.length = 0;
    this.#draw();
  }

  #draw() {
    const most = Math.max(this.floor, ...this.values.flat());
    const step = WIDTH / (this.length - 1);
    const points = (series) => {
      const start = this.length - series.length;
      return series.map((value, index) => {
        const y = HEIGHT - 2 - ((HEIGHT - 4) * value) / most;
        return `${((start + index) * step).toFixed(1)} ${y.toFixed(1)}`;
      });
    };
    this.lines.forEach((line, index) => {
      const path = points(this.values[index]);
      line.setAttribute("d", path.length ? `M${path.join("L")}` : "");
    });
    const [first] = this.values;
    const path = points(first);
    const left = ((this.length - first.length) * step).toFixed(1);
    this.area.setAttribute("d", path.length ? `M${left} ${HEIGHT}L${path.join("L")}L${WIDTH} ${HEIGHT}Z` : "");
    const now = first.at(-1) ?? 0;
    this.root.setAttribute("aria-label", `${this.label}: now ${round(now)}, at most ${round(Math.max(0, ...first))}`);
  }
}

const round = (value) => (value >= 100 ? Math.round(value) : Math.round(value * 100) / 100);
