// Light or dark, as Airflow shows itself: inside its UI by the class of the surrounding document, which is watched;
// alone in a tab by the choice that Airflow keeps in this browser, else by the system's.

const system = matchMedia("(prefers-color-scheme: dark)");

function surrounding() {
  try {
    return parent !== window ? parent.document.documentElement : null;
  } catch {
    return null; // embedded by somebody else
  }
}

function stored() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

function chosen() {
  const outer = surrounding();
  if (outer?.classList.contains("dark")) return "dark";
  if (outer?.classList.contains("light")) return "light";
  const kept = stored();
  if (kept === "dark" || kept === "light") return kept;
  return system.matches ? "dark" : "light";
}

export function followTheme() {
  const apply = () => (document.documentElement.dataset.theme = chosen());
  apply();
  system.addEventListener("change", apply);
  addEventListener("storage", apply);
  const outer = surrounding();
  if (outer) new MutationObserver(apply).observe(outer, { attributes: true, attributeFilter: ["class"] });
}
