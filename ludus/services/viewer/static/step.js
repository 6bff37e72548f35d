// One step: what it gave, its groups, and why it had no gradient.
import { el, fill, link, num, badge, span } from "./dom.js";
import { get } from "./api.js";

export async function show(page) {
  const { main, query, signal } = page;
  const run = query.get("run") ?? "", stage = query.get("stage") ?? "rl", step = Number(query.get("step") ?? 0);
  page.crumbs([run, link("run", { run })], [`${stage} ${step}`, ""]);
  const data = await get("step", { run, stage, step }, signal);
  const metrics = Object.entries(data.metrics).sort((a, b) => a[0].localeCompare(b[0]));
  fill(main,
    el("h1", {}, `${stage}, step ${step} `, data.gradient === false ? badge("no gradient", "bad") : data.gradient ? badge("trained", "good") : null),
    el("p", { class: "tools" }, step > 0 ? el("a", { href: link("step", { run, stage, step: step - 1 }) }, "← step before") : null,
      el("a", { href: link("step", { run, stage, step: step + 1 }) }, "next step →"),
      el("a", { href: link("rollouts", { run, stage, step, sort: "reward" }) }, "its rollouts")),
    data.verdict.length ? el("section", { class: "why", "aria-label": "Why" }, data.verdict.map((line) => el("p", {}, line))) : null,
    el("dl", { class: "facts" }, Object.entries({
      took: data.seconds === null ? "" : span(data.seconds), "policy version": data.policy_version ?? "",
      ended: Object.entries(data.statuses).map(([name, number]) => `${name} ${number}`).join(", "),
    }).filter(([, value]) => value !== "").map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    data.reasons.length ? [el("h2", {}, "Dropped"), el("table", { class: "plain" }, data.reasons.map(([reason, number]) => el("tr", {}, el("td", {}, num(number)), el("td", {}, reason))))] : null,
    data.groups.length ? [el("h2", {}, "Groups"), el("p", { class: "soft" }, "A group's rewards, its rollouts as links; a group whose rewards are equal has no signal."),
      el("table", { class: "list groups" }, el("tbody", {}, data.groups.map((group) => el("tr", {},
        el("th", { scope: "row" }, el("a", { href: link("rollouts", { run, stage, step, group: group.id, sort: "reward" }), "data-row": true }, group.id.split("/").at(-1) || group.id), el("div", { class: "soft" }, group.task)),
        el("td", {}, group.signal ? "" : badge("no signal", "warn")),
        el("td", { class: "members" }, group.members.map((member) => chip(run, member)))))))] : null,
    data.more_groups ? el("p", { class: "soft" }, "The first 200 groups are shown.") : null,
    el("details", {}, el("summary", {}, "All metrics"), el("table", { class: "plain" }, metrics.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, num(value)))))),
  );
}

/** A rollout of a group: its reward, and marks for those dropped or failed. */
export function chip(run, member, extra = {}, here = false) {
  const failed = member.status.startsWith("error") || member.status === "aborted" || member.status === "unscorable";
  const text = member.reward === null ? member.status : num(member.reward, 3);
  return el("a", { class: `chip ${member.dropped ? "dropped" : ""} ${failed ? "bad" : ""}`, href: link("rollout", { run, id: member.id, ...extra }), "aria-current": here ? "true" : null, title: `${member.id}: ${member.status}${member.dropped ? ", dropped" : ""}` }, text);
}
