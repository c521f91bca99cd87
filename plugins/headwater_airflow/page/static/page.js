// Which page is meant, and its life: load, show, look again every few seconds while somebody can see it.

import { h, lay } from "./dom.js";
import * as overview from "./overview.js";
import { attention } from "./parts.js";
import * as pipeline from "./pipeline.js";
import * as table from "./table.js";
import { followTheme } from "./theme.js";

const REFRESH_MS = 5000;
const SOON_MS = 1000;

const shown = document.getElementById("page");
const place = where();
const view = place.table ? table : place.pipeline ? pipeline : overview;
let data = null;
let failure = null;
let timer = null;
let loading = false;
let more = {};

function where() {
  const base = new URL(document.baseURI).pathname;
  const [, name, , ...rest] = location.pathname.slice(base.length).split("/");
  return { pipeline: name ? decodeURIComponent(name) : null, table: rest.length ? decodeURIComponent(rest.join("/")) : null };
}

function render() {
  const content = data
    ? view.show(data, place, again)
    : h("main", null, failure ? null : h("p.muted.loading", null, "loading…"));
  const banner = failure
    ? attention({
        title: data ? "This is not the newest" : "This page cannot be shown",
        reason: failure.message + (data ? `; shown as of ${clock(data)}` : ""),
        kind: data ? "going" : "bad",
      })
    : null;
  content.dataset.key = "content";
  lay(shown, h("div", null, banner, content, h("footer.muted", null, footer())));
  shown.setAttribute("aria-busy", String(!data && !failure));
}

function clock(found) {
  const at = found.at ?? found.pipelines?.find((one) => one.at)?.at;
  return at ? `${at.slice(11, 19)} UTC` : "earlier";
}

function footer() {
  if (!data) return "";
  return `as of ${clock(data)}; refreshes every ${REFRESH_MS / 1000} s while it is visible`;
}

/** Show what is there once more; with `soon`, ask again at once, too. */
function again(soon = false) {
  render();
  if (soon === true) schedule(SOON_MS);
}

async function look() {
  if (loading) return;
  loading = true;
  try {
    data = { ...more, ...(await view.load(place)) };
    failure = null;
    addMore();
  } catch (error) {
    failure = error;
    if (error.status === 404 || error.status === 403) data = null;
  } finally {
    loading = false;
  }
  render();
  const gathering = data?.state === "gathering" || data?.pipelines?.some((one) => one.state === "gathering");
  schedule(gathering ? SOON_MS : REFRESH_MS);
}

/** What Airflow's API adds is shown when it comes: a page does not wait for it. */
async function addMore() {
  if (!view.more || data.error) return;
  more = await view.more(place, data);
  data = { ...data, ...more };
  render();
}

function schedule(milliseconds) {
  clearTimeout(timer);
  timer = document.hidden ? null : setTimeout(look, milliseconds);
}

document.title = `${view.title(place)} · Headwater`;
followTheme();
render();
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : look()));
look();
