// What a person can start here: the pipeline's own DAGs, through Airflow's API with their own session. Airflow decides
// whether they may. Buttons are there for DAGs that are there.

import { airflowLink, dagPath, runPath, setPaused, trigger } from "./airflow.js";
import { h } from "./dom.js";
import { ago } from "./format.js";

const SAYS = {
  load: ["Load", "Loads the tables that are not loaded yet, while replication goes on with the others."],
  reload: ["Reload…", "Replaces a table, or a part of it, by what the source holds. Readers see the old rows until the new ones are published."],
  maintain: ["Maintain", "Compacts tables, and removes files that no cut needs any more."],
};

// What came of the last one; made anew at each refresh, since an element stands in one place only.
let said = { pipeline: "", content: () => null };

/** Of a pipeline; or of one of its tables, which can be reloaded. */
export function actions(one, again) {
  const buttons = Object.keys(SAYS)
    .filter((what) => one.dags?.[what] && (what === "reload" || !one.table))
    .map((what) => h("button", { type: "button", title: SAYS[what][1], click: () => ask(one, what, again) }, SAYS[what][0]));
  const replicate = one.dags?.replicate;
  if (replicate && !one.table) {
    const words = replicate.is_paused ? "Resume replication" : "Pause replication";
    buttons.push(h("button", { type: "button", click: () => ask(one, "pause", again) }, words));
  }
  return h("div.actions", null, buttons, h("p.said", { role: "status" }, said.pipeline === one.pipeline ? said.content() : null));
}

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
function ask(one, what, again) {
  const close = () => dialog.remove();
  const paused = one.dags.replicate?.is_paused;
  const [name, explained] = what === "pause"
    ? [paused ? "Resume replication" : "Pause replication", paused ? "The next slice begins at once." : "The running slice stops cleanly within seconds. The source keeps its log until replication goes on."]
    : SAYS[what];
  const fields = what === "reload" ? reloadFields(one) : [];
  const submit = async (event) => {
    event.preventDefault();
    const values = conf(fields);
    close();
    say(one, () => `${name}: asking Airflow`, again);
    try {
      say(one, await act(one, what, values), again);
    } catch (error) {
      const why = error.status === 403 ? "Airflow does not let you" : error.message;
      say(one, () => `${name}: ${why}`, again);
    }
  };
  const dialog = h("dialog", { close, "aria-label": name },
    h("form", { submit },
      h("h2", null, name.replace("…", "")), h("p", null, explained), fields,
      h("div.actions", null, h("button.primary", { type: "submit" }, name.replace("…", "")), h("button", { type: "button", click: close }, "Cancel"))));
  document.body.append(dialog);
  dialog.showModal();
}

async function act(one, what, values) {
  if (what === "pause") {
    const dag = one.dags.replicate;
    await setPaused(dag.dag_id, !dag.is_paused);
    return () => [airflowLink(dagPath(dag.dag_id), dag.dag_id), dag.is_paused ? " goes on" : " is paused"];
  }
  const dag = one.dags[what];
  const run = await trigger(dag.dag_id, values);
  const waits = dag.is_paused ? ": it waits, because the DAG is paused" : "";
  return () => [airflowLink(runPath(dag.dag_id, run.dag_run_id), `a run of ${dag.dag_id}`), ` was started${waits}`];
}

function reloadFields(one) {
  const loaded = (one.table_list ?? []).filter((table) => !["new", "removed"].includes(table.state));
  const names = one.table ? [one.table] : loaded.map((table) => table.table);
  return [
    h("label", null, "Table", h("select", { name: "table", required: true }, names.map((name) => h("option", null, name)))),
    h("label", null, "Partitions, one a line (none: the whole table)", h("textarea", { name: "partitions", rows: 3 })),
    h("label", null, "Or rows by a predicate: id between 5 and 9", h("input", { name: "where" })),
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
