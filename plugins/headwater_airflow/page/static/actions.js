// What a person can start here: the pipeline's own DAGs, through Airflow's API with their own session. Airflow decides
// whether they may. Buttons are there for DAGs that are there.

import { airflowLink, dagPath, runPath, setPaused, trigger } from "./airflow.js";
import { h } from "./dom.js";
import { ago } from "./format.js";
import { copyButton } from "./parts.js";

// What came of the last one; made anew at each refresh, since an element stands in one place only.
let said = { pipeline: "", content: () => null };

/** Of a pipeline; or of one of its tables, which can be reloaded. */
export function actions(one, again) {
  const known = one.table ? [reload] : [load, reload, verify, maintain, replication];
  const buttons = known.map((make) => make(one)).filter(Boolean).map((action) => button(one, action, again));
  return h("div.actions", null, buttons, h("p.said", { role: "status" }, said.pipeline === one.pipeline ? said.content() : null));
}

/** What to do about a health or a table's state: the button of the DAG that does it, with the command for a shell folded
 * behind; or the remedy alone, where a person has to do something else, too. */
export function cure(one, { remedy, cure: known }, again) {
  if (!remedy) return null;
  const action = known && cureBy(one, known);
  const command = h("p", null, "What to do: ", h("code", null, remedy), " ", copyButton(remedy));
  return action ? h("div.actions", null, button(one, action, again, "primary"), h("details", null, h("summary", null, "in a shell"), command)) : command;
}

function cureBy(one, { dag, conf }) {
  const table = conf.table ?? conf.tables?.[0];
  if (dag === "replicate") return one.dags?.replicate?.is_paused ? replication(one) : run(one, dag, "Start replication", "Starts a run of the DAG now: a driver goes on where the last one ended.", {});
  if (dag === "resume") return run(one, dag, "Resume the pipeline", "Lifts the pause, and starts a run of the DAG that replicates.", {});
  if (dag === "load") return conf.again ? run(one, dag, `Load ${conf.tables.join(", ")} again`, "Reads the whole table from the source, while the others go on. Readers see the old rows until it is done.", conf) : load(one);
  if (dag === "verify") return run(one, dag, table ? `Repair ${table}` : "Compare and repair", "Compares source and lake, writes what differs, and lifts suspensions.", conf);
  if (conf.changed) return run(one, dag, "Compare what has changed, and repair", "Finds in the source's catalog what may differ, compares it and repairs it.", conf);
  const part = conf.partitions ? `${conf.partitions.join(", ")} of ${table}` : conf.where ? `rows of ${table}` : table;
  return run(one, dag, `Reload ${part}`, RELOADED, conf);
}

const RELOADED = "Replaces a table, or a part of it, by what the source holds. Readers see the old rows until the new ones are published.";
const load = (one) => run(one, "load", "Load", "Loads the tables that are not loaded yet, while replication goes on with the others.", {});
const verify = (one) => run(one, "verify", "Verify", "Compares every row of source and lake. Changes nothing; the run fails if they differ.", {});
const maintain = (one) => run(one, "maintain", "Maintain", "Compacts tables, and removes files that no cut needs any more.", {});

/** A run of a DAG of the pipeline; null where there is no such DAG, or this user may not see it. */
function run(one, what, name, explained, values, fields = []) {
  const dag = one.dags?.[what];
  if (!dag) return null;
  const start = async (filled) => {
    const started = await trigger(dag.dag_id, { ...values, ...filled });
    const waits = dag.is_paused ? ": it waits, because the DAG is paused" : "";
    return () => [airflowLink(runPath(dag.dag_id, started.dag_run_id), `a run of ${dag.dag_id}`), ` was started${waits}`];
  };
  return { name, explained, fields, start };
}

function reload(one) {
  return run(one, "reload", "Reload…", RELOADED, {}, reloadFields(one, one.table));
}

function replication(one) {
  const dag = one.dags?.replicate;
  if (!dag) return null;
  const start = async () => {
    await setPaused(dag.dag_id, !dag.is_paused);
    return () => [airflowLink(dagPath(dag.dag_id), dag.dag_id), dag.is_paused ? " goes on" : " is paused"];
  };
  return dag.is_paused
    ? { name: "Resume replication", explained: "The next slice begins at once.", fields: [], start }
    : { name: "Pause replication", explained: "The running slice stops cleanly within seconds. The source keeps its log until replication goes on.", fields: [], start };
}

const button = (one, action, again, kind) =>
  h(kind ? `button.${kind}` : "button", { type: "button", title: action.explained, click: () => ask(one, action, again) }, action.name);

/** The pipeline's DAGs, each with its newest run. */
export function dagLinks(one) {
  const dags = Object.values(one.dags ?? {});
  if (!dags.length) return null;
  return h("p.line.dags", null, h("span.muted", null, "DAGs: "), dags.map((dag) => h("span.dag", { "data-key": dag.dag_id },
    airflowLink(dagPath(dag.dag_id), dag.dag_id), dag.is_paused ? h("span.muted", null, " paused") : null,
    dag.run
      ? h("span.muted", null, " ", airflowLink(runPath(dag.dag_id, dag.run.dag_run_id), dag.run.state), " ", ago(dag.run.end_date ?? dag.run.start_date ?? dag.run.run_after, one.at))
      : null)));
}

/** A dialog, since a frame of Airflow's may not use the browser's own. */
function ask(one, { name, explained, fields, start }, again) {
  const close = () => dialog.remove();
  const plain = name.replace("…", "");
  const submit = async (event) => {
    event.preventDefault();
    const filled = conf(fields);
    close();
    say(one, () => `${plain}: asking Airflow`, again);
    try {
      say(one, await start(filled), again);
    } catch (error) {
      const why = error.status === 403 ? "Airflow does not let you" : error.message;
      say(one, () => `${plain}: ${why}`, again);
    }
  };
  const dialog = h("dialog", { close, "aria-label": plain },
    h("form", { submit },
      h("h2", null, plain), h("p", null, explained), fields,
      h("div.actions", null, h("button.primary", { type: "submit" }, plain), h("button", { type: "button", click: close }, "Cancel"))));
  document.body.append(dialog);
  dialog.showModal();
}

function reloadFields(one, table) {
  const loaded = (one.table_list ?? []).filter((row) => !["new", "removed"].includes(row.state));
  const names = table ? [table] : loaded.map((row) => row.table);
  return [
    h("label", null, "Table", h("select", { name: "table", required: true }, names.map((name) => h("option", null, name)))),
    h("label", null, "Partitions, one a line (empty: the whole table)", h("textarea", { name: "partitions", rows: 3 })),
    h("label", null, "Or only the rows of a predicate, for example: id between 5 and 9", h("input", { name: "where" })),
  ];
}

/** What was filled in, as the DAG's params. */
function conf(fields) {
  const [table, partitions, where] = fields.map((label) => label.lastElementChild);
  if (!table) return {};
  const lines = partitions.value.split("\n").map((line) => line.trim());
  return { table: table.value, partitions: lines.filter(Boolean), ...(where.value.trim() && { where: where.value.trim() }) };
}

function say(one, content, again) {
  said = { pipeline: one.pipeline, content };
  again(true);
}
