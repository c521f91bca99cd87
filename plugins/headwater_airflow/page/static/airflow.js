// Airflow around the page: its REST API with the user's own session, so that its permissions decide, and its addresses.

import { h } from "./dom.js";

const ROOT = document.querySelector("base").dataset.airflow;
const TIMEOUT_MS = 20000;
const SENSORS_MS = 30000;
const NONE_MS = 60000;
const AT_ONCE = 4;

/** Why a request failed, in words for a person. `status` 0: nobody answered. */
export class RequestError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export async function request(address, options = {}) {
  let response;
  try {
    const headers = { Accept: "application/json", ...options.headers };
    response = await fetch(address, { signal: AbortSignal.timeout(TIMEOUT_MS), ...options, headers });
  } catch {
    throw new RequestError(0, "Airflow does not answer");
  }
  if (response.ok) return response.json();
  let detail = response.statusText;
  try {
    const body = await response.json();
    detail = typeof body.detail === "string" ? body.detail : JSON.stringify(body.detail);
  } catch {
    // no JSON: the status line says enough
  }
  if (response.status === 401) detail = "your session has ended: log in to Airflow again";
  throw new RequestError(response.status, detail);
}

const api = (path, options) => request(`${ROOT}api/v2/${path}`, options);

const send = (method, path, body) =>
  api(path, { method, body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });

/** Everything in a list. However many entries are asked for, Airflow gives its `maximum_page_limit` at once. */
async function all(path, name) {
  const found = [];
  for (;;) {
    const page = await api(`${path}&limit=100&offset=${found.length}`);
    found.push(...page[name]);
    if (!page[name].length || found.length >= page.total_entries) return found;
  }
}

/** The pipeline's DAGs that this user may read, by the part of their id behind the dot, with their newest runs. */
export async function dagsOf(pipeline) {
  // Airflow leaves the dot out, so DAGs of `shop_eu` come as well as those of `shop`.
  const found = await all(`dags?order_by=dag_id&dag_id_prefix_pattern=${encodeURIComponent(`${pipeline}.`)}`, "dags");
  const dags = found.filter((dag) => dag.dag_id.startsWith(`${pipeline}.`));
  const runs = await Promise.all(
    dags.map((dag) => api(`dags/${encodeURIComponent(dag.dag_id)}/dagRuns?limit=1&order_by=-run_after`).catch(() => null)));
  return Object.fromEntries(
    dags.map((dag, index) => [dag.dag_id.slice(pipeline.length + 1), { ...dag, run: runs[index]?.dag_runs[0] ?? null }]));
}

/** The newest failed runs, of any DAG that this user may read. */
export async function failedRuns() {
  return (await api("dags/~/dagRuns?state=failed&order_by=-run_after&limit=50")).dag_runs;
}

/** Sensors that wait for the lake of the pipeline file `file`, as far as this user may read their DAGs. They are found
 * among everything that is deferred, of any class and DAG, and therefore not at each refresh. */
export async function waitingSensors(file) {
  if (Date.now() - looked > SENSORS_MS) {
    looked = Date.now();
    sensors = deferredSensors();
  }
  // Workers may name the file by a relative path, or see it at another mount. The pages' files are in one folder.
  const nameOf = (path) => String(path ?? "").split("/").at(-1);
  return (await sensors).filter((task) => nameOf(task.rendered_fields?.pipeline) === nameOf(file));
}

let looked = 0;
let sensors;

async function deferredSensors() {
  const deferred = await all("dags/~/dagRuns/~/taskInstances?state=deferred&order_by=id", "task_instances");
  const ids = new Set(deferred.map((task) => task.id));
  for (const id of requests.keys()) if (!ids.has(id)) requests.delete(id);
  const found = deferred.filter((task) => ["FreshnessTrigger", "SensorTrigger"].includes(kindOf(task)));
  const left = found.entries();
  const some = async () => {
    for (const [index, task] of left) found[index] = await withRequest(task);
  };
  await Promise.all(Array.from({ length: AT_ONCE }, some));
  return found;
}

const kindOf = (task) => task.trigger?.classpath.split(".").at(-1);

// What the XComs of waiting tasks say, by the task's try: it does not change. A task that has none, since its lake could
// not be looked at yet, is asked again after a while.
const requests = new Map();

/** A sensor with what it asks for. Of one that began in the triggerer nothing is rendered: there its XCom says it. */
async function withRequest(task) {
  if (kindOf(task) === "FreshnessTrigger") return task;
  if (!(requests.get(task.id)?.until > Date.now())) {
    const place = `dags/${encodeURIComponent(task.dag_id)}/dagRuns/${encodeURIComponent(task.dag_run_id)}`;
    const kept = await api(`${place}/taskInstances/${encodeURIComponent(task.task_id)}/xcomEntries/headwater_wait?deserialize=true&map_index=${task.map_index}`).catch(() => null);
    requests.set(task.id, { fields: kept?.value ?? {}, until: kept?.value ? Infinity : Date.now() + NONE_MS });
  }
  return { ...task, rendered_fields: requests.get(task.id).fields };
}

export const trigger = (dag, conf) =>
  send("POST", `dags/${encodeURIComponent(dag)}/dagRuns`, { logical_date: null, conf });

export const setPaused = (dag, paused) =>
  send("PATCH", `dags/${encodeURIComponent(dag)}?update_mask=is_paused`, { is_paused: paused });

export const dagPath = (dag) => `dags/${encodeURIComponent(dag)}`;
export const runPath = (dag, run) => `${dagPath(dag)}/runs/${encodeURIComponent(run)}`;
export const taskPath = (task) => `${runPath(task.dag_id, task.dag_run_id)}/tasks/${encodeURIComponent(task.task_id)}`;

/** A link to a page of Airflow. Its UI embeds this page in a frame that may not navigate what is around it: there the
 * link is made, and followed, in the surrounding document. */
export function airflowLink(path, ...content) {
  const click = (event) => {
    if (parent === window) return;
    event.preventDefault();
    const outer = parent.document.createElement("a");
    outer.href = event.currentTarget.href;
    if (event.ctrlKey || event.metaKey || event.shiftKey) outer.target = "_blank";
    outer.click();
  };
  return h("a", { href: ROOT + path, click }, content);
}
