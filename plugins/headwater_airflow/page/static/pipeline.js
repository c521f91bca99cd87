// One pipeline: its figures, its tables, its newest epochs, the sensors that wait for it, and what can be started.

import { actions, cure, dagLinks } from "./actions.js";
import { airflowLink, dagsOf, request, taskPath, waitingSensors } from "./airflow.js";
import { h } from "./dom.js";
import { history } from "./history.js";
import { ago, bytes, count, plural, rate, seconds } from "./format.js";
import { besides, lagFacts, stateTitle, tableHref, transactionFact, walFact, withoutSource } from "./overview.js";
import { attention, badge, fact, folded, health, section, sortable, sparkline, stageBar } from "./parts.js";

// The stages in the order of the data's way, and what the driver does in each.
const STAGES = {
  send: "The source sends a commit; until it arrives here.",
  receive: "The reader process takes the log from the connection.",
  frame: "It gathers what arrived into chunks.",
  ship: "It hands the chunks to the driver.",
  queue: "Changes wait until their batch is closed: commits that come close together share one.",
  wait: "The batch waits for a free thread, or for its table's batch before it.",
  decode: "Values of the log become columns.",
  net: "Several changes of a row become one.",
  plan: "The rows in the lake that change are found.",
  write: "New files and deletion vectors are written.",
  commit: "The table's new version is committed.",
  other: "Everything else between two of these.",
  publish: "The epoch is written to the ledger: now the changes are readable.",
  apply: "How fast the published position moves while there is something to apply.",
  log: "How fast the source writes its log.",
};
const WAY = Object.keys(STAGES);
const RANK = { suspended: 0, loading: 1, "catching up": 2, new: 3, active: 4, removed: 5 };

export const title = ({ pipeline }) => pipeline;

export function load({ pipeline }) {
  return request(`api/pipelines/${encodeURIComponent(pipeline)}`);
}

/** What Airflow knows of it. Without the right to ask, or an answer, there are no buttons and no sensors. */
export async function more({ pipeline }, found) {
  const [dags, waiting] = await Promise.all([
    dagsOf(pipeline).catch(() => ({})),
    waitingSensors(found.file).catch(() => []),
  ]);
  return { dags, waiting };
}

export function show(one, place, again) {
  const head = [
    h("nav.path", { "aria-label": "place" }, h("a", { href: "." }, "Pipelines"), " / "),
    h("header", null, h("h1", null, one.pipeline), badge(one.state, stateTitle(one)), actions(one, again)),
  ];
  if (one.error || one.state === "gathering")
    return h("main", null, head, one.error
      ? attention({ title: "The lake cannot be shown", reason: one.error.message, remedy: one.error.remedy })
      : h("p.muted", null, "gathering…"));
  return h("main", null, head,
    health(one.health, cure(one, one.health, again)),
    withoutSource(one),
    warnings(one),
    besides(one).map((table) => attention({
      title: [h("a", { href: tableHref(one.pipeline, table.table) }, table.table), ` is ${table.state}`],
      reason: table.reason, cure: cure(one, table, again), since: ago(table.since, one.at),
    })),
    one.retrying.map((table) => attention({
      kind: "going", title: [h("a", { href: tableHref(one.pipeline, table.table) }, table.table), ` fails and is tried again, ${plural(table.attempts, "failed attempt")} so far`],
      reason: table.reason, since: ago(table.since, one.at),
    })),
    one.more_attention ? h("p.muted", null, `and ${plural(one.more_attention, "more suspended table")}, in the list below`) : null,
    history(one, again),
    loads(one),
    tables(one, again),
    sensors(one),
    waits(one, again),
    dagLinks(one),
    folded("Source and positions", h("dl.facts.wide", null, lagFacts(one), walFact(one), transactionFact(one),
      fact("driver", one.running ? "runs" : one.running === null ? "unknown" : "does not run", one.generation ? `generation ${count(one.generation)}` : null),
      fact("position", one.position?.lsn ?? "–", one.position ? `timeline ${one.position.timeline}` : null, "every commit up to it is in the lake"),
      one.durable_position ? fact("safe from a power cut", one.not_durable_bytes ? `${bytes(one.not_durable_bytes)} behind` : "all of it", one.durable_position.lsn, "up to here a power cut of the lake's host loses nothing; the source keeps its log from here on") : null)),
    stages(one),
    epochs(one, again));
}

/** What stops nothing today, and will cost somebody a night. */
function warnings(one) {
  const { replicate, maintain } = one.dags ?? {};
  const found = [
    one.slot.retained_wal_bytes !== null && one.slot.wal_bound_bytes === null &&
      ["The source's disk is at risk.", " While no driver runs, the source keeps its log without a limit. Set ", h("code", null, "max_slot_wal_keep_size"), " there, or ", h("code", null, "source.wal_ceiling"), " in the pipeline file."],
    replicate?.is_paused && !["new", "loading", "paused"].includes(one.state) &&
      [`The DAG ${replicate.dag_id} is paused.`, " No run of it begins, and the source keeps its log."],
    maintain?.is_paused && !["new", "loading"].includes(one.state) &&
      [`The DAG ${maintain.dag_id} is paused.`, " Files that no cut needs stay in the lake."],
  ].filter(Boolean);
  return found.length ? h("ul.note.going.warnings", { "data-key": "warnings" }, found.map(([title, ...rest]) => h("li", null, h("strong", null, title), rest))) : null;
}

function stages(one) {
  const place = (name) => (WAY.includes(name) ? WAY.indexOf(name) : WAY.length);
  const names = Object.keys(one.stages).sort((one, other) => place(one) - place(other));
  if (!names.length) return null;
  return folded("Where the time goes",
    h("p.muted", null, one.running === false ? "These are the last figures of a driver that has ended." : one.bottleneck ? ["The bottleneck is ", h("strong", null, one.bottleneck), ": the busiest stage of the last ten seconds."] : "No stage is busy for half of its time: the driver waits for the source."),
    sortable(`stages:${one.pipeline}`, [
      { name: "stage", show: (name) => (name === one.bottleneck ? h("strong", null, name) : name) },
      { name: "what happens", extra: true, wrap: true, show: (name) => h("span.muted", null, STAGES[name] ?? "") },
      { name: "busy", number: true, title: "share of the last ten seconds", show: (name) => percent(one.stages[name].busy) },
      { name: "speed", number: true, title: "bytes of the log a second, while busy", show: (name) => (one.stages[name].rate === null ? "–" : `${bytes(one.stages[name].rate)}/s`) },
      { name: "newest epoch", number: true, title: "its part of the newest epoch's time from commit to readable", show: (name) => seconds(one.stages[name].latency_seconds) },
    ], names, { rowKey: (name) => name, empty: "", caption: "stages of the driver" }));
}

const percent = (share) => (share === null ? "–" : `${Math.round(share * 100)} %`);

function loads(one) {
  const loading = one.table_list.filter((table) => table.state === "loading");
  if (!loading.length && !one.jobs.length && !one.reloads.length && !one.loads.length) return null;
  const all = one.table_list.filter((table) => table.state !== "removed").length;
  const done = all - one.table_list.filter((table) => ["loading", "new"].includes(table.state)).length;
  return section("Loads and reloads",
    loading.length ? h("p", null, `${done} of ${plural(all, "table")} loaded; now: `, loading.map((table) => [h("code", null, table.table), ", begun ", ago(table.since, one.at), " "])) : null,
    loading.length ? h("progress", { max: all, value: done, "aria-label": "tables loaded" }) : null,
    one.loads.map((job) => progressOf(job)),
    one.reloads.length ? h("ul", null, one.reloads.map((reload) => h("li", null, "reload of ", h("code", null, reload.table), ` (${reload.part}): ${reload.state}, `, ago(reload.since, one.at), reload.rows === null ? null : `, ${plural(reload.rows, "row")} read`))) : null,
    one.jobs.length ? h("ul", null, one.jobs.map((job) => h("li", { "data-key": job.what }, h("code", null, job.what), ` held by process ${job.pid} on ${job.host}, taken `, ago(job.since, one.at)))) : null);
}

/** A load or reload that runs: as a whole, and each table that is being read. */
function progressOf(job) {
  const row = (key, name, of) => h("li", { "data-key": key },
    h("progress", { max: 1, value: of.done, "aria-label": `${name} done` }), ` ${name}: ${percent(of.done)}, ${plural(of.rows, "row")}, ${bytes(of.bytes)}`,
    of.rows_per_second === null ? null : `, ${rate(of.rows_per_second)} rows, ${bytes(of.bytes_per_second)}/s`,
    of.eta_seconds === null ? null : `, about ${seconds(of.eta_seconds)} left`,
    of.snapshot_seconds ? `, snapshot held for ${seconds(of.snapshot_seconds)}` : null);
  return h("ul.running", { "data-key": `${job.what} ${job.since}` },
    row("all", `${job.what}, ${job.tables_done} of ${plural(job.tables, "table")}`, job),
    job.running.map((table) => row(table.table, `${table.table}${table.part ? ` (${table.part})` : ""} ${table.state}`, table)));
}

function sensors(one) {
  if (!one.waiting?.length) return null;
  const held = one.running === false ? "no driver runs" : one.attention.length ? `${one.attention[0].table} is suspended` : one.bottleneck ? `the stage ${one.bottleneck} is the busiest one` : "";
  return section("Waiting sensors",
    sortable(`waiting:${one.pipeline}`, [
      { name: "task", show: (task) => airflowLink(taskPath(task), `${task.dag_id} / ${task.task_id}`) },
      { name: "since", show: (task) => ago(task.trigger.created_date, one.at) },
      { name: "wants", show: (task) => String(task.rendered_fields.require ?? "now") },
      { name: "of", wrap: true, show: (task) => wanted(task.rendered_fields.tables) },
      { name: "why it waits", wrap: true, show: (task) => why(one, task) || held || "it is not reached yet; the task's log says how far it is" },
    ], one.waiting, { rowKey: (task) => task.id, empty: "", caption: "waiting sensors" }));
}

function waits(one, again) {
  if (!one.waits.length) return null;
  const long = (value) => (value === null ? "–" : seconds(value));
  return folded("Waits of the last seven days",
    h("p.muted", null, "How long those waited that got what they wanted: half of them at most as long as the median, and so on."),
    sortable(`waits:${one.pipeline}`, [
      { name: "who", value: (wait) => wait.who, show: (wait) => wait.who },
      { name: "wants", show: (wait) => wait.requirement },
      { name: "of", extra: true, wrap: true, show: (wait) => wanted(wait.tables) },
      { name: "waits", extra: true, number: true, value: (wait) => wait.runs, show: (wait) => count(wait.runs) },
      { name: "satisfied", extra: true, number: true, value: (wait) => wait.satisfied, show: (wait) => count(wait.satisfied) },
      { name: "median", number: true, value: (wait) => wait.p50, show: (wait) => long(wait.p50) },
      { name: "95 %", extra: true, number: true, value: (wait) => wait.p95, show: (wait) => long(wait.p95) },
      { name: "longest", number: true, value: (wait) => wait.longest, show: (wait) => long(wait.longest) },
      { name: "last", extra: true, show: (wait) => [wait.last.replaceAll("_", " "), ", ", ago(wait.last_at, one.at)] },
    ], one.waits, { rowKey: (wait) => `${wait.who}:${wait.requirement}:${wait.tables}`, empty: "", again, caption: "waits of the last seven days" }));
}

const wanted = (tables) => (Array.isArray(tables) && tables.length ? tables.join(", ") : "all tables");

/** Of the tables that it wants: the first that is not in step. */
function why(one, task) {
  const names = task.rendered_fields.tables;
  const mine = one.table_list.filter((table) => !Array.isArray(names) || !names.length || names.includes(table.table));
  const off = mine.find((table) => !["active", "removed"].includes(table.state));
  return off ? `${off.table} is ${off.state}` : "";
}

function tables(one, again) {
  const key = `filter:${one.pipeline}`;
  const words = (sessionStorage.getItem(key) ?? "").toLowerCase();
  const need = (table) => [RANK[table.state] ?? 9, table.retrying ? 0 : 1, table.late ? 0 : 1];
  const byNeed = (a, b) => need(a).map((part, index) => part - need(b)[index]).find(Boolean) ?? 0;
  const shown = one.table_list.toSorted(byNeed).filter((table) => `${table.table} ${table.state}`.toLowerCase().includes(words));
  const filter = (event) => {
    sessionStorage.setItem(key, event.currentTarget.value);
    again();
  };
  return section("Tables",
    h("label.filter", null, "Show tables with ", h("input", { type: "search", value: sessionStorage.getItem(key) ?? "", placeholder: "name or state", input: filter }),
      h("span.muted", null, ` ${shown.length} of ${one.table_list.length}`)),
    sortable(`tables:${one.pipeline}`, [
      { name: "table", value: (t) => t.table, show: (t) => h("a", { href: tableHref(one.pipeline, t.table) }, t.table) },
      { name: "state", value: (t) => RANK[t.state] ?? 9, show: (t) => [badge(t.state, t.reason, one.running === false), t.since ? h("span.muted", null, " ", ago(t.since, one.at)) : null] },
      { name: "lag", number: true, value: (t) => t.lag_seconds, show: (t) => [seconds(t.lag_seconds), t.late ? h("span.late", { title: `more than the ${seconds(t.freshness_seconds)} of the pipeline file` }, " late") : null] },
      { name: "behind", extra: true, number: true, title: "bytes of the log", value: (t) => t.lag_bytes, show: (t) => bytes(t.lag_bytes) },
      { name: "applied position", extra: true, value: (t) => position(t.applied_lsn), show: (t) => (t.applied_lsn ? h("code", null, t.applied_lsn) : "–") },
      { name: "version", extra: true, number: true, value: (t) => t.version, show: (t) => count(t.version) },
      { name: "changes", extra: true, number: true, title: `in the newest epochs that are kept in view`, value: (t) => t.changes, show: (t) => count(t.changes) },
      { name: "changed", extra: true, value: (t) => t.touched_at, show: (t) => ago(t.touched_at, one.at) },
      { name: "latency", extra: true, value: (t) => t.latency.at(-1) ?? null, show: (t) => sparkline(t.latency, "from commit to readable") },
    ], shown, { rowKey: (t) => t.table, empty: "no table matches", again, caption: "tables" }));
}

/** An LSN as a number that sorts. */
function position(text) {
  if (!text) return null;
  const [high, low] = text.split("/").map((part) => parseInt(part, 16));
  return high * 2 ** 32 + low;
}

function epochs(one, again) {
  return folded("Newest epochs",
    sortable(`epochs:${one.pipeline}`, [
      { name: "epoch", number: true, value: (e) => e.epoch, show: (e) => count(e.epoch) },
      { name: "published", value: (e) => e.applied_at, show: (e) => ago(e.applied_at, one.at) },
      { name: "position", extra: true, show: (e) => h("code", null, e.lsn) },
      { name: "changes", number: true, value: (e) => e.changes, show: (e) => count(e.changes) },
      { name: "tables", extra: true, number: true, value: (e) => e.touched, show: (e) => count(e.touched) },
      { name: "log", extra: true, number: true, value: (e) => e.bytes, show: (e) => bytes(e.bytes) },
      { name: "latency", number: true, value: (e) => e.latency, show: (e) => seconds(e.latency) },
      { name: "longest stage", extra: true, value: (e) => e.longest_stage, show: (e) => e.longest_stage ?? "–" },
      { name: "stages", extra: true, show: (e) => stageBar(e.stages, e.longest_stage) },
    ], one.epochs, { rowKey: (e) => e.epoch, empty: "no epoch was published yet", again, caption: "newest epochs" }));
}

