// The list of A/B roll-outs.
import { el, fill, link, status, ago, day } from "./dom.js";
import { get } from "./api.js";

export const phaseName = (phase) => phase.replace("_", " ");

/** A table of logs; nothing where there is none. */
export function logList(found) {
  if (!found.logs.length) return [];
  return [el("h2", {}, "A/B roll-outs"), el("div", { class: "scroll" }, el("table", { class: "list logs" },
    el("thead", {}, el("tr", {}, ["challenger", "state", "started", "changed"].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, found.logs.map((one) => {
      const open = el("a", { href: link("ab-rollout", { log: one.log }), "data-row": true }, one.problem ? one.log : one.challenger);
      if (one.problem) return el("tr", {}, el("td", {}, open), el("td", { class: "error", colspan: 3 }, one.problem));
      return el("tr", { title: one.log }, el("td", {}, open, el("div", { class: "soft" }, `against ${one.champion}`)), el("td", {}, status(phaseName(one.phase))),
        el("td", { class: "soft", title: day(one.started) }, ago(one.started)), el("td", { class: "soft", title: day(one.changed) }, ago(one.changed)));
    })))), found.num > found.logs.length ? el("p", { class: "soft" }, `The newest ${found.logs.length} of ${found.num} logs.`) : null];
}

export async function show(page) {
  page.crumbs(["A/B roll-outs", "#/ab-rollouts"]);
  const found = await get("ab-rollouts", {}, page.signal);
  fill(page.main, found.logs.length ? logList(found) : el("section", { class: "empty" }, el("h1", {}, "No A/B roll-outs"),
    el("p", {}, "Start one with ", el("code", {}, "ludus serve model A --challenger B"), "; name a log outside of the runs folder: ", el("code", {}, "ludus view --rollout-log LOG"), ".")));
}
