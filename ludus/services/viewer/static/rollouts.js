// Rollouts of a run: searched, filtered, sorted, in pages.
import { el, fill, link, status, num, badge } from "./dom.js";
import { get } from "./api.js";
import { tabs } from "./run.js";

const SORTS = { time: "newest", reward: "reward", tokens: "tokens", turns: "turns" };
const FIELDS = ["sort", "order", "status", "tool", "stage", "step", "group", "dropped", "min_reward", "max_reward", "text"];
const MOST_PARTS = 40;

export async function show(page) {
  const { main, query, signal } = page;
  const run = query.get("run") ?? "";
  page.crumbs([run, link("run", { run })], ["rollouts", ""]);
  const facts = await get("run", { run }, signal);
  const ask = Object.fromEntries(FIELDS.map((name) => [name, query.get(name) ?? ""]));
  const body = el("tbody", {});
  const foot = el("p", { class: "foot", role: "status" });
  let next = null, serial = 0, shown = 0, examined = 0;

  const set = (name, value) => {
    ask[name] = value;
    page.remember("rollouts", { run, ...ask });
    start();
  };
  const choice = (name, label, options) => el("label", {}, label, el("select", { name, onchange: (event) => set(name, event.target.value) },
    el("option", { value: "" }, "any"), options.map((one) => el("option", { value: one, selected: ask[name] === one }, one))));
  const field = (name, label, attributes) => el("label", {}, label, el("input", { name, value: ask[name], ...attributes, onchange: (event) => set(name, event.target.value.trim()) }));
  const search = el("input", { type: "search", name: "text", value: ask.text, placeholder: "id, task, error or reason  ( / )", "aria-label": "search", oninput: debounce((event) => set("text", event.target.value.trim())) });
  const form = el("form", { class: "filters", onsubmit: (event) => event.preventDefault() }, search,
    choice("status", "status", facts.statuses), choice("tool", "tool", facts.tools), choice("stage", "stage", Object.keys(facts.stages)),
    field("step", "step", { inputmode: "numeric", size: 5 }), field("min_reward", "reward from", { inputmode: "decimal", size: 5 }), field("max_reward", "to", { inputmode: "decimal", size: 5 }),
    el("label", {}, "dropped", el("select", { name: "dropped", onchange: (event) => set("dropped", event.target.value) },
      [["", "any"], ["true", "dropped"], ["false", "kept"]].map(([value, text]) => el("option", { value, selected: ask.dropped === value }, text)))),
    ask.group ? el("button", { type: "button", class: "chip", onclick: () => { location.hash = link("rollouts", { run, ...ask, group: "" }); } }, `group ${ask.group} ×`) : null);

  const heads = el("tr", {});
  function drawHeads() {
    const order = ask.order || "desc", sort = ask.sort || "time";
    const head = (name, text) => el("th", { scope: "col", "aria-sort": sort === name ? (order === "desc" ? "descending" : "ascending") : null },
      el("button", { type: "button", onclick: () => { ask.order = sort === name && order === "desc" ? "asc" : ""; drawHeads(); set("sort", name === "time" ? "" : name); drawHeads(); } }, text, sort === name ? (order === "desc" ? " ↓" : " ↑") : ""));
    fill(heads, head("time", "rollout"), head("reward", SORTS.reward), el("th", {}, "status"), head("turns", "turns"), head("tokens", "tokens"), el("th", {}, "task"), el("th", {}, "tools"), el("th", {}, "why it was dropped, or its error"));
  }

  function row(one) {
    const note = one.dropped || one.error;
    return el("tr", {},
      el("th", { scope: "row" }, el("a", { href: link("rollout", { run, id: one.id }), "data-row": true }, one.id), one.role !== "agent" ? badge(one.role) : null),
      el("td", { class: "number", "data-name": "reward" }, num(one.reward)), el("td", {}, status(one.status)), el("td", { class: "number", "data-name": "turns" }, num(one.turns)), el("td", { class: "number", "data-name": "tokens" }, num(one.tokens)),
      el("td", { class: "soft" }, one.task, one.tier ? ` (${one.tier})` : ""),
      el("td", { class: "soft" }, Object.entries(one.tools).slice(0, 6).map(([name, number]) => `${name}${number > 1 ? ` ×${number}` : ""}`).join(", ")),
      el("td", { class: note ? "note" : "" }, note.slice(0, 240)));
  }

  async function start() {
    next = null;
    shown = examined = 0;
    fill(body);
    await more();
  }

  /** Reads pages until one has rows: a search that meets few rollouts is answered in parts. */
  async function more() {
    const mine = ++serial;
    fill(foot, "Searching …");
    try {
      for (let part = 0; part < MOST_PARTS; part += 1) {
        const data = await get("rollouts", { run, ...ask, after: next }, signal);
        if (mine !== serial) return;
        body.append(...data.rows.map(row));
        next = data.next;
        shown += data.rows.length;
        examined += data.examined;
        if (!next || data.rows.length >= 25) break;
        fill(foot, `Searching … ${num(examined)} read, ${num(shown)} found`);
      }
      fill(foot, next ? el("button", { type: "button", onclick: more }, "More") : null, ` ${num(shown)} shown`, next ? "" : shown ? ", no more" : ": no rollout matches");
    } catch (error) {
      if (error.name === "AbortError") return;
      if (mine === serial) fill(foot, el("span", { class: "error" }, error.message));
    }
  }

  drawHeads();
  fill(main, el("h1", {}, run), tabs(run, "rollouts"), form, el("div", { class: "scroll" }, el("table", { class: "list rollouts" }, el("thead", {}, heads), body)), foot);
  page.keys({ "/": () => search.focus() });
  await start();
}

function debounce(call) {
  let timer = 0;
  return (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(event), 250);
  };
}
