// The parts that pages are made of: states, cards, tables that sort, lines and bars.

import { h } from "./dom.js";
import { seconds } from "./format.js";

// A state is told by its word, its shape and its colour, in this order.
const SHAPES = {
  good: ["circle", { cx: 6, cy: 6, r: 5 }],
  going: ["path", { d: "M6 1a5 5 0 0 1 0 10zM6 1a5 5 0 0 0 0 10", "fill-rule": "evenodd" }],
  idle: ["rect", { x: 2, y: 2, width: 8, height: 8 }],
  bad: ["path", { d: "M6 0.500 11.700 11H0.300z" }],
};
const KINDS = {
  active: "good",
  running: "good",
  "catching up": "going",
  loading: "going",
  gathering: "going",
  new: "idle",
  stopped: "bad",
  paused: "going",
  removed: "idle",
  unknown: "idle",
  suspended: "bad",
  passed: "good",
  failed: "bad",
  unreadable: "bad",
  faulty: "bad",
};

/** `stale`: nobody says so any more, so nothing is good. */
export function badge(state, title, stale = false) {
  const known = KINDS[state] ?? "idle";
  const kind = stale && known !== "bad" ? "idle" : known;
  const [shape, attributes] = SHAPES[kind];
  const half = kind === "going";
  return h(
    `span.badge.${kind}`,
    { title },
    h("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" },
      half ? h("circle", { cx: 6, cy: 6, r: 4.5, class: "ring" }) : null,
      half ? h("path", { d: "M6 1a5 5 0 0 1 0 10z" }) : h(shape, attributes)),
    state,
  );
}

/** A part of a page under its heading. */
export function section(heading, ...children) {
  return h("section", { "data-key": heading }, h("h2", null, heading), children);
}

/** A part that is closed until somebody opens it. */
export function folded(heading, ...children) {
  return h("section", { "data-key": heading }, h("details", null, h("summary", null, h("h2", null, heading)), children));
}

const LEVELS = { ok: "good", late: "going", degraded: "bad", stopped: "bad", paused: "going" };

/** How a pipeline is, in one sentence, and what cures it: what a page says first. */
export function health({ level, sentence }, cure) {
  const kind = LEVELS[level];
  const [, word, rest] = /^(.*?:(?= ))?(.*)$/s.exec(sentence);
  return h(`div.note.health.${kind}`, { role: kind === "bad" ? "alert" : "status", "data-key": "health" },
    h("p.sentence", null, word ? h("strong", null, word) : null, rest), cure);
}

/** What needs a person: why, since when, and what cures it: an element, or the command. */
export function attention({ title, reason, remedy, since, cure, kind = "bad" }) {
  return h(`div.note.${kind}`, { role: kind === "bad" ? "alert" : null },
    h("div.note-title", null, title, since ? h("span.muted", null, ", ", since) : null),
    reason ? h("p", null, reason) : null,
    cure ?? (remedy ? h("p", null, "What to do: ", h("code", null, remedy), " ", copyButton(remedy)) : null));
}

export function copyButton(text) {
  return h("button.small", {
    type: "button",
    title: "copy to the clipboard",
    click: async (event) => {
      const button = event.currentTarget;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(button.previousElementSibling); // no right here: it is at least selected
      }
    },
  }, "copy");
}

export function fact(name, value, more, title) {
  return h("div.fact", { title }, h("dt", null, name), h("dd", null, value, more ? h("div.muted", null, more) : null));
}

/** A value against its bound. */
export function gauge(value, bound, words) {
  const share = bound ? Math.min(1, value / bound) : 0;
  const kind = share >= 0.8 ? "bad" : share >= 0.5 ? "going" : "good";
  return h("div.gauge", { role: "img", "aria-label": words, title: words },
    h("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none" },
      h("rect", { class: "track", x: 0, y: 0, width: 100, height: 6 }),
      h("rect", { class: kind, x: 0, y: 0, width: Math.max(share * 100, value ? 1 : 0), height: 6 })));
}

/** Values over time as a line; the highest one is said. */
export function sparkline(values, what, { width = 120, height = 24 } = {}) {
  if (values.length < 2) return h("span.muted", null, values.length ? seconds(values[0]) : "–");
  const highest = Math.max(...values, 1e-9);
  const points = values
    .map((value, index) => [(index / (values.length - 1)) * (width - 4) + 2, height - 2 - (value / highest) * (height - 4)])
    .map((point) => point.map((part) => part.toFixed(1)).join(","));
  const words = `${what}: ${seconds(values.at(-1))} now, ${seconds(highest)} at most in the last ${values.length} epochs`;
  return h("span.sparkline", { title: words },
    h("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words },
      h("polyline", { points: points.join(" ") })),
    h("span.muted", null, seconds(values.at(-1))));
}

/** Where an epoch's time went, as parts of one bar. */
export function stageBar(stages, longest) {
  const all = Object.values(stages).reduce((sum, value) => sum + value, 0);
  if (!all) return h("span.muted", null, "–");
  let x = 0;
  const parts = Object.entries(stages).map(([name, value], index) => {
    const width = (value / all) * 200;
    const part = h("rect", { class: `stage stage-${index % 5}${name === longest ? " longest" : ""}`, x, y: 0, width, height: 10 },
      h("title", { drawn: true }, `${name}: ${seconds(value)}`));
    x += width;
    return part;
  });
  const words = Object.entries(stages).map(([name, value]) => `${name} ${seconds(value)}`).join(", ");
  return h("span.stages", { title: words },
    h("svg", { viewBox: "0 0 200 10", preserveAspectRatio: "none", role: "img", "aria-label": words }, parts));
}

/** A table whose columns sort: columns are { name, title, value(row), show(row), number,
 * wrap, extra }: those that are extra go where a screen is narrow. The order is kept under `key`. */
export function sortable(key, columns, rows, { rowKey, empty, again, caption }) {
  const saved = JSON.parse(sessionStorage.getItem(`sort:${key}`) ?? "null");
  const order = saved ?? { column: null, down: false };
  const column = columns.find((one) => one.name === order.column);
  const shown = column ? [...rows].sort(by(column, order.down)) : rows;
  const head = columns.map((one) => {
    const sorted = column === one ? (order.down ? "descending" : "ascending") : null;
    const turn = () => {
      const next = { column: one.name, down: sorted ? !order.down : Boolean(one.number) };
      sessionStorage.setItem(`sort:${key}`, JSON.stringify(next));
      again();
    };
    return h(`th${one.number ? ".number" : ""}${one.extra ? ".extra" : ""}`, { scope: "col", "aria-sort": sorted, title: one.title },
      one.value ? h("button", { type: "button", click: turn }, one.name, h("span.arrow", { "aria-hidden": "true" }, sorted ? (order.down ? " ↓" : " ↑") : "")) : one.name);
  });
  return h("div.scroll", { tabindex: 0, role: "region", "aria-label": caption },
    h("table", null, h("caption.unseen", null, caption), h("thead", null, h("tr", null, head)),
      h("tbody", null,
        shown.length
          ? shown.map((row) => h("tr", { "data-key": rowKey(row) },
              columns.map((one) => h(`td${one.number ? ".number" : ""}${one.wrap ? ".wrap" : ""}${one.extra ? ".extra" : ""}`, null, one.show(row)))))
          : h("tr", { "data-key": "empty" }, h("td.muted", { colspan: columns.length }, empty)))));
}

function by(column, down) {
  return (one, other) => {
    const [a, b] = [column.value(one), column.value(other)];
    if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1; // what is not known goes last
    if (b === null || b === undefined) return -1;
    const order = typeof a === "number" ? a - b : String(a).localeCompare(String(b));
    return down ? -order : order;
  };
}
