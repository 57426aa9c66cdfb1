"""Latency over throughput, several curves in one drawing: as PNG (matplotlib) and as HTML that needs nothing else."""

from __future__ import annotations

import html
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.bench.sweep import Curve
from jaxserve.errors import ConfigError

COLOURS = ("#2a6fdb", "#d9480f", "#2b8a3e", "#9c36b5", "#c2255c", "#0b7285", "#e67700", "#495057")
X_KEY, X_TITLE = "output_throughput", "output tokens/s"
TITLES = {
    "ttft": "Time to first token (ms)",
    "tpot": "Time per output token (ms)",
    "itl": "Inter-token latency (ms)",
    "e2el": "End-to-end latency (ms)",
}


@dataclass(frozen=True)
class Panel:
    """One drawing: a latency over throughput, its medians and a high percentile."""

    title: str
    median_key: str
    high_key: str | None
    """Such as ``p99_ttft_ms``; None where the results have no percentile."""


def panels_of(curves: Sequence[Curve]) -> list[Panel]:
    """The drawings for which every result has figures.

    Raises:
        ConfigError: there is none.
    """
    results = [result for curve in curves for result in curve.results]
    shared = set(results[0]).intersection(*results[1:]) if results else set[str]()
    panels: list[Panel] = []
    for metric, title in TITLES.items():
        median = f"median_{metric}_ms"
        highs = sorted(
            (key for key in shared if _percent(key, metric) is not None),
            key=lambda k: _percent(k, metric) or 0,
        )
        if median in shared:
            panels.append(Panel(title, median, highs[-1] if highs else None))
    if not panels:
        raise ConfigError(
            "The results share no latency: run them with the same --percentile-metrics.", param="plot"
        )
    return panels


def _percent(key: str, metric: str) -> float | None:
    number, _, rest = key.removeprefix("p").partition("_")
    if key.startswith("p") and rest == f"{metric}_ms":
        try:
            return float(number)
        except ValueError:
            return None
    return None


def load_of(result: Mapping[str, Any]) -> str:
    """The load under which a result was measured, in words."""
    rate, limit = result.get("request_rate"), result.get("max_concurrency")
    parts = [] if rate in (None, "inf") else [f"{rate:g} req/s"]
    parts += [] if limit is None else [f"{limit} in flight"]
    return ", ".join(parts) or "all at once"


# --- PNG --------------------------------------------------------------------------------------------------------


def check_matplotlib() -> None:
    """Raises:
    ConfigError: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise ConfigError(
            "A PNG needs matplotlib: pip install 'jaxserve[bench]'. The HTML needs nothing.", param="png"
        ) from None


def write_png(curves: Sequence[Curve], path: Path) -> None:
    """Draw the curves.

    Raises:
        ConfigError: matplotlib is not installed, or the results share no latency.
    """
    check_matplotlib()
    panels = panels_of(curves)
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(6.4 * columns, 4.2 * rows), squeeze=False)
    flat = [axis for row in axes for axis in row]
    for axis, panel in zip(flat, panels):
        _draw_panel(axis, panel, curves)
    for axis in flat[len(panels) :]:
        axis.remove()
    flat[0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_panel(axis: Any, panel: Panel, curves: Sequence[Curve]) -> None:
    for index, curve in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        x = [result[X_KEY] for result in curve.results]
        axis.plot(
            x, [r[panel.median_key] for r in curve.results], "o-", color=colour, label=f"{curve.name}, median"
        )
        if panel.high_key is not None:
            label = f"{curve.name}, {panel.high_key.partition('_')[0]}"
            axis.plot(
                x, [r[panel.high_key] for r in curve.results], "o--", color=colour, alpha=0.5, label=label
            )
    axis.set_title(panel.title, fontsize=11, loc="left")
    axis.set_xlabel(X_TITLE)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


# --- HTML -------------------------------------------------------------------------------------------------------


def write_html(curves: Sequence[Curve], path: Path) -> None:
    """Write a page with the curves as SVG, figures on hover, and a table of all results.

    Raises:
        ConfigError: the results share no latency.
    """
    panels = panels_of(curves)
    drawings = "\n".join(_svg(panel, curves) for panel in panels)
    legend = "".join(
        f'<label style="--c:{COLOURS[index % len(COLOURS)]}"><input type="checkbox" checked data-curve="{index}">'
        f"{html.escape(curve.name)}</label>"
        for index, curve in enumerate(curves)
    )
    page = (
        PAGE.replace("{legend}", legend)
        .replace("{drawings}", drawings)
        .replace("{table}", _table(curves, panels))
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


WIDTH, HEIGHT = 520, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 30, 42


def _svg(panel: Panel, curves: Sequence[Curve]) -> str:
    keys = [key for key in (panel.median_key, panel.high_key) if key is not None]
    results = [result for curve in curves for result in curve.results]
    x_ticks = ticks(max(result[X_KEY] for result in results))
    y_ticks = ticks(max(result[key] for result in results for key in keys))

    def x(value: float) -> float:
        return LEFT + value / x_ticks[-1] * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / y_ticks[-1] * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="title" x="{LEFT}" y="18">{html.escape(panel.title)}</text>']
    for tick in y_ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        parts.append(
            f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
        )
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{X_TITLE}</text>')
    for index, curve in enumerate(curves):
        parts.append(f'<g data-curve="{index}" style="--c:{COLOURS[index % len(COLOURS)]}">')
        for key in reversed(keys):
            points = [(x(result[X_KEY]), y(result[key])) for result in curve.results]
            style = "" if key == panel.median_key else ' class="high"'
            joined = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            parts.append(f'<polyline{style} points="{joined}"/>')
            for (px, py), result in zip(points, curve.results):
                label = f"{curve.name}: {load_of(result)}\n{result[X_KEY]:.1f} {X_TITLE}\n"
                label += f"{_word(key)} {result[key]:.1f} ms"
                parts.append(
                    f'<circle{style} cx="{px:.1f}" cy="{py:.1f}" r="4"><title>{html.escape(label)}</title></circle>'
                )
        parts.append("</g>")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def ticks(highest: float) -> list[float]:
    """Round numbers from 0 to at least ``highest``, four to ten of them."""
    highest = highest if highest > 0 and math.isfinite(highest) else 1.0
    step = 10 ** math.floor(math.log10(highest / 4))
    step = next(step * factor for factor in (1, 2, 2.5, 5, 10) if highest / (step * factor) <= 8)
    return [index * step for index in range(math.ceil(highest / step - 1e-9) + 1)]


def _word(key: str) -> str:
    return key.partition("_")[0]


def _table(curves: Sequence[Curve], panels: Sequence[Panel]) -> str:
    keys = [key for panel in panels for key in (panel.median_key, panel.high_key) if key is not None]
    heads = [
        "",
        "load",
        "req/s",
        X_TITLE,
        "failed",
        *(f"{_word(key)} {key.split('_')[1].upper()}" for key in keys),
    ]
    rows: list[str] = []
    for curve in curves:
        for result in curve.results:
            figures = [result.get("request_throughput", 0.0), result[X_KEY], result.get("failed", 0)]
            cells = [
                curve.name,
                load_of(result),
                *(f"{value:g}" if value == int(value) else f"{value:.1f}" for value in figures),
            ]
            cells += [f"{result[key]:.1f}" for key in keys]
            rows.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Latency over throughput</title>
<style>
:root { color-scheme: light dark; --fg: light-dark(#212529, #dee2e6); --bg: light-dark(#fff, #16181b);
  --line: light-dark(#dee2e6, #343a40); }
body { font: 15px/1.4 system-ui, sans-serif; color: var(--fg); background: var(--bg);
  margin: 24px auto; padding: 0 16px; max-width: 1120px; }
h1 { font-size: 20px; margin: 0 0 12px; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 18px; margin-bottom: 8px; }
.legend label { cursor: pointer; } .legend input { accent-color: var(--c); }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 12px; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--fg); }
svg .title { font-size: 14px; font-weight: 600; }
.grid { stroke: var(--line); } polyline { fill: none; stroke: var(--c); stroke-width: 2; }
circle { fill: var(--c); stroke: var(--bg); stroke-width: 1; } circle:hover { stroke: var(--fg); stroke-width: 2; }
polyline.high { stroke-dasharray: 5 4; opacity: .6; } circle.high { opacity: .6; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; margin-top: 16px; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
</style>
<h1>Latency over throughput</h1>
<div class="legend">{legend}<span>solid: median, dashed: high percentile; figures on hover</span></div>
<div class="panels">{drawings}</div>
<div class="scroll">{table}</div>
<script>
for (const box of document.querySelectorAll("input[data-curve]"))
  box.addEventListener("change", () => {
    for (const group of document.querySelectorAll(`g[data-curve="${box.dataset.curve}"]`))
      group.style.display = box.checked ? "" : "none";
  });
</script>
</html>
"""
