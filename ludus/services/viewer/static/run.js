// One run: its running step, curves, steps, configuration.
import { el, fill, link, status, num, span, ago, day, badge } from "./dom.js";
import { get, follow } from "./api.js";
import { chart } from "./charts.js";
import { axisSwitch, metricChoice, stageChoice } from "./runs.js";
import { livePanel } from "./live.js";

export function tabs(run, here) {
  const parts = [["overview", link("run", { run })], ["rollouts", link("rollouts", { run })]];
  return el("nav", { class: "tabs", "aria-label": "Parts of the run" }, parts.map(([name, href]) => el("a", { href, "aria-current": name === here ? "page" : null }, name)));
}

export async function show(page) {
  const { main, query, signal } = page;
  const run = query.get("run") ?? "";
  page.crumbs([run, link("run", { run })]);
  let axis = query.get("x") ?? "step", wanted = query.getAll("name"), stage = "", curve = query.get("stage") ?? "";
  const head = el("div", {}), charts = el("div", { class: "charts" }), tools = el("div", { class: "tools" });
  const steps = el("div", {}), setup = el("div", {}), live = livePanel();
  let before = null, rows = [];
  const remember = () => page.remember("run", { run, stage: curve, x: axis === "step" ? null : axis, name: wanted });

  async function drawHead() {
    const data = await get("run", { run }, signal);
    fill(head, el("h1", {}, run, " ", status(data.status), data.status === "running" && !data.is_live ? badge("no sign of its process", "warn") : null),
      tabs(run, "overview"),
      data.error ? el("p", { class: "problem" }, data.error) : null,
      data.findings.map((found) => el("p", { class: `why ${found.lasting ? "bad" : ""}` }, el("b", {}, found.where), ` ${found.text}. `, found.lasting ? null : "No longer so. ", el("span", { class: "soft" }, `${found.advice}.`))),
      el("dl", { class: "facts" }, Object.entries({
        started: `${day(data.created)} (${ago(data.created)})`,
        took: data.elapsed_s ? span(data.elapsed_s) : "",
        "last step": data.last_step ? ago(data.last_step) : "none yet",
        stages: Object.entries(data.stages).map(([name, step]) => `${name} ${name.startsWith("evaluate/") ? step || "" : step + 1}`.trim()).join(", "),
        tools: data.tools.slice(0, 12).join(", "),
      }).filter(([, value]) => value).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
    fill(setup, el("details", {}, el("summary", {}, "Configuration"), el("pre", { class: "code" }, yaml(data.config))),
      el("details", {}, el("summary", {}, "Versions"), el("table", { class: "plain" }, Object.entries(data.versions).map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, value))))));
    live.show(data.live);
    stageFilter(Object.keys(data.stages));
  }

  async function drawCharts() {
    const data = await get("curves", { run, stage: curve, x: axis, name: wanted }, signal);
    fill(tools, axisSwitch(axis, (to) => { axis = to; remember(); drawCharts(); }),
      stageChoice(data, (to) => { curve = to; wanted = []; remember(); drawCharts(); }),
      metricChoice(data.names, wanted, (to) => { wanted = to; remember(); drawCharts(); }));
    fill(charts, data.charts.length ? data.charts.map((one) => chart(one, { axis, colorOf: () => 0 })) : el("p", { class: "soft" }, "No step is recorded yet."));
  }

  const filter = el("select", { "aria-label": "stage", onchange: (event) => { stage = event.target.value; drawSteps(); } });
  function stageFilter(names) {
    fill(filter, el("option", { value: "" }, "all stages"), names.map((name) => el("option", { value: name, selected: name === stage }, name)));
  }

  async function drawSteps(older = false) {
    const data = await get("steps", { run, stage, before: older ? before : null }, signal);
    rows = older ? [...rows, ...data.steps] : data.steps;
    before = data.next;
    const shown = ["rollout/reward", "rollout/success", "evaluate/success", "train/loss", "train/grad_norm", "rollout/episodes", "rollout/dropped", "time/tokens_per_s"].filter((name) => rows.some((row) => name in row.metrics));
    fill(steps, el("div", { class: "tools" }, el("h2", {}, "Steps"), filter),
      el("div", { class: "scroll" }, el("table", { class: "list numbers" },
        el("thead", {}, el("tr", {}, ["step", "gradient", ...shown.map((name) => name.split("/")[1].replaceAll("_", " ")), "took", ""].map((name) => el("th", { scope: "col" }, name)))),
        el("tbody", {}, rows.map((row) => el("tr", {},
          el("th", { scope: "row" }, el("a", { href: link("step", { run, stage: row.stage, step: row.step }), "data-row": true }, `${row.stage} ${row.step}`)),
          el("td", {}, row.gradient === false ? badge("none", "bad") : row.gradient ? "yes" : ""),
          shown.map((name) => el("td", {}, num(row.metrics[name]))),
          el("td", {}, row.seconds === null ? "" : `${num(row.seconds, 3)} s`),
          el("td", { class: "soft" }, ago(row.started))))))),
      before ? el("button", { type: "button", onclick: () => drawSteps(true) }, "Older steps") : null,
      rows.length ? null : el("p", { class: "soft" }, "No step is recorded yet."));
  }

  await drawHead();
  fill(main, head, live.node, tools, charts, steps, setup);
  await Promise.all([drawCharts(), drawSteps()]);
  let timer = 0;
  follow({ run }, signal, (name, data) => {
    if (name === "live") live.show(data);
    if (name === "failure") page.state(badge(data.message.slice(0, 80), "bad"));
    else page.state(name === "closed" ? badge("no connection", "bad") : badge("following", "good"));
    if (name !== "news") return;
    clearTimeout(timer);
    timer = setTimeout(() => Promise.all([drawHead(), drawCharts(), rows.length <= 100 ? drawSteps() : null]).catch(() => {}), 400);
  });
}

/** A configuration as YAML, near enough to read. */
function yaml(value, depth = 0) {
  const pad = "  ".repeat(depth);
  if (Array.isArray(value)) return value.length ? value.map((item) => `\n${pad}- ${yaml(item, depth + 1).trimStart()}`).join("") : "[]";
  if (value && typeof value === "object") {
    const parts = Object.entries(value);
    return parts.length ? parts.map(([key, item]) => `\n${pad}${key}: ${yaml(item, depth + 1)}`).join("").slice(depth ? 0 : 1) : "{}";
  }
  return typeof value === "string" ? (/^[\w./ -]+$/.test(value) ? value : JSON.stringify(value)) : String(value);
}
