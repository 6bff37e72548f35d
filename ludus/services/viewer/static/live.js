// The running step: episodes by turn, tokens a second, what waits for what.
import { el, fill, num, span, count, badge } from "./dom.js";
import { bars, spark } from "./charts.js";

const PARTS = { train: "training", evaluate: "evaluation", checkpoint: "checkpoint", sample: "sampling", judge: "judge", tool: "tools", env_wait: "environments", idle: "rest" };

/** What waits for what, in a sentence. */
export function waits(state) {
  const busy = state.busy ?? {};
  const playing = state.playing ?? 0;
  const parts = [["env_wait", "their environment"], ["tool", "a tool"], ["judge", "their judge"]]
    .filter(([part]) => busy[part] > 0).map(([part, told]) => `${busy[part]} for ${told}`);
  const others = playing - ["env_wait", "tool", "judge"].reduce((sum, part) => sum + (busy[part] ?? 0), 0);
  if (others > 0) parts.push(`${others} for the sampler${busy.sample ? ", which computes" : ""}`);
  const episodes = `${count(playing, "episode")}${parts.length ? ` (waiting: ${parts.join(", ")})` : ""}`;
  if (busy.checkpoint) return "A checkpoint is being saved.";
  if (busy.train) return playing ? `The learner trains; ${episodes} play meanwhile.` : "The learner trains; no episode plays, the sampler waits for its weights.";
  if (busy.evaluate) return `Held-out evaluation, the learner waits: ${episodes}.`;
  if (playing) return `The learner waits for ${episodes}.`;
  return "Between two steps: no episode plays and nothing trains.";
}

export function livePanel() {
  const node = el("section", { class: "live", hidden: true, "aria-label": "The running step" });
  const speeds = [];
  let at = 0;

  function show(state) {
    if (!state) {
      node.hidden = true;
      return;
    }
    node.hidden = false;
    if (state.time !== at) {
      at = state.time;
      speeds.push(state.tokens_per_s ?? 0);
      if (speeds.length > 120) speeds.shift();
    }
    const seconds = Object.entries(state.seconds ?? {}).filter(([, value]) => value > 0.05).sort((a, b) => b[1] - a[1]);
    const total = seconds.reduce((sum, [, value]) => sum + value, 0) || 1;
    fill(node,
      el("h2", {}, state.stage ? `${state.stage}, step ${num(state.step)} of ${num(state.steps)}` : "starting", " ",
        state.stale ? badge(`no sign of life for ${span(state.age_s)}: process ${state.pid} hangs, or was killed`, "warn") : badge("live", "live")),
      el("p", { class: "waits" }, waits(state)),
      el("div", { class: "gauges" },
        el("div", {}, el("b", {}, num(Math.round(state.tokens_per_s ?? 0))), el("span", {}, "tokens/s"), spark(speeds)),
        el("div", {}, el("b", {}, num(state.playing ?? 0)), el("span", {}, "episodes playing")),
        el("div", {}, el("b", {}, num(state.done ?? 0)), el("span", {}, "ended in this step")),
        el("div", {}, el("b", {}, num(state.tokens ?? 0)), el("span", {}, "tokens sampled in this step")),
        el("div", {}, el("b", {}, span(state.step_s)), el("span", {}, "since the step began"))),
      el("div", { class: "pair" },
        el("div", {}, el("h3", {}, "Episodes by turn"), state.by_turn?.length ? bars(state.by_turn, (i) => `after ${count(i, "turn")}`) : el("p", { class: "soft" }, "none")),
        el("div", {}, el("h3", {}, "Time of this step"),
          el("div", { class: "stack" }, seconds.map(([part, value]) => el("i", { class: `part-${part}`, title: `${PARTS[part]}: ${span(value)}`, vars: { "--share": String(value / total) } }))),
          el("p", { class: "legend" }, seconds.map(([part, value]) => el("span", {}, el("i", { class: `key part-${part}` }), `${PARTS[part]} ${Math.round((100 * value) / total)} %`))),
          el("h3", {}, "Longest under way"),
          el("ul", { class: "slowest" }, (state.slowest ?? []).slice(0, 4).map((one) => el("li", {}, `${one.id}: ${count(one.turns, "turn")}, ${count(one.tokens, "token")}, ${span(one.s)}`))))),
    );
  }
  return { node, show };
}
