// The first page: every pipeline that the user may see, what is wrong with pipeline files, and nothing else.

import { airflowLink, failedRuns, request, runPath } from "./airflow.js";
import { h } from "./dom.js";
import { ago, bytes, count, plural, rate, seconds } from "./format.js";
import { attention, badge, fact, gauge, health, sparkline } from "./parts.js";

const SILENT = "source unreachable";

export const title = () => "Pipelines";

export const load = () => request("api/pipelines");

export async function more() {
  return { failed: await failedRuns().catch(() => []) };
}

export function show(found) {
  const { pipelines, faults, folder, setting, failed = [] } = found;
  return h("main", null,
    h("h1", null, "Pipelines"),
    faults.map((fault) => attention({ title: `${fault.file} cannot be used`, reason: fault.message, remedy: fault.remedy })),
    pipelines.length
      ? h("ul.cards", null, pipelines.map((one) => card(one, failed)))
      : empty(folder, setting));
}

function empty(folder, setting) {
  return h("div.note.idle", null,
    h("div.note-title", null, setting ? `${setting} is not set` : "There is no pipeline that you may see"),
    setting
      ? h("p", null, "Name the folder of the pipeline files in the API server's environment: ", h("code", null, `${setting}=/etc/headwater`))
      : h("p", null, folder ? ["Pipeline files lie in ", h("code", null, folder), ". "] : null,
          "A pipeline is shown to those who may read its DAG ", h("code", null, "<pipeline>.replicate"), "."));
}

function card(one, failed) {
  const href = `pipelines/${encodeURIComponent(one.pipeline)}`;
  const head = h("div.card-head", null, h("h2", null, h("a", { href }, one.pipeline)), badge(one.state, stateTitle(one)));
  if (one.error || one.state === "gathering")
    return h("li.card", { "data-key": one.pipeline }, head,
      one.error
        ? attention({ title: "The lake cannot be shown", reason: one.error.message, remedy: one.error.remedy })
        : h("p.muted", null, "gathering…"));
  const failure = failed.find((run) => run.dag_id.startsWith(`${one.pipeline}.`));
  return h("li.card", { "data-key": one.pipeline }, head,
    health(one.health, one.health.remedy ? h("p", null, h("a", { href }, "See what to do")) : null),
    h("dl.facts", null, lagFacts(one), walFact(one), transactionFact(one)),
    one.latency.length > 1 ? h("div.line", null, h("span.muted", null, "latency "), sparkline(one.latency.map((point) => point[1]), "from commit to readable")) : null,
    h("div.line", null, tableCounts(one)),
    suspended(one),
    lastFailure(failure, one));
}

export function stateTitle(one) {
  return {
    running: "a driver runs and all tables are active",
    "catching up": "a driver runs, and some tables are not active yet",
    stopped: "replication is stopped: no driver runs",
    paused: "no driver replicates until somebody resumes it",
    suspended: "a table is suspended: see what to do",
    loading: "a load runs, or ended before it was done",
    new: "no table is loaded yet",
    unknown: "the source does not answer, and Headwater has not watched the lake long enough to tell",
    unreadable: "the lake cannot be read",
    gathering: "the lake is being read",
  }[one.state];
}

export function lagFacts(one) {
  const unknown = one.source.answers ? "nothing is replicated yet" : SILENT;
  return [
    fact("lag", seconds(one.lag_seconds), one.lag_seconds === null ? unknown : `${bytes(one.lag_bytes)} of the log`,
      "how stale the last of the tables in step is, by the source's clock"),
    fact("rate", rate(one.changes_per_second), one.catching_up ? `caught up in about ${seconds(one.eta_seconds)}` : one.changes_per_second === null ? null : "changes in the last minute"),
    fact("published", ago(one.published_at, one.at), one.epoch ? `epoch ${count(one.epoch)}` : null, "the newest epoch"),
  ];
}

export function walFact(one) {
  const { slot } = one;
  const kept = slot.retained_wal_bytes;
  if (kept === null) return fact("retained WAL", "–", one.source.answers ? slot.reason : SILENT);
  const bound = slot.wal_bound_bytes;
  const words = bound ? `${bytes(kept)} of ${bytes(bound)}` : `${bytes(kept)}, without a bound`;
  return fact("retained WAL", bytes(kept),
    bound ? [`of ${bytes(bound)} at most`, gauge(kept, bound, words)] : "no bound: max_slot_wal_keep_size is -1",
    `what the source keeps for the slot ${slot.name}, ${slot.active ? "which is being read" : "which nobody reads"}`);
}

export function transactionFact(one) {
  const oldest = one.oldest_transaction;
  if (!one.source.answers) return fact("oldest open transaction", "–", SILENT);
  if (oldest && oldest.seconds === null)
    return fact("oldest open transaction", "age not visible", oldest.what, "ages of others' transactions are shown to members of pg_read_all_stats");
  return fact("oldest open transaction", oldest ? seconds(oldest.seconds) : "none", oldest?.what ?? null);
}

function tableCounts(one) {
  const all = Object.values(one.tables).reduce((sum, value) => sum + value, 0);
  return [h("span.muted", null, plural(all, "table"), ": "),
    Object.entries(one.tables).map(([state, number]) => [badge(state, null, one.running === false), h("span.count", null, ` ${count(number)} `)])];
}

export function withoutSource(one) {
  return one.source.answers ? null
    : attention({ title: "Source unreachable: values marked – are unknown", reason: one.source.reason, kind: "going" });
}

/** The suspended tables, but for the one that the health is about. */
export const besides = (one) => one.attention.filter((table) => table.table !== one.health.table);

function suspended(one) {
  const [first, ...others] = besides(one);
  const more = others.length + one.more_attention;
  return first && [
    attention({ title: [h("a", { href: tableHref(one.pipeline, first.table) }, first.table), " is suspended"], reason: first.reason, since: ago(first.since, one.at), cure: [] }),
    more > 0 ? h("p.muted", null, `and ${plural(more, "more suspended table")}`) : null,
  ];
}

function lastFailure(failure, one) {
  return failure
    ? h("p.line", null, h("span.muted", null, "last failed run: "),
        airflowLink(runPath(failure.dag_id, failure.dag_run_id), failure.dag_id), " ", ago(failure.end_date ?? failure.run_after, one.at))
    : null;
}

export function tableHref(pipeline, table) {
  return `pipelines/${encodeURIComponent(pipeline)}/tables/${encodeURIComponent(table)}`;
}
