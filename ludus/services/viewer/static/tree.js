// The token tree: chains of segments as nodes, branches below each other.
import { el, count } from "./dom.js";

const MOST = 300;

export function tree(data, place) {
  const children = new Map();
  data.tree.forEach(([parent], i) => {
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(i);
  });
  let left = MOST;

  function chain(first) {
    const found = [first];
    for (let next = children.get(first); next?.length === 1; next = children.get(next[0])) found.push(next[0]);
    return found;
  }

  /** Nodes are made from a stack: a tree may be deeper than calls can be. */
  const top = el("ul", { class: "nodes" });
  const stack = [...(children.get(-1) ?? [])].reverse().map((index) => [index, top]);
  while (stack.length && left > 0) {
    left -= 1;
    const [index, into] = stack.pop();
    const segments = chain(index);
    const tokens = segments.reduce((sum, i) => sum + data.tree[i][1], 0);
    const turns = segments.filter((i) => data.tree[i][2]).length;
    const last = segments.at(-1);
    const names = segments.length === 1 ? `[${index}]` : `[${index}]–[${last}]`;
    const go = (event) => {
      event.preventDefault();
      const target = document.getElementById(`segment-${place}-${index}`);
      target?.scrollIntoView({ block: "start" });
      target?.focus({ preventScroll: true });
    };
    const below = children.get(last) ?? [];
    const node = el("li", {}, el("a", { href: "#", onclick: go, class: turns ? "own" : "" }, names), el("span", { class: "soft" }, ` ${data.tree[index][3]}: ${count(turns, "turn")}, ${count(tokens, "token")}${below.length ? "" : ", leaf"}`));
    into.append(node);
    if (below.length) {
      const list = el("ul", {});
      node.append(list);
      for (const child of [...below].reverse()) stack.push([child, list]);
    }
  }
  if (left <= 0) top.append(el("li", { class: "soft" }, `more than ${MOST} chains: the rest is left out`));
  return top;
}
