// Elements without a framework. A page is built anew at each refresh and laid over what is shown: nodes that say the
// same stay, so nothing flickers, and focus, scrolling and opened details are kept. What may come and go between
// others has a key (data-key), and so have those others.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "path", "circle", "rect", "line", "polyline", "g", "title"]);

/** An element: h("td.number", { title }, children…). Functions are listeners; false, null and undefined are left out. */
export function h(what, attributes, ...children) {
  const [tag, ...classes] = what.split(".");
  const drawn = DRAWN.has(tag) && (tag !== "title" || attributes?.drawn);
  const element = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === false || value === null || value === undefined || name === "drawn") continue;
    if (typeof value === "function") (element.listeners ??= {})[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const [name, listener] of Object.entries(element.listeners ?? {})) element[`on${name}`] = listener;
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(element, child);
    else if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

/** Make `shown` say what `wanted` says. A row that moves takes the focus along. */
export function lay(shown, wanted) {
  const focused = document.activeElement;
  merge(shown, wanted);
  if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
}

function merge(shown, wanted) {
  const nodes = [...wanted.childNodes];
  const keys = new Set(nodes.map((node) => node.dataset?.key));
  const byKey = new Map();
  for (const node of [...shown.childNodes]) {
    const key = node.dataset?.key;
    if (!key) continue;
    if (keys.has(key)) byKey.set(key, node);
    else node.remove(); // before the others are looked at: they stay where they are
  }
  let at = shown.firstChild;
  const removed = () => {
    const next = at.nextSibling;
    at.remove();
    at = next;
  };
  for (const node of nodes) {
    const key = node.dataset?.key;
    const same = key ? byKey.get(key) : at && !at.dataset?.key && alike(at, node) ? at : null;
    if (same) {
      while (at !== same && at && !at.dataset?.key) removed();
      if (same === at) at = at.nextSibling;
      else shown.insertBefore(same, at);
      take(same, node);
    } else {
      shown.insertBefore(node, at);
    }
  }
  while (at) removed();
}

function alike(one, other) {
  return one.nodeType === other.nodeType && one.nodeName === other.nodeName;
}

function take(shown, wanted) {
  if (shown.nodeType !== Node.ELEMENT_NODE) {
    if (shown.data !== wanted.data) shown.data = wanted.data;
    return;
  }
  for (const { name } of [...shown.attributes])
    if (!wanted.hasAttribute(name) && !(name === "open" && shown.nodeName === "DETAILS")) shown.removeAttribute(name);
  for (const { name, value } of wanted.attributes)
    if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  for (const name of Object.keys({ ...shown.listeners, ...wanted.listeners }))
    shown[`on${name}`] = wanted.listeners?.[name] ?? null;
  shown.listeners = wanted.listeners;
  // What a person types or chooses is theirs; a dialog is closed by its own buttons, and an element of our own making
  // (its name has a hyphen) draws its content by itself.
  if (!["INPUT", "SELECT", "TEXTAREA", "DIALOG"].includes(shown.nodeName) && !shown.nodeName.includes("-")) merge(shown, wanted);
}
