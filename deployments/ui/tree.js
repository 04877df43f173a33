// The draft tree of a step: its nodes in order of depth-first search, its depth, and the path that the target accepted.

import { make } from "./dom.js";

/** Number of nodes, depth, accepted nodes, and one row per node: {text, depth, accepted}. */
export function shapeOf({ texts, parents, path }) {
  const depths = [];
  parents.forEach((parent) => depths.push(parent < 0 ? 1 : depths[parent] + 1));
  const accepted = new Set(path);
  const rows = [];
  const visit = (parent) => {
    parents.forEach((other, node) => {
      if (other !== parent) return;
      rows.push({ text: texts[node], depth: depths[node], accepted: accepted.has(node) });
      visit(node);
    });
  };
  visit(-1);
  return { nodes: parents.length, depth: Math.max(0, ...depths), accepted: path.length, rows };
}

/** The size of a tree in words. */
export function sizeOf({ nodes, depth, accepted }) {
  return `${nodes} nodes, ${depth} deep, path of ${accepted} accepted`;
}

/** The tree as a list, indented by depth. */
export function drawTree(shape) {
  return make("ol", { class: "tree", "aria-label": "Draft tree" }, ...shape.rows.map(({ text, depth, accepted }) => {
    const node = make("li", { class: accepted ? "node accepted" : "node" },
      make("span", { class: accepted ? "tok accepted" : "tok rejected" }, JSON.stringify(text)));
    node.style.setProperty("--depth", depth);
    return node;
  }));
}

/** Sums over the trees of one response. */
export class TreeCount {
  trees = 0;
  nodes = 0;
  depth = 0;
  accepted = 0;

  add(shape) {
    this.trees += 1;
    this.nodes += shape.nodes;
    this.depth += shape.depth;
    this.accepted += shape.accepted;
  }

  /** The means in words; empty without trees. */
  get text() {
    if (!this.trees) return "";
    const mean = (sum) => (sum / this.trees).toFixed(1);
    return `${this.trees} trees: ${mean(this.nodes)} nodes, ${mean(this.depth)} deep, ${mean(this.accepted)} accepted`;
  }
}
