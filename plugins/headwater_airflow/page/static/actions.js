// What a person can start here: the pipeline's own DAGs, through Airflow's API with their own session. Airflow decides
// whether they may. Buttons are there for DAGs that are there.

import { airflowLink, dagPath, runPath, setPaused, trigger } from "./airflow.js";
import { h } from "./dom.js";
import { ago } from "./format.js";

const SAYS = {
  load: ["Load", "Loads the tables that are not loaded yet. Replication pauses until it is done, and goes on."],
  reload: ["Reload…", "Reads tables, or parts of them, from the source again. Readers keep the old version until then."],
  maintain: ["Maintain", "Compacts tables, and removes files that no cut needs any more."],
};

let said = { pipeline: "", text: null };

export function actions(one, again) {
  const buttons = Object.keys(SAYS)
    .filter((what) => one.dags?.[what])
    .map((what) => h("button", { type: "button", title: SAYS[what][1], click: () => ask(one, what, again) }, SAYS[what][0]));
  const replicate = one.dags?.replicate;
  if (replicate) {
    const words = replicate.is_paused ? "Resume replication" : "Pause replication";
    buttons.push(h("button", { type: "button", click: () => ask(one, "pause", again) }, words));
  }
  return h("div.actions", null, buttons, h("p.said", { role: "status" }, said.pipeline === one.pipeline ? said.text : null));
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
    say(one, `${name}: asking Airflow`, again);
    try {
      say(one, await act(one, what, values), again);
    } catch (error) {
      say(one, error.status === 403 ? `${name}: Airflow does not let you` : `${name}: ${error.message}`, again);
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
    return [airflowLink(dagPath(dag.dag_id), dag.dag_id), dag.is_paused ? " goes on" : " is paused"];
  }
  const dag = one.dags[what];
  const run = await trigger(dag.dag_id, values);
  const waits = dag.is_paused ? ": it waits, because the DAG is paused" : "";
  return [airflowLink(runPath(dag.dag_id, run.dag_run_id), `a run of ${dag.dag_id}`), ` was started${waits}`];
}

function reloadFields(one) {
  const tables = h("select", { name: "tables", multiple: true, size: 6, required: true },
    (one.table_list ?? []).filter((table) => !["new", "removed"].includes(table.state)).map((table) => h("option", null, table.table)));
  return [
    h("label", null, "Tables", tables),
    h("label", null, "Partitions, one a line (none: all)", h("textarea", { name: "partitions", rows: 2 })),
    h("label", null, "Rows with (SQL, of one table)", h("input", { name: "where", placeholder: "id between 5 and 9" })),
  ];
}

/** What was filled in, as the DAG's params; what is empty is left to the DAG. */
function conf(fields) {
  const [tables, partitions, where] = fields.map((label) => label.lastElementChild);
  if (!tables) return {};
  const lines = partitions.value.split("\n").map((line) => line.trim()).filter(Boolean);
  return {
    tables: [...tables.selectedOptions].map((option) => option.value),
    ...(lines.length ? { partitions: lines } : {}),
    ...(where.value.trim() ? { where: where.value.trim() } : {}),
  };
}

function say(one, text, again) {
  said = { pipeline: one.pipeline, text: [text].flat() };
  again(true);
}
