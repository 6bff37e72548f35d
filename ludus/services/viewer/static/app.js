// Routes, theme, keys.
import { el, fill, link } from "./dom.js";
import { keepToken, Failure } from "./api.js";

const VIEWS = {
  "": () => import("./runs.js"),
  run: () => import("./run.js"),
  step: () => import("./step.js"),
  rollouts: () => import("./rollouts.js"),
  rollout: () => import("./rollout.js"),
  "ab-rollouts": () => import("./ab-rollouts.js"),
  "ab-rollout": () => import("./ab-rollout.js"),
};

const main = document.getElementById("main");
const crumbs = document.getElementById("crumbs");
let leaving = new AbortController();
let actions = {};
let up = "#/";

function parsed() {
  const hash = location.hash.replace(/^#\/?/, "");
  const [path, text] = hash.includes("?") ? [hash.slice(0, hash.indexOf("?")), hash.slice(hash.indexOf("?") + 1)] : [hash, ""];
  if (path.startsWith("token=")) {
    keepToken(new URLSearchParams(path).get("token"));
    history.replaceState(null, "", "#/");
    return ["", new URLSearchParams()];
  }
  const query = new URLSearchParams(text);
  if (query.has("token")) {
    keepToken(query.get("token"));
    query.delete("token");
    history.replaceState(null, "", `#/${path}?${query}`);
  }
  return [path, query];
}

async function show() {
  const [view, query] = parsed();
  leaving.abort();
  const left = (leaving = new AbortController());
  actions = {};
  const state = document.getElementById("state");
  fill(state);
  delete main.dataset.ready;
  const page = {
    main,
    query,
    signal: left.signal,
    crumbs(...parts) {
      up = parts.length > 1 ? parts.at(-2)[1] : "#/";
      const titles = parts.map((part) => part[0]);
      document.title = [...titles].reverse().concat("ludus").join(" · ");
      fill(crumbs, parts.map(([text, href], i) => [el("span", { class: "soft" }, "/"), i === parts.length - 1 ? el("span", { "aria-current": "page" }, text) : el("a", { href }, text)]));
    },
    keys(given) {
      actions = given;
    },
    state(...children) {
      if (!left.signal.aborted) fill(state, ...children);
    },
    /** Changes the address without a new view. */
    remember(name, given) {
      history.replaceState(null, "", link(name, given));
    },
  };
  try {
    if (!VIEWS[view]) throw new Failure(404, "unknown", `there is no page ${view}`);
    const found = await VIEWS[view]();
    if (left.signal.aborted) return;
    await found.show(page);
    main.dataset.ready = view || "runs";
  } catch (error) {
    if (left.signal.aborted || error.name === "AbortError") return;
    fill(main, problem(error));
    main.dataset.ready = "problem";
  }
}

/** What went wrong, and what to do. */
export function problem(error) {
  if (error.status === 401) return tokenForm();
  const known = error instanceof Failure;
  if (!known) console.error(error);
  return el("section", { class: "problem", role: "alert" },
    el("h1", {}, known ? TITLES[error.kind] ?? "This cannot be shown" : "The page failed"),
    el("p", {}, error.message),
    el("p", {}, el("button", { type: "button", onclick: show }, "Try again"), " ", el("a", { href: "#/" }, "All runs")));
}

const TITLES = {
  store: "The run store cannot be read",
  no_runs: "No runs yet",
  offline: "The server is gone",
  unknown_name: "Not found",
};

function tokenForm() {
  const input = el("input", { type: "password", autocomplete: "off", "aria-label": "Token", id: "token" });
  return el("section", { class: "problem" },
    el("h1", {}, "This page needs a token"),
    el("p", {}, "Whoever shared it has the token: open the address that ends in #token=…, or enter it."),
    el("form", { onsubmit: (event) => { event.preventDefault(); keepToken(input.value.trim()); show(); } }, input, " ", el("button", {}, "Open")));
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("ludus-view-theme", root.dataset.theme);
  } catch {
    // kept until the page is left
  }
}

try {
  const kept = localStorage.getItem("ludus-view-theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
} catch {
  // the system's choice
}

const KEYS = [
  ["j, k", "next and previous row, or segment"], ["Enter", "open the row"], ["u, Esc", "up"], ["/", "search"],
  ["c", "colour of the tokens: logprob, entropy, advantage, none"], ["[, ]", "previous and next rollout of the group"],
  ["b", "beside it: another rollout of the group"], ["x", "unfold or fold all"], ["t", "light or dark"], ["?", "these keys"],
];

function help() {
  const dialog = document.getElementById("help");
  fill(dialog, el("h2", {}, "Keys"), el("dl", {}, KEYS.map(([key, told]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, told)])),
    el("form", { method: "dialog" }, el("button", { autofocus: true }, "Close")));
  dialog.showModal();
}

/** Moves the focus among the links marked as rows. */
function move(by) {
  const rows = [...main.querySelectorAll("[data-row]")].filter((row) => row.offsetParent !== null);
  if (!rows.length) return;
  const here = rows.indexOf(document.activeElement);
  const next = rows[Math.max(0, Math.min(rows.length - 1, here < 0 ? (by > 0 ? 0 : rows.length - 1) : here + by))];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const all = { j: () => move(1), k: () => move(-1), ArrowDown: null, u: () => (location.hash = up), Escape: () => (location.hash = up), t: theme, "?": help, ...actions };
  if (all[event.key]) {
    event.preventDefault();
    all[event.key]();
  }
});
document.getElementById("theme").addEventListener("click", theme);
document.getElementById("keys").addEventListener("click", help);
addEventListener("hashchange", show);
show();
