// The list of A/B roll-outs.
import { el, fill, link, num, status, badge, ago, day } from "./dom.js";
import { get } from "./api.js";

export const phaseName = (phase) => phase.replace("_", " ");

/** The state of a log as a badge: damage first; a service that may have stopped is not running. */
export function state(phase, problem, service) {
  if (problem) return badge("damaged", "bad");
  const ended = phase === "promoted" || phase === "rolled_back";
  return ended || service ? status(phaseName(phase)) : badge("may have stopped", "warn");
}

/** A table of logs; nothing where there is none. */
export function logList(found) {
  if (!found.logs.length) return [];
  return [el("h2", {}, "A/B roll-outs"), el("div", { class: "scroll" }, el("table", { class: "list logs" },
    el("thead", {}, el("tr", {}, ["challenger", "state", "share", "last entry", "started"].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, found.logs.map((one) => {
      const open = el("a", { href: link("ab-rollout", { log: one.log }), "data-row": true }, one.challenger ?? one.log);
      if (!one.challenger) return el("tr", {}, el("td", {}, open), el("td", { class: "error", colspan: 4 }, one.problem));
      return el("tr", { title: one.log }, el("td", {}, open, el("div", { class: "soft" }, `against ${one.champion}`), el("div", { class: "soft" }, one.log.split("/").at(-1))),
        el("td", {}, state(one.phase, one.problem, one.service), one.problem ? el("div", { class: "error" }, one.problem) : null),
        el("td", { class: "soft" }, one.share === null ? "" : `${num(100 * one.share, 3)} %`),
        el("td", { class: "soft", title: day(one.changed) }, ago(one.changed)), el("td", { class: "soft", title: ago(one.started) }, day(one.started)));
    })))), found.num > found.logs.length ? el("p", { class: "soft" }, `The newest ${found.logs.length} of ${found.num} logs.`) : null];
}

export async function show(page) {
  page.crumbs(["A/B roll-outs", "#/ab-rollouts"]);
  const found = await get("ab-rollouts", {}, page.signal);
  fill(page.main, found.logs.length ? logList(found) : el("section", { class: "empty" }, el("h1", {}, "No A/B roll-outs"),
    el("p", {}, "Start one with ", el("code", {}, "ludus serve model A --challenger B"), "; name a log outside of the runs folder: ", el("code", {}, "ludus view --rollout-log LOG"), ".")));
}
