// Line charts of several runs, as SVG.
import { el, svg, num, span, showTip, hideTip } from "./dom.js";

const WIDTH = 460, HEIGHT = 200, RIGHT = 10, TOP = 8;
export const COLORS = 8;

const AXES = { step: (x) => num(x), time: (x) => span(x), episodes: (x) => num(x), requests: (x) => num(Math.round(x)), scores: (x) => num(Math.round(x)) };

function ticks(low, high, wanted) {
  if (low === high) {
    low -= Math.abs(low) * 0.1 || 0.5;
    high += Math.abs(high) * 0.1 || 0.5;
  }
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let t = Math.floor(low / step) * step; t < high + step * 0.999; t += step) found.push(Math.abs(t) < step * 1e-6 ? 0 : Number(t.toPrecision(10)));
  return found;
}

function tickText(value) {
  return value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) ? value.toExponential(1).replace(".0e", "e") : num(value, 3);
}

function smoothed(points) {
  const half = Math.max(1, Math.round(points.length / 24));
  return points.map((point, i) => {
    const near = points.slice(Math.max(0, i - half), i + half + 1);
    return [point[0], near.reduce((sum, p) => sum + p[1], 0) / near.length];
  });
}

/** A chart of {name, series: [{run, stage, points}]}; `colorOf` gives a run's number.
 *  Of a series with `band`, the least and greatest are an area. `limit`: a horizontal line with its name.
 *  `axes`: the labels of x and y. */
export function chart(data, { axis = "step", colorOf, smooth = true, limit = null, told = num, note = "", axes = null }) {
  const lines = data.series;
  const LEFT = (told === num ? 48 : 64) + (axes ? 16 : 0), BOTTOM = axes ? 42 : 24;
  const all = lines.flatMap((line) => line.points);
  // An area is widest at its start: there it may leave the chart.
  const seen = lines.flatMap((line) => (line.band ? line.points.slice(Math.floor(line.points.length / 8)) : line.points));
  const xs = all.map((p) => p[0]);
  const left = Math.min(...xs), right = Math.max(...xs);
  const limits = limit ? [limit[0]] : [];
  const yTicks = ticks(Math.min(...seen.map((p) => p[2]), ...limits), Math.max(...seen.map((p) => p[3]), ...limits), 4);
  const bottom = yTicks[0], top = yTicks[yTicks.length - 1];
  const px = (x) => LEFT + ((x - left) / (right - left || 1)) * (WIDTH - LEFT - RIGHT);
  const py = (y) => HEIGHT - BOTTOM - ((Math.min(top, Math.max(bottom, y)) - bottom) / (top - bottom || 1)) * (HEIGHT - TOP - BOTTOM);
  const at = (points) => points.map((p) => `${px(p[0]).toFixed(1)},${py(p[1]).toFixed(1)}`).join(" ");
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "plot", role: "img", "aria-label": data.name });
  for (const tick of yTicks) {
    picture.append(
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: py(tick), y2: py(tick) }),
      svg("text", { class: "y", x: LEFT - 6, y: py(tick) }, told === num ? tickText(tick) : told(tick)),
    );
  }
  const inside = ticks(left, right, 4).filter((t) => t >= left && t <= right);
  for (const tick of inside.length > 1 ? inside : new Set([left, right])) {
    const last = px(tick) > WIDTH - RIGHT - 16; // its middle would leave the chart
    picture.append(svg("text", { class: last ? "x last" : "x", x: last ? WIDTH : px(tick), y: HEIGHT - BOTTOM + 18 }, AXES[axis](tick)));
  }
  if (axes) {
    picture.append(
      svg("text", { class: "x axis", x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4 }, axes[0]),
      svg("text", { class: "x axis", transform: `translate(11 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)` }, axes[1]),
    );
  }
  for (const line of lines) {
    const color = `s${colorOf(line.run)}`;
    const dotted = line.stage === "evaluate" ? " other" : "";
    const rough = smooth && line.points.length > 12;
    if (line.band) {
      const around = [...line.points.map((p) => [p[0], p[3]]), ...line.points.toReversed().map((p) => [p[0], p[2]])];
      picture.append(svg("polygon", { class: `${color} band`, points: at(around) }));
    }
    if (line.points.length === 1 || line.stage === "evaluate") {
      for (const p of line.points) picture.append(svg("circle", { class: `${color} dot`, cx: px(p[0]), cy: py(p[1]), r: 3 }));
    }
    picture.append(svg("polyline", { class: `${color} line${rough ? " raw" : dotted}`, points: at(line.points) }));
    if (rough) picture.append(svg("polyline", { class: `${color} line${dotted}`, points: at(smoothed(line.points)) }));
  }
  if (limit) picture.append(svg("line", { class: "limit", x1: LEFT, x2: WIDTH - RIGHT, y1: py(limit[0]), y2: py(limit[0]) }), svg("text", { class: "limit", x: WIDTH - RIGHT, y: py(limit[0]) + (py(limit[0]) < TOP + 16 ? 15 : -5) }, limit[1]));
  const pointer = svg("line", { class: "pointer", y1: TOP, y2: HEIGHT - BOTTOM });
  picture.append(pointer);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const x = left + (((event.clientX - box.left) * WIDTH) / box.width - LEFT) / (WIDTH - LEFT - RIGHT) * (right - left);
    const shown = lines.map((line) => {
      const near = line.points.reduce((best, p) => (Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best));
      return [line, near];
    });
    const nearest = shown.reduce((best, one) => (Math.abs(one[1][0] - x) < Math.abs(best[1][0] - x) ? one : best));
    pointer.setAttribute("x1", px(nearest[1][0]));
    pointer.setAttribute("x2", px(nearest[1][0]));
    picture.classList.add("on");
    showTip(event.clientX, event.clientY,
      el("b", {}, `${axis} ${AXES[axis](nearest[1][0])}`),
      shown.map(([line, p]) => el("div", {}, el("i", { class: `key k${colorOf(line.run)}` }), `${line.run}${line.stage === "evaluate" ? " (held out)" : ""}: ${told(p[1])}${line.band ? ` (${told(p[2])} to ${told(p[3])})` : ""}`)));
  });
  picture.addEventListener("pointerleave", () => {
    picture.classList.remove("on");
    hideTip();
  });
  const last = note || (lines.length === 1 ? told(lines[0].points.at(-1)[1]) : "");
  return el("figure", { class: "chart" }, el("figcaption", {}, data.name, el("span", { class: "soft" }, last)), picture);
}

/** Bars, one for each number; `label(i)` names them. */
export function bars(values, label, height = 90) {
  const most = Math.max(1, ...values);
  return el("div", { class: "bars", vars: { "--height": `${height}px` } }, values.map((value, i) =>
    el("div", { class: "column", title: `${label(i)}: ${value}` },
      el("b", {}, value || ""),
      el("i", { vars: { "--share": String(value / most) } }),
      el("span", {}, String(i)))));
}

/** A line of the newest values. */
export function spark(values) {
  if (values.length < 2) return null;
  const most = Math.max(...values, 1e-9);
  const at = values.map((v, i) => `${((i / (values.length - 1)) * 200).toFixed(1)},${(38 - (v / most) * 36).toFixed(1)}`).join(" ");
  return svg("svg", { viewBox: "0 0 200 40", class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("polyline", { points: at }));
}
