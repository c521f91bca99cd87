// One table: what state it is in and why, what was done to it lately, its files, and the schemas it has had.

import { actions, cure } from "./actions.js";
import { dagsOf, request } from "./airflow.js";
import { h } from "./dom.js";
import { ago, bytes, count, plural, seconds } from "./format.js";
import { attention, badge, fact, section, sortable, sparkline, stageBar } from "./parts.js";

export const title = ({ table }) => table;

export function load({ pipeline, table }) {
  return request(`api/pipelines/${encodeURIComponent(pipeline)}/tables/${encodeURIComponent(table)}`);
}

/** The DAGs, for the button that reloads the table. */
export async function more({ pipeline }) {
  return { dags: await dagsOf(pipeline).catch(() => ({})) };
}

export function show(one, place, again) {
  const head = [
    h("nav.path", { "aria-label": "place" }, h("a", { href: "." }, "Pipelines"), " / ", h("a", { href: `pipelines/${encodeURIComponent(one.pipeline)}` }, one.pipeline), " / "),
    h("header", null, h("h1", null, one.table), one.state ? badge(one.state, one.reason) : null, actions(one, again)),
  ];
  if (one.error) return h("main", null, head, attention({ title: "The table cannot be shown", reason: one.error.message, remedy: one.error.remedy }));
  if (one.state === "gathering") return h("main", null, head, h("p.muted", null, "gathering…"));
  return h("main", null, head,
    one.state === "active" ? null : attention({
      title: `The table is ${one.state}`, reason: one.reason, cure: cure(one, one, again), since: one.since ? ago(one.since, one.at) : null,
      kind: one.state === "suspended" ? "bad" : "going",
    }),
    one.retrying
      ? attention({ kind: "going", title: `It fails and is tried again, ${plural(one.retrying.attempts, "failed attempt")} so far`, reason: one.retrying.reason, since: ago(one.retrying.since, one.at) })
      : null,
    h("dl.facts.wide", null,
      fact("lag", seconds(one.lag_seconds), one.lag_bytes === null ? null : `${bytes(one.lag_bytes)} of the log`),
      fact("freshness wanted", one.freshness_seconds === null ? "none" : seconds(one.freshness_seconds), one.late ? h("span.late", null, "late") : null, "by the pipeline file"),
      fact("applied position", one.applied_lsn ?? "–", one.version === null ? null : `version ${count(one.version)}`),
      fact("changed", ago(one.touched_at, one.at), `${count(one.changes)} changes in view`),
      fact("on divergence", one.on_divergence, one.state === "active" ? "none is known" : null, "what a change that contradicts the stored rows does"),
      fact("incarnation", one.incarnation ?? "–", one.capture ? ["loaded at ", h("code", null, one.capture.lsn), " ", ago(one.capture.taken_at, one.at)] : null)),
    h("p.line", null, h("span.muted", null, "location "), h("code", null, one.uri)),
    files(one.files),
    history(one, again),
    reloads(one),
    validations(one, again),
    schemas(one, again));
}

function reloads(one) {
  if (!one.reloads.length) return null;
  return section("Reloads",
    sortable(`reloads:${one.table}`, [
      { name: "part", show: (r) => r.part },
      { name: "state", wrap: true, show: (r) => (r.reason ? [r.state, h("div.muted", null, r.reason)] : r.state) },
      { name: "since", show: (r) => ago(r.since, one.at) },
      { name: "rows read", extra: true, number: true, show: (r) => count(r.rows) },
      { name: "replaced", number: true, show: (r) => count(r.replaced) },
      { name: "version", extra: true, number: true, show: (r) => count(r.version) },
    ], one.reloads, { rowKey: (r) => `${r.since} ${r.part}`, empty: "", caption: "reloads of the table" }));
}

function validations(one, again) {
  if (!one.validations.length) return null;
  const failed = (v) => v.failed.map((f) => h("div", null, h("code", null, f.expectation), f.columns.length ? ` of ${f.columns.join(", ")}` : "", h("span.muted", null, ` ${f.severity}`)));
  return section("Validations",
    sortable(`validations:${one.table}`, [
      { name: "finished", value: (v) => v.finished_at, show: (v) => ago(v.finished_at, one.at) },
      { name: "epoch", extra: true, number: true, value: (v) => v.epoch, show: (v) => count(v.epoch) },
      { name: "suite", value: (v) => v.suite, show: (v) => v.suite },
      { name: "outcome", value: (v) => v.success, show: (v) => badge(v.success ? "passed" : "failed", "") },
      { name: "rows", extra: true, number: true, value: (v) => v.rows, show: (v) => count(v.rows) },
      { name: "expectations", extra: true, number: true, value: (v) => v.expectations, show: (v) => count(v.expectations) },
      { name: "what failed", wrap: true, show: failed },
      { name: "mode", extra: true, value: (v) => v.mode, show: (v) => v.mode },
    ], one.validations, { rowKey: (v) => `${v.finished_at} ${v.suite}`, empty: "", again, caption: "validations of the table" }));
}

function files(found) {
  if (!found) return section("Files", h("p.muted", null, "There is no version of this table yet, or its log cannot be read."));
  return section("Files",
    h("dl.facts.wide", null,
      fact("rows", count(found.rows), `in version ${count(found.version)}`),
      fact("data files", count(found.count), bytes(found.bytes)),
      fact("size of a file", bytes(found.median), `the median; ${bytes(found.smallest)} to ${bytes(found.largest)}`),
      fact("rows deleted in place", count(found.deleted_rows), `in ${plural(found.with_deletion_vector, "file")} with a deletion vector`)));
}

function history(one, again) {
  return section("What was applied",
    one.latency.length > 1 ? h("div.line", null, h("span.muted", null, "latency "), sparkline(one.latency, "from commit to readable", { width: 320, height: 36 })) : null,
    h("p.line", null, h("span.muted", null, "paths in view: "), Object.keys(one.paths).length ? Object.entries(one.paths).map(([path, number], index) => [index ? ", " : "", `${count(number)} × `, h("code", null, path)]) : "none"),
    sortable(`history:${one.table}`, [
      { name: "epoch", number: true, value: (e) => e.epoch, show: (e) => count(e.epoch) },
      { name: "published", value: (e) => e.applied_at, show: (e) => ago(e.applied_at, one.at) },
      { name: "path", value: (e) => e.path, show: (e) => h("code", null, e.path || "–") },
      { name: "because", extra: true, wrap: true, show: (e) => e.because ?? "–" },
      { name: "changes", number: true, value: (e) => e.rows, show: (e) => count(e.rows) },
      { name: "version", extra: true, number: true, value: (e) => e.version, show: (e) => count(e.version) },
      { name: "position", extra: true, show: (e) => h("code", null, e.lsn) },
      { name: "latency", number: true, value: (e) => e.latency, show: (e) => seconds(e.latency) },
      { name: "stages of the epoch", extra: true, show: (e) => stageBar(e.stages, e.longest_stage) },
    ], one.history, { rowKey: (e) => e.epoch, empty: "none of the newest epochs touched this table", again, caption: "epochs that touched the table" }));
}

function schemas(one, again) {
  return section("Schema",
    one.schemas.length
      ? one.schemas.map((version, index) => h("details", { open: index === 0, "data-key": version.from_lsn },
          h("summary", null, index === 0 ? "now" : "before", ", from ", h("code", null, version.from_lsn), " on: ", plural(version.columns.length, "column"),
            version.changes.length ? h("span.muted", null, ` (${version.changes.join("; ")})`) : null),
          sortable(`columns:${one.table}:${version.from_lsn}`, [
            { name: "column", value: (c) => c.name, show: (c) => [c.name, c.key ? h("span.muted", null, " key") : null] },
            { name: "type in the lake", value: (c) => c.type, show: (c) => h("code", null, c.type) },
            { name: "null", show: (c) => (c.not_null ? "never" : "may be") },
          ], version.columns, { rowKey: (c) => c.name, empty: "", again, caption: `columns from ${version.from_lsn} on` })))
      : h("p.muted", null, "The table has not been loaded."));
}
