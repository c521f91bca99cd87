// The last hours or days as a chart: of every stretch the longest end-to-end latency and how far the lake was behind,
// what the pipeline file allows, and what happened. Drawn by uPlot (vendor/uplot), in an element that keeps its content
// when the page is laid anew.

import { h } from "./dom.js";
import { absolute, plural, seconds } from "./format.js";
import { section } from "./parts.js";

const KEY = "history range";
const HEIGHT = 190;
const LEAST = 0.001; // of a logarithmic scale, in seconds

export function history(one, again) {
  const { ranges, starts, marks, freshness_seconds: allowed } = one.history;
  const chosen = ranges[sessionStorage.getItem(KEY)] ? sessionStorage.getItem(KEY) : "6 h";
  const { begins, step, longest, behind } = ranges[chosen];
  const happened = [
    ...starts.map(([at, pause]) => ({ at, what: `a new driver published, after ${seconds(pause)} without an epoch` })),
    ...marks.map((mark) => ({ at: Date.parse(mark.at) / 1000, what: mark.what })),
  ].filter((mark) => mark.at >= begins).sort((a, b) => a.at - b.at);
  const choose = (name) => () => {
    sessionStorage.setItem(KEY, name);
    again();
  };
  const drawn = JSON.stringify({ begins, step, longest, behind, allowed, at: happened.map((mark) => mark.at) });
  return section("End-to-end latency and lag",
    h("div.line.ranges", null,
      h("span.muted", null, `the longest from commit to readable, and the furthest behind, in each ${seconds(step)}; times are UTC`),
      h("span.choices", { role: "group", "aria-label": "how far back" }, Object.keys(ranges).map((name) =>
        h("button.small", { type: "button", "aria-pressed": String(name === chosen), click: choose(name) }, name)))),
    h("latency-chart", { role: "img", "aria-label": inWords(chosen, ranges[chosen], allowed), "data-drawn": drawn }),
    happened.length
      ? h("details", null, h("summary", null, plural(happened.length, "event"), ", the newest: ", happened.at(-1).what),
          h("ul.events", null, happened.toReversed().slice(0, 50).map((mark) => h("li", null, absolute(new Date(mark.at * 1000).toISOString().slice(0, 19)), " ", mark.what))))
      : null);
}

function inWords(name, { begins, step, longest, behind }, allowed) {
  const most = (values) => {
    const highest = Math.max(...values.filter((value) => value !== null));
    return `at most ${seconds(highest)}, at ${absolute(new Date((begins + values.indexOf(highest) * step) * 1000).toISOString().slice(0, 16))}`;
  };
  const gaps = longest.filter((value) => value === null).length;
  return [
    gaps === longest.length ? `Nothing was published in the last ${name}.`
      : `End-to-end latency of the last ${name}: ${most(longest)}; nothing was published in ${gaps} of ${longest.length} stretches.`,
    behind.some((value) => value !== null) ? `The lake was behind by ${most(behind)}.` : "",
    allowed === null ? "" : `The pipeline file allows ${seconds(allowed)}.`,
  ].filter(Boolean).join(" ");
}

/** `17:15`; a day at its beginning, and where a step is longer than one. */
function clock(time, step) {
  const text = new Date(time * 1000).toISOString();
  return step >= 86400 || time % 86400 === 0 ? text.slice(5, 10) : text.slice(11, 16);
}

/** A power of ten of a second, for the axis: `10 s`, `17 min`. */
function short(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  const [unit, one] = [["h", 3600], ["min", 60]].find(([, length]) => value >= 2 * length) ?? ["s", 1];
  return `${Math.round(value / one)} ${unit}`;
}

class LatencyChart extends HTMLElement {
  static observedAttributes = ["data-drawn"];
  #plot = null;
  #shape = "";
  #resized = new ResizeObserver(() => this.#draw());
  #themed = new MutationObserver(() => this.#draw());

  connectedCallback() {
    this.#resized.observe(this);
    this.#themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  }

  disconnectedCallback() {
    this.#resized.disconnect();
    this.#themed.disconnect();
    this.#plot?.destroy();
    this.#plot = null;
  }

  attributeChangedCallback() {
    if (this.isConnected) this.#draw();
  }

  #draw() {
    const { begins, step, longest, behind, allowed, at } = JSON.parse(this.dataset.drawn);
    const times = longest.map((_, index) => begins + (index + 0.5) * step);
    const shown = (values) => values.map((value) => (value === null ? null : Math.max(value, LEAST)));
    const data = [times, shown(longest), shown(behind), ...(allowed === null ? [] : [times.map(() => Math.max(allowed, LEAST))])];
    const shape = [this.clientWidth, document.documentElement.dataset.theme, step, allowed].join();
    this.at = at;
    if (this.#plot && shape === this.#shape) {
      this.#plot.setData(data);
      return;
    }
    this.#shape = shape;
    this.#plot?.destroy();
    this.#plot = this.clientWidth ? new window.uPlot(this.#options(allowed), data, this) : null;
  }

  #options(allowed) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--border"), width: 1 }, ticks: { stroke: colour("--border"), width: 1 } };
    const words = (_, value) => (value === null || value === undefined ? "–" : seconds(value));
    return {
      width: this.clientWidth,
      height: HEIGHT,
      tzDate: (time) => window.uPlot.tzDate(new Date(time * 1000), "UTC"),
      scales: { y: { distr: 3, range: (_, low, high) => [Math.min(0.1, low ?? 0.1) / 1.2, Math.max(10, high ?? 10) * 1.2] } },
      cursor: { drag: { x: false, y: false }, points: { size: 6 } },
      axes: [{ ...axis, space: 60, values: (_, splits, __, ___, step) => splits.map((time) => clock(time, step)) }, { ...axis, size: 64, values: (_, splits) => splits.map((value) => (value === null ? null : short(value))) }],
      series: [
        { label: "time", value: (_, time) => (time ? absolute(new Date(time * 1000).toISOString().slice(0, 16)) : "–") },
        { label: "longest latency", stroke: colour("--stage-0"), width: 1.5, points: { show: true, size: 3, fill: colour("--stage-0") }, value: words },
        { label: "furthest behind", stroke: colour("--stage-3"), width: 1.5, points: { show: true, size: 3, fill: colour("--stage-3") }, value: words },
        ...(allowed === null ? [] : [{ label: "allowed by the pipeline file", stroke: colour("--bad"), width: 1, dash: [6, 4], points: { show: false }, value: words }]),
      ],
      hooks: { drawClear: [(plot) => this.#marks(plot, colour("--going"))] },
    };
  }

  /** A line for each thing that happened. */
  #marks(plot, colour) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour;
    ctx.setLineDash([2, 4]);
    for (const at of this.at) {
      const x = Math.round(plot.valToPos(at, "x", true)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
}

customElements.define("latency-chart", LatencyChart);
