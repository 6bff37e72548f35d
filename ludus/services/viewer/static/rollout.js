// One rollout token by token, alone or beside another of its group.
import { el, fill, link, status, num, badge, count, showTip, hideTip } from "./dom.js";
import { get } from "./api.js";
import { chip } from "./step.js";
import { tree } from "./tree.js";

const COLORINGS = ["logprob", "entropy", "advantage", "none"];
const LONG = 700;

export async function show(page) {
  const { main, query, signal } = page;
  const run = query.get("run") ?? "", id = query.get("id") ?? "", beside = query.get("beside") ?? "";
  const [data, other] = await Promise.all([get("rollout", { run, id }, signal), beside ? get("rollout", { run, id: beside }, signal) : null]);
  const shown = other ? [data, other] : [data];
  let coloring = query.get("color") ?? COLORINGS.find((name) => data.has[name]) ?? "none";
  const { row } = data;
  page.crumbs([run, link("run", { run })], [`${row.stage} ${row.step}`, link("step", { run, stage: row.stage, step: row.step })], [row.id.split("/").slice(-2).join("/"), ""]);

  const scale = Math.max(1e-9, ...shown.flatMap((one) => one.segments.flatMap((segment) => (segment.advantages ?? []).map(Math.abs).filter(Number.isFinite))));
  const panes = shown.map((one, place) => pane(run, one, shown.length > 1, place, scale, signal));
  const legend = el("div", { class: "legend" });
  const buttons = el("div", { class: "switch", role: "group", "aria-label": "colour of the tokens" });
  const have = (name) => name === "none" || shown.some((one) => one.has[name]);

  function recolor(to) {
    coloring = to;
    main.dataset.coloring = to;
    page.remember("rollout", { run, id, beside, color: to });
    fill(buttons, COLORINGS.map((name) => el("button", { type: "button", "aria-pressed": String(name === to), disabled: !have(name), title: have(name) ? null : `no ${name} is recorded for this rollout`, onclick: () => recolor(name) }, name)));
    fill(legend, LEGENDS[to].map(([kind, text]) => el("span", {}, el("i", { class: `tok ${kind}` }, "  "), text)));
  }

  const at = data.group.findIndex((member) => member.id === id);
  const other_of = (by) => data.group[(at + by + data.group.length) % data.group.length];
  const go = (by) => { if (data.group.length > 1) location.hash = link("rollout", { run, id: other_of(by).id, color: coloring }); };
  const compare = () => {
    if (beside) location.hash = link("rollout", { run, id, color: coloring });
    else if (data.group.length > 1) location.hash = link("rollout", { run, id, beside: (data.group.find((m) => m.id !== id && m.reward !== row.reward) ?? other_of(1)).id, color: coloring });
  };
  const fold = () => {
    const all = [...main.querySelectorAll(".panes details")];
    const open = !all.every((one) => one.open);
    all.forEach((one) => { one.open = open; });
  };

  fill(main,
    el("h1", { class: "small" }, row.id),
    el("div", { class: "tools" }, el("span", { class: "soft" }, "colour"), buttons, legend,
      el("button", { type: "button", onclick: fold, title: "unfold or fold all (x)" }, "unfold"),
      data.group.length > 1 ? el("button", { type: "button", onclick: compare, title: "b" }, beside ? "alone" : "beside another") : null),
    data.group.length > 1 ? el("div", { class: "members group", role: "navigation", "aria-label": "Rollouts of the group" }, el("span", { class: "soft" }, `group of ${data.group.length}: `),
      data.group.map((member) => [chip(run, member, { color: coloring }, member.id === id), beside && member.id !== id ? el("a", { class: "aside", title: `${member.id} beside it`, "aria-label": `${member.id} beside it`, href: link("rollout", { run, id, beside: member.id, color: coloring }) }, member.id === beside ? "◨" : "◫") : null])) : null,
    el("div", { class: `panes ${other ? "two" : ""}` }, panes));
  recolor(have(coloring) ? coloring : "none");
  page.keys({ c: () => { const can = COLORINGS.filter(have); recolor(can[(can.indexOf(coloring) + 1) % can.length]); }, "]": () => go(1), "[": () => go(-1), b: compare, x: fold });
  listen(main, signal);
}

const LEGENDS = {
  logprob: [["l0", "likely (p > 0.9)"], ["l3", "p ≈ 0.4"], ["l6", "p ≈ 0.05"], ["l8", "p < 0.01"]],
  entropy: [["e0", "0 nats"], ["e3", "0.6"], ["e6", "1.9"], ["e8", "> 3.5"]],
  advantage: [["a0", "raised"], ["a4", "0"], ["a8", "lowered"]],
  none: [],
};

const LEVELS = [0.1, 0.3, 0.6, 1, 1.5, 2.2, 3, 4.6];
const level = (value) => { const found = LEVELS.findIndex((limit) => value <= limit); return found < 0 ? 8 : found; };

function classes(segment, i, scale) {
  const found = [];
  const logprob = segment.logprobs?.[i], entropy = segment.entropies?.[i], advantage = segment.advantages?.[i];
  if (typeof logprob === "number") found.push(`l${level(-logprob)}`);
  if (typeof entropy === "number") found.push(`e${level(entropy)}`);
  if (typeof advantage === "number") found.push(`a${Math.round(4 - 4 * Math.max(-1, Math.min(1, advantage / scale)))}`);
  return found.join(" ");
}

function pane(run, data, small, place, scale, signal) {
  const { row, task } = data;
  const list = el("ol", { class: "segments" });
  const more = el("p", {});
  const turns = new Map();
  let turn = 0;
  data.tree.forEach((node, i) => { if (node[2]) turns.set(i, (turn += 1)); });
  const draw = (part) => {
    for (const segment of part.segments) list.append(piece(segment, data, turns, scale, place));
    fill(more, part.next ? el("button", { type: "button", onclick: async () => draw(await get("rollout", { run, id: row.id, ...part.next }, signal)) }, "More tokens") : null);
  };
  draw(data);
  const scores = Object.entries(data.scores);
  return el("section", { class: "pane", "aria-label": row.id },
    small ? el("h2", {}, el("a", { href: link("rollout", { run, id: row.id }) }, row.id.split("/").slice(-2).join("/"))) : null,
    data.why.length ? el("div", { class: "why" }, data.why.map((line) => el("p", {}, line))) : null,
    el("dl", { class: "facts" }, [
      ["reward", num(row.reward) || "none"], ["status", status(row.status)], ["loss", data.trains ? (data.why.length ? badge("advantage 0", "warn") : badge("trained", "good")) : badge("no loss", "warn")],
      ["task", `${task.id}${task.tier ? ` (${task.tier})` : ""}`], ["role", row.role === "agent" && row.policy === "policy" ? "" : `${row.role}, policy ${row.policy}`],
      ["length", `${count(row.turns, "turn")}, ${count(row.tokens, "token")}, ${num(row.sampled)} sampled`], ["answer", task.answer ?? ""],
    ].filter(([, value]) => value !== "").map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    scores.length || data.explanation ? el("details", { class: "fold" }, el("summary", {}, "Judge: ", scores.slice(0, 4).map(([name, value]) => `${name} ${num(value)}`).join(", ")),
      scores.length ? el("table", { class: "plain" }, scores.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, num(value))))) : null,
      data.explanation ? el("pre", {}, data.explanation) : null) : null,
    el("details", { class: "fold" }, el("summary", {}, "Metrics and task"),
      el("table", { class: "plain" }, Object.entries(data.metrics).map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, num(value))))),
      task.data ? el("pre", {}, task.data) : null),
    data.leaves.length > 1 ? el("details", { class: "fold tree", open: true }, el("summary", {}, `Tree: ${count(data.leaves.length, "branch")}`.replace("branchs", "branches")), tree(data, place)) : null,
    data.has.text ? null : el("p", { class: "soft" }, "The run's tokenizer is not here: the messages' texts are shown."),
    list, more);
}

function piece(segment, data, turns, scale, place) {
  const trained = segment.sampled && data.trains;
  const name = `segment-${place}-${segment.index}`;
  const kind = `segment ${segment.role} ${segment.sampled ? (trained ? "trained" : "sampled") : "given"}`;
  if (segment.offset) return el("li", { class: kind }, el("p", { class: "who" }, `[${segment.index}] from token ${num(segment.offset)} on`), tokens(segment, scale));
  const after = segment.parent === segment.index - 1 ? "" : segment.parent < 0 ? (segment.index ? "new root" : "") : `branch: continues after [${segment.parent}]`;
  const facts = [count(segment.num_tokens, "token")];
  if (segment.sampled) facts.push(trained ? "trained" : "sampled, no loss");
  else facts.push(data.trains && data.observation_weight ? `given, trained with weight ${num(data.observation_weight)}` : "given, no loss");
  if (segment.constrained) facts.push("follows a schema");
  if (segment.versions) facts.push(`policy ${segment.versions}`);
  if (segment.mean_logprob !== null && segment.mean_logprob !== undefined) facts.push(`mean logprob ${num(segment.mean_logprob, 3)}`);
  if (segment.reward !== null && segment.reward !== undefined) facts.push(`reward ${num(segment.reward)}`);
  const head = [el("b", {}, `[${segment.index}] ${segment.role}`), segment.message?.name ? ` ${segment.message.name}` : "", turns.has(segment.index) ? `, turn ${turns.get(segment.index)}` : "", el("span", { class: "soft" }, ` ${facts.join(", ")}`)];
  const body = content(segment, scale);
  const length = (segment.texts ?? []).join("").length || (segment.message?.content.length ?? 0);
  const folded = segment.role === "tool" || (!segment.sampled && (length > LONG || !segment.num_tokens));
  return el("li", { class: kind, id: name, tabindex: -1, "data-row": true },
    after ? el("p", { class: "branch" }, after) : null,
    folded ? el("details", {}, el("summary", { class: "who" }, head, el("span", { class: "preview" }, preview(segment))), body) : [el("p", { class: "who" }, head), body],
    calls(segment.message));
}

function preview(segment) {
  const text = segment.message?.content || (segment.texts ?? []).join("");
  return ` · ${text.slice(0, 90).replace(/\s+/g, " ")}`;
}

function calls(message) {
  if (!message?.calls.length) return null;
  return message.calls.map((call) => el("details", { class: "fold call" },
    el("summary", {}, "calls ", el("b", {}, call.name), " ", el("span", { class: "preview" }, call.arguments.map(([name, value]) => `${name}=${value}`).join(", ").slice(0, 90))),
    call.arguments.map(([name, value]) => [el("p", { class: "soft" }, name), el("pre", {}, value)])));
}

function content(segment, scale) {
  if (segment.num_tokens && segment.texts) return tokens(segment, scale);
  const message = segment.message;
  const parts = [];
  if (message?.thinking) parts.push(el("details", { class: "fold" }, el("summary", {}, "thinking"), el("pre", {}, message.thinking)));
  if (message) parts.push(el("pre", { class: "text" }, message.content || "(no text)"));
  if (segment.num_tokens) parts.push(message ? el("details", { class: "fold" }, el("summary", {}, "token ids"), tokens(segment, scale)) : tokens(segment, scale));
  return parts;
}

const values = new WeakMap();

function tokens(segment, scale) {
  const box = el("pre", { class: "tokens" });
  values.set(box, segment);
  segment.ids.forEach((id, i) => {
    const text = segment.texts ? segment.texts[i] : `${id} `;
    box.append(el("span", { class: `tok ${segment.sampled ? classes(segment, i, scale) : ""} ${text === "" ? "part" : ""}`, "data-i": i }, text === "" ? "⋯" : text));
  });
  return box;
}

/** Values of the token under the pointer, or of the one touched. */
function listen(main, signal) {
  const tell = (event) => {
    const token = event.target.closest?.(".tokens .tok");
    if (!token) return hideTip();
    const segment = values.get(token.parentNode);
    const i = Number(token.dataset.i);
    const logprob = segment.logprobs?.[i];
    showTip(event.clientX, event.clientY,
      el("b", {}, JSON.stringify(segment.texts ? segment.texts[i] : "").slice(0, 80)), el("div", {}, `id ${segment.ids[i]}, token ${num(segment.offset + i)} of [${segment.index}]`),
      typeof logprob === "number" ? el("div", {}, `logprob ${num(logprob)}, p ${num(Math.exp(logprob), 3)}`) : el("div", {}, "given"),
      segment.entropies ? el("div", {}, `entropy ${num(segment.entropies[i])} nats`) : null,
      segment.advantages ? el("div", {}, `advantage ${num(segment.advantages[i])}`) : null);
    return null;
  };
  main.addEventListener("pointermove", tell, { signal });
  main.addEventListener("click", tell, { signal });
  signal.addEventListener("abort", hideTip);
}
