// One A/B roll-out: its state, what comes next, evidence, curves, decisions.
import { el, fill, link, num, span, ago, day, count, badge } from "./dom.js";
import { get, follow } from "./api.js";
import { chart } from "./charts.js";
import { axisSwitch } from "./runs.js";
import { phaseName, state } from "./ab-rollouts.js";

const VARIANTS = ["champion", "challenger"];
const COLORS = { champion: 0, challenger: 1, "challenger − champion": 1, "slower pairs": 1, better: 6, worse: 4, errors: 2, latency: 3 };
const KINDS = { start: "live", increase: "live", hold: "warn", resume: "live", promote: "good", roll_back: "bad" };
const STATES = { running: "live", holding: "", promoted: "good", rolled_back: "bad" };
const TESTS = { better: "quality", worse: "quality", errors: "errors", latency: "latency" };
const AXES = { time: "time since the start", requests: "requests of both variants", scores: "scores of both variants" };
const SAYS = {
  better: "the challenger scores better", worse: "the challenger scores worse",
  errors: "more of its requests fail", latency: "most of its requests are slower",
};

const percent = (value) => (value === null || value === undefined ? "" : `${num(100 * value, 3)} %`);
const signed = (value) => (value > 0 ? `+${num(value, 3)}` : num(value, 3));
const points100 = (value) => `${signed(100 * value)} %`;
const seconds = (value) => (value === null || value === undefined ? "" : value < 1 ? `${num(1000 * value, 3)} ms` : `${num(value, 3)} s`);

export async function show(page) {
  const { main, query, signal } = page;
  const log = query.get("log") ?? "";
  let axis = query.get("x") ?? "requests";
  page.crumbs(["A/B roll-outs", "#/ab-rollouts"], [log.split("/").at(-1), link("ab-rollout", { log })]);
  const notes = el("div", {}), head = el("div", {}), body = el("div", {});
  const tools = el("div", { class: "tools" }), charts = el("div", { class: "charts" }), rest = el("div", {});
  const setup = el("details", {}, el("summary", {}, "Settings"));
  let data = null;

  function drawCharts() {
    fill(tools, el("h2", {}, "Course"), el("div", { class: "legend" }, VARIANTS.map((name) => el("span", {}, key(name), name))),
      axisSwitch(axis, (to) => { axis = to; page.remember("ab-rollout", { log, x: axis === "requests" ? null : axis }); drawCharts(); }, ["requests", "scores", "time"]));
    fill(charts, curves(data.rollout, axis));
  }

  function draw() {
    fill(notes, noted(data));
    const found = data.rollout;
    if (!found) return fill(head, el("h1", {}, log));
    fill(head, headOf(data));
    fill(body, found.next.length && !data.problem ? next(found) : null, el("div", { class: "pair" }, variants(found), tests(found)));
    fill(rest, decisions(found));
    if (!setup.querySelector("table")) setup.append(el("table", { class: "plain" }, Object.entries(found.settings).map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, Array.isArray(value) ? value.map(percent).join(", ") : num(value))))));
    drawCharts();
    if (!main.contains(setup)) main.append(setup);
  }

  /** Reads the log to its end, in parts. */
  async function load() {
    do {
      data = await get("ab-rollout", { log }, signal);
      draw();
    } while (data.more && !signal.aborted);
  }

  fill(main, notes, head, body, tools, charts, rest);
  await load();
  let busy = false, again = false;
  async function update() {
    if (busy) return (again = true);
    busy = true;
    try {
      do {
        again = false;
        await load();
      } while (again);
    } catch {
      // the state says that there is no connection
    }
    busy = false;
  }
  follow({ log }, signal, (name) => {
    page.state(name === "closed" ? badge("no connection", "bad") : badge("following the log", data.service ? "good" : ""));
    if (name === "news") update();
  });
}

const key = (name) => el("i", { class: `key k${COLORS[name]}` });

/** Faults of the log, and how far it has been read. */
function noted(data) {
  return [
    data.problem ? el("section", { class: "problem", role: "alert" }, el("h1", { class: "small" }, data.rollout ? "The log is damaged" : "This log cannot be shown"),
      el("p", {}, data.problem), data.rollout ? el("p", {}, "The page shows the roll-out up to the line before.") : null) : null,
    data.more ? el("p", { class: "why", role: "status" }, `Reading the log: ${Math.floor((100 * data.num_read) / (data.size || 1))} % of ${num(data.size / 1e6, 3)} MB`) : null,
    data.cut_off ? el("p", { class: "why" }, `The last ${count(data.cut_off, "byte")} are no complete line: the service was killed while it wrote, or is writing. It is removed when the service starts again.`) : null,
  ];
}

function headOf(data) {
  const found = data.rollout, phase = found.phase;
  const facts = {
    started: `${day(found.started)} (${ago(found.started)})`,
    "last entry": data.changed ? `${day(data.changed)} (${ago(data.changed)})` : "",
    service: data.service ? `process ${data.service} has the log open` : found.next.length ? "may have stopped: no process of this machine has the log open" : "",
    step: `${found.step} of ${found.num_steps}`, log: data.log,
  };
  return [
    el("h1", {}, "A/B roll-out ", state(phase, data.problem, data.service)),
    el("dl", { class: "facts" }, VARIANTS.map((name) => el("div", {}, el("dt", {}, key(name), name), el("dd", {}, found[name]))),
      Object.entries(facts).filter(([, value]) => value).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    el("section", { class: `why ${data.problem || !data.service && found.next.length ? "" : STATES[phase]}`, "aria-label": "State" }, el("p", {}, el("b", {}, data.problem ? "Up to the damage: " : null, sentence(found))), el("p", { class: "soft" }, found.reason)),
  ];
}

function sentence(found) {
  if (found.phase === "promoted") return "Promoted: all sessions have the challenger.";
  if (found.phase === "rolled_back") return "Rolled back: all sessions have the champion.";
  if (found.phase === "holding") return `On hold: both variants fail. The challenger keeps ${percent(found.share)} of the sessions.`;
  return `The challenger has ${percent(found.share)} of the sessions.`;
}

function meter(part, kind = "") {
  return el("span", { class: `meter ${kind}`, role: "meter", "aria-label": "progress", "aria-valuenow": Math.floor(100 * part), "aria-valuemin": 0, "aria-valuemax": 100, title: `${Math.floor(100 * part)} %` }, el("i", { vars: { "--share": String(part) } }));
}

function next(found) {
  return [el("h2", {}, "Next"), el("ul", { class: "next" }, found.next.map((one) => el("li", {},
    badge(phaseName(one.action), KINDS[one.action]), one.action === "increase" ? `to ${percent(one.share)}` : null,
    meter(one.done, KINDS[one.action]), el("span", { class: "soft" }, `${one.action === "roll_back" ? "on" : "after"} ${one.needs}`))))];
}

function variants(found) {
  const rows = {
    requests: (one) => num(one.requests),
    failed: (one) => `${num(one.failed)}${one.requests ? ` (${percent(one.failed / one.requests)})` : ""}`,
    "client gone": (one) => num(one.gone), scores: (one) => num(one.scores), "scored sessions": (one) => num(one.scored_sessions),
    "mean score": (one) => num(one.mean_score, 3), "median time": (one) => seconds(one.median_s),
  };
  return el("div", {}, el("h2", {}, "Variants"), el("table", { class: "list numbers" },
    el("thead", {}, el("tr", {}, el("th", {}), VARIANTS.map((name) => el("th", { scope: "col" }, key(name), name)))),
    el("tbody", {}, Object.entries(rows).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), VARIANTS.map((one) => el("td", {}, value(found.variants[one]))))))));
}

function tests(found) {
  const alpha = found.settings.alpha, told = { quality: signed, errors: points100, latency: percent };
  const names = { quality: "score, challenger − champion", errors: "failed requests, challenger − champion", latency: `pairs slower by over ${num(found.settings.max_latency_ratio)} ×` };
  return el("div", {}, el("h2", {}, "Evidence"), el("div", { class: "scroll" }, el("table", { class: "list" },
    el("tbody", {}, Object.entries(TESTS).map(([test]) => {
      const p = found.p_values[test], part = Math.min(1, Math.log(found.points.at(-1)?.evidence[test] ?? 1) / Math.log(found.threshold));
      return el("tr", {}, el("th", { scope: "row" }, SAYS[test]), el("td", {}, meter(part, test === "better" ? "good" : "bad")),
        el("td", { class: "soft" }, `p ${num(p, 2)}${p <= alpha ? ": shown" : ""}`));
    })))),
    el("table", { class: "plain" }, Object.keys(names).map((name) => el("tr", {}, el("th", {}, names[name]),
      el("td", {}, found.estimates[name] === null ? "not compared yet" : `${told[name](found.estimates[name])} (${told[name](found.intervals[name][0])} to ${told[name](found.intervals[name][1])})`)))),
    el("p", { class: "soft" }, `A test decides at p ${num(alpha)}, adjusted for the number of tests. Intervals are valid at all times, at ${num(100 * found.confidence, 4)} %.`));
}

function curves(found, axis) {
  const at = (point) => (axis === "time" ? point.t - found.started : point[axis]);
  const colorOf = (name) => COLORS[name];
  const line = (run, value, extra = {}) => ({ run, points: found.points.map((point) => [at(point), ...value(point)]).filter((p) => p[1] !== null && p[1] !== undefined), ...extra });
  const one = (value) => (point) => [value(point), value(point), value(point)];
  const both = (name, what) => ({ name, series: VARIANTS.map((variant) => line(variant, one((point) => point[variant][what]))) });
  const band = (name, what, run) => ({ name, series: [line(run, (point) => [point.estimates[what], ...point.intervals[what]], { band: true })] });
  const difference = "challenger − champion";
  const evidence = { name: "evidence (1/p)", series: Object.keys(TESTS).map((test) => line(test, one((point) => Math.log10(point.evidence[test])))) };
  const power = (value) => (value < 0 ? "" : value > 4 ? `1e${num(value, 2)}` : num(10 ** value, 2));
  return [
    ["share", { name: "share of sessions", series: [{ run: "challenger", points: steps(found) }] }, { axis: "time", smooth: false, told: percent, note: `over time: ${percent(found.share)}` }],
    ["mean score", both("score", "score"), {}],
    ["difference", band("difference of scores", "quality", difference), { smooth: false, told: signed, limit: [found.limits.quality, found.settings.margin ? "margin" : "equal"] }],
    ["1/p", evidence, { smooth: false, told: power, limit: [Math.log10(found.threshold), "decides"], note: el("span", { class: "legend" }, Object.keys(TESTS).map((test) => el("span", {}, key(test), test))) }],
    ["failed", both("failed requests", "failed"), { told: percent }],
    ["difference", band("difference of failed requests", "errors", difference), { smooth: false, told: points100, limit: [found.limits.errors, "allowed"] }],
    ["median", both("time of an answer, median", "seconds"), { told: seconds }],
    ["slower pairs", band(`pairs slower by over ${num(found.settings.max_latency_ratio)} ×`, "latency", "slower pairs"), { smooth: false, told: percent, limit: [found.limits.latency, "most"] }],
  ].map(([y, data, options]) => {
    data.series = data.series.filter((series) => series.points.length);
    const x = options.axis ?? axis;
    return data.series.length ? chart(data, { axis, colorOf, axes: [AXES[x], y], ...options }) : el("figure", { class: "chart" }, el("figcaption", {}, data.name), el("p", { class: "soft" }, "Nothing to show yet."));
  });
}

/** The share over time, as steps. */
function steps(found) {
  const points = [];
  for (const one of found.decisions) {
    const x = one.t - found.started;
    if (points.length) points.push([x, points.at(-1)[1]]);
    points.push([x, one.share]);
  }
  if (points.length) points.push([found.last_event - found.started, points.at(-1)[1]]);
  return points.map(([x, y]) => [x, y, Math.min(y, 0), y]);
}

function decisions(found) {
  return [el("h2", {}, "Decisions"), el("div", { class: "scroll" }, el("table", { class: "list decisions" },
    el("thead", {}, el("tr", {}, ["time", "decision", "share", "reason", "requests", "scored sessions"].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, found.decisions.toReversed().map((one) => el("tr", {},
      el("th", { scope: "row", title: ago(one.t) }, new Date(one.t * 1000).toLocaleString("sv"), " ", el("span", { class: "soft" }, `after ${span(one.t - found.started)}`)),
      el("td", {}, badge(phaseName(one.action), KINDS[one.action])), el("td", {}, percent(one.share)), el("td", {}, one.reason),
      el("td", { class: "number", "data-name": "requests" }, num(one.num_requests)), el("td", { class: "number", "data-name": "scored sessions" }, num(one.num_scored)))))))];
}
