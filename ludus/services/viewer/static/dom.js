// Elements are made from text, never from markup: what models and tasks wrote is untrusted.

/** Returns an element. Attributes that begin with `on` are listeners; null children are left out. */
export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** As `el`, for SVG. */
export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Replaces the children of a node. */
export function fill(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

/** A number with about four digits; text ("nan") as it is. */
export function num(value, digits = 4) {
  if (value === null || value === undefined || value === "") return "";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0"; // not "-0"
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

export function ago(seconds) {
  if (!seconds) return "";
  const past = Math.max(0, Date.now() / 1000 - seconds);
  return `${span(past)} ago`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const s = Math.round(seconds);
  if (s < 90) return `${s} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(1)} h`;
  return `${Math.round(s / 86400)} d`;
}

export function day(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString("sv").slice(0, 16) : "";
}

/** The address of a view of this page. */
export function link(view, query = {}) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") found.append(name, one);
    }
  }
  const text = found.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

export function badge(text, kind = "") {
  return el("span", { class: `badge ${kind}` }, text);
}

const KINDS = { completed: "good", running: "live", failed: "bad", interrupted: "warn", aborted: "bad", unscorable: "warn", holding: "warn", promoted: "good", "rolled back": "bad" };

export function status(name) {
  return badge(name, KINDS[name] ?? (name.startsWith("error") ? "bad" : name.startsWith("trunc") ? "warn" : ""));
}

const tip = () => document.getElementById("tip");

/** Shows the tip beside a point of the window. */
export function showTip(x, y, ...children) {
  const node = fill(tip(), ...children);
  node.hidden = false;
  const right = x + 16 + node.offsetWidth > innerWidth;
  node.style.left = `${Math.max(4, right ? x - 12 - node.offsetWidth : x + 14)}px`;
  node.style.top = `${Math.max(4, Math.min(y - node.offsetHeight - 10, innerHeight - node.offsetHeight - 4))}px`;
}

export function hideTip() {
  tip().hidden = true;
}
