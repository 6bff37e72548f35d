// All runs, and the curves of those chosen, beside each other.
import { el, fill, link, status, ago, day, span, badge } from "./dom.js";
import { get, follow } from "./api.js";
import { chart, COLORS } from "./charts.js";
import { logList } from "./ab-rollouts.js";

const MOST = 8;

export async function show(page) {
  const { main, query, signal } = page;
  page.crumbs(["runs", "#/"]);
  let chosen = query.getAll("run");
  let axis = query.get("x") ?? "step";
  let wanted = query.getAll("name"), stage = query.get("stage") ?? "";
  const colors = new Map();
  const colorOf = (run) => {
    if (!colors.has(run)) colors.set(run, colors.size % COLORS);
    return colors.get(run);
  };
  const list = el("div", { class: "scroll" });
  const charts = el("div", { class: "charts" });
  const tools = el("div", { class: "tools" });
  const more = el("p", {});
  const logs = el("section", {});
  let runs = [], next = null, serial = 0;

  const remember = () => page.remember("", { run: chosen, stage, x: axis === "step" ? null : axis, name: wanted });

  function drawList(data) {
    fill(list, el("table", { class: "list" },
      el("thead", {}, el("tr", {}, ["", "run", "status", "stages", "started", "took"].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, runs.map((run) => el("tr", {},
        el("td", {}, el("input", { type: "checkbox", checked: chosen.includes(run.id), "aria-label": `curves of ${run.id}`, class: `k${chosen.includes(run.id) ? colorOf(run.id) : ""}`, onchange: (event) => choose(run.id, event.target.checked) })),
        el("th", { scope: "row" }, el("a", { href: link("run", { run: run.id }), "data-row": true }, run.id)),
        el("td", {}, status(run.status), run.is_live ? badge("live", "live") : null),
        el("td", { class: "soft" }, Object.entries(run.stages).filter(([stage]) => !stage.startsWith("evaluate/")).map(([stage, step]) => `${stage} ${step + 1}`).join(", ")),
        el("td", { class: "soft", title: day(run.created) }, ago(run.created)),
        el("td", { class: "soft" }, run.elapsed_s ? span(run.elapsed_s) : ""),
        run.error ? el("td", { class: "error", title: run.error }, run.error.split("\n")[0].slice(0, 160)) : null)))));
    fill(more, next ? el("button", { type: "button", onclick: loadMore }, "Older runs") : null,
      data?.unrecorded?.length ? el("span", { class: "soft" }, `Killed before they were recorded, or of another store: ${data.unrecorded.join(", ")}`) : null);
  }

  function choose(run, on) {
    chosen = on ? [...chosen, run].slice(-MOST) : chosen.filter((id) => id !== run);
    remember();
    drawList();
    drawCharts();
  }

  async function drawCharts() {
    const mine = ++serial;
    if (!chosen.length) {
      fill(charts, el("p", { class: "soft" }, "Choose runs to see their curves."));
      fill(tools);
      return;
    }
    const data = await get("curves", { run: chosen, stage, x: axis, name: wanted }, signal);
    if (mine !== serial) return;
    fill(tools, el("div", { class: "legend" }, chosen.map((run) => el("span", {}, el("i", { class: `key k${colorOf(run)}` }), run))),
      axisSwitch(axis, (to) => { axis = to; remember(); drawCharts(); }),
      stageChoice(data, (to) => { stage = to; wanted = []; remember(); drawCharts(); }),
      metricChoice(data.names, wanted, (to) => { wanted = to; remember(); drawCharts(); }));
    fill(charts, data.charts.length ? data.charts.map((one) => chart(one, { axis, colorOf })) : el("p", { class: "soft" }, "No step is recorded yet."));
  }

  async function load() {
    const [data, found] = await Promise.all([get("runs", {}, signal), get("ab-rollouts", {}, signal)]);
    runs = data.runs;
    next = data.next;
    fill(logs, logList(found));
    if (!runs.length) {
      fill(main, logs, el("section", { class: "empty" }, el("h1", {}, "No runs yet"), el("p", {}, data.message ?? ""),
        el("p", { class: "soft" }, "This page shows the first run as soon as it begins."),
        data.unrecorded?.length ? el("p", { class: "soft" }, `Folders without a record: ${data.unrecorded.join(", ")}`) : null));
      return;
    }
    if (!main.contains(list)) {
      if (!chosen.length) chosen = runs.slice(0, 1).map((run) => run.id);
      fill(main, el("div", { class: "split" }, el("section", { class: "side" }, el("h1", {}, "Runs"), list, more, logs), el("section", {}, tools, charts)));
    }
    drawList(data);
    await drawCharts();
  }

  async function loadMore() {
    const data = await get("runs", { before: next }, signal);
    runs = [...runs, ...data.runs];
    next = data.next;
    drawList();
  }

  await load();
  let timer = 0;
  follow({}, signal, (name, data) => {
    if (name === "failure") page.state(badge(data.message.slice(0, 80), "bad"));
    else page.state(name === "closed" ? badge("no connection", "bad") : badge("following", "good"));
    if (name !== "news") return;
    clearTimeout(timer);
    timer = setTimeout(() => load().catch(() => {}), 300);
  });
}

export function axisSwitch(axis, change, names = ["step", "time", "episodes"]) {
  return el("div", { class: "switch", role: "group", "aria-label": "x axis" }, names.map((name) =>
    el("button", { type: "button", "aria-pressed": String(name === axis), onclick: () => change(name) }, name)));
}

/** Chooses the training stage of the curves, where there are several. */
export function stageChoice(data, change) {
  if (data.stages.length < 2) return null;
  return el("div", { class: "switch", role: "group", "aria-label": "stage" }, data.stages.map((name) =>
    el("button", { type: "button", "aria-pressed": String(name === data.stage), onclick: () => change(name) }, name)));
}

/** Chooses metrics by name; none chosen: the usual ones. */
export function metricChoice(names, wanted, change) {
  const id = `metrics-${Math.random().toString(36).slice(2)}`;
  const input = el("input", { list: id, placeholder: "add a metric", "aria-label": "add a metric", onchange: (event) => {
    if (names.includes(event.target.value)) change([...new Set([...wanted, event.target.value])]);
  } });
  return el("span", { class: "metrics" }, input, el("datalist", { id }, names.map((name) => el("option", { value: name }))),
    wanted.map((name) => el("button", { type: "button", class: "chip", title: "remove", onclick: () => change(wanted.filter((one) => one !== name)) }, `${name} ×`)));
}
