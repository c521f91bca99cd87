// Numbers with units, times as people say them with the exact one behind.

import { h } from "./dom.js";

const UNKNOWN = "–";

export function bytes(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function count(value) {
  return value === null || value === undefined ? UNKNOWN : Number(value).toLocaleString("en");
}

export function rate(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return `${value < 10 && value > 0 ? value.toFixed(1) : count(Math.round(value))}/s`;
}

export function seconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 3600) return parts(value, 60, "min", 1, "s");
  if (value < 86400) return parts(value, 3600, "h", 60, "min");
  return parts(value, 86400, "d", 3600, "h");
}

/** In two units; without the smaller one where that is nothing. */
function parts(value, size, unit, smaller, smallerUnit) {
  const rounded = Math.round(value / smaller) * smaller;
  const rest = (rounded % size) / smaller;
  return `${Math.floor(rounded / size)} ${unit}${rest ? ` ${rest} ${smallerUnit}` : ""}`;
}

function roughly(value) {
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (value >= size) return `${Math.floor(value / size)} ${unit}`;
  return `${Math.round(value)} s`;
}

/** How long ago, by the clock of the machine that answered: a browser's own may be wrong. */
export function ago(text, now) {
  if (!text) return UNKNOWN;
  const passed = Math.max(0, (Date.parse(now) - Date.parse(text)) / 1000);
  const words = passed < 1.5 ? "just now" : `${roughly(passed)} ago`;
  return h("time", { datetime: text, title: absolute(text) }, words);
}

export function absolute(text) {
  return text ? `${text.replace("T", " ").replace("Z", "")} UTC` : "";
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
