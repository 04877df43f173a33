// A response as tokens, coloured by origin, with details of one token by pointer or keyboard.

import { byId, definitions, make } from "./dom.js";
import { TreeCount, drawTree, shapeOf, sizeOf } from "./tree.js";

export const ORIGINS = ["accepted", "recovered", "bonus", "plain"];
const MEANING = {
  accepted: "draft token that the target accepted",
  recovered: "target token after a rejected draft token",
  bonus: "target token after a fully accepted draft",
  plain: "target token of a step without a draft",
};

/** Origin of each token of one step, and the step's tree if its draft branched. */
export function tokensOf(trace) {
  const tree = trace.tree ? shapeOf(trace.tree) : null;
  return trace.token_ids.map((id, index) => ({
    id,
    text: trace.texts[index],
    origin: index < trace.accepted ? "accepted" : (trace.last ?? "plain"),
    step: trace.step,
    place: index + 1,
    size: trace.token_ids.length,
    tree,
  }));
}

/** One response. Arrow keys move through its tokens while it has the focus. */
export class TokenView {
  constructor() {
    this.tokens = [];
    this.counts = Object.fromEntries(ORIGINS.map((origin) => [origin, 0]));
    this.steps = 0;
    this.trees = new TreeCount();
    this.element = make("div", {
      class: "tokens",
      tabindex: "0",
      role: "group",
      "aria-label": "Response; arrow keys show the origin of each token",
    });
    this.current = -1;
    this.element.addEventListener("pointerover", (event) => this.#pointed(event));
    this.element.addEventListener("click", (event) => this.#pointed(event));
    this.element.addEventListener("pointerleave", () => this.#leave());
    this.element.addEventListener("blur", () => this.#leave());
    this.element.addEventListener("keydown", (event) => this.#key(event));
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  add(trace) {
    this.steps = trace.step;
    const tokens = tokensOf(trace);
    if (tokens[0]?.tree) this.trees.add(tokens[0].tree);
    for (const token of tokens) {
      this.counts[token.origin] += 1;
      token.element = make("span", { class: `tok ${token.origin}` }, token.text);
      token.element.dataset.index = this.tokens.length;
      this.tokens.push(token);
      this.element.append(token.element);
    }
  }

  #pointed(event) {
    const index = event.target.dataset?.index;
    if (index !== undefined) this.#select(Number(index));
  }

  #key(event) {
    const last = this.tokens.length - 1;
    const targets = {
      ArrowRight: Math.min(last, this.current + 1),
      ArrowLeft: Math.max(0, this.current - 1),
      Home: 0,
      End: last,
    };
    if (event.key === "Escape") this.#leave();
    if (!(event.key in targets) || last < 0) return;
    event.preventDefault();
    this.#select(targets[event.key]);
    byId("said").textContent = spoken(this.tokens[this.current]);
  }

  #select(index) {
    this.#mark(false);
    this.current = index;
    this.#mark(true);
    showDetail(this.tokens[index]);
  }

  #mark(isOn) {
    const chosen = this.tokens[this.current];
    if (!chosen) return;
    for (const token of this.tokens) {
      if (token.step === chosen.step) token.element.classList.toggle("same-step", isOn);
    }
    chosen.element.classList.toggle("chosen", isOn);
  }

  #leave() {
    this.#mark(false);
    byId("detail").hidden = true;
  }
}

function spoken(token) {
  const tree = token.tree ? `, draft tree of ${sizeOf(token.tree)}` : "";
  return `${shown(token)}: ${token.origin}, token ${token.id}, step ${token.step}, ${token.place} of ${token.size}${tree}`;
}

function shown(token) {
  return token.text === "" ? "(no visible text)" : JSON.stringify(token.text);
}

// The details are placed next to a token, so they are hidden when the page moves.
for (const event of ["scroll", "resize"]) {
  window.addEventListener(event, () => { byId("detail").hidden = true; }, { capture: true, passive: true });
}

function showDetail(token) {
  const detail = byId("detail");
  detail.replaceChildren(
    make("strong", { class: `tok ${token.origin}` }, token.origin),
    make("p", {}, MEANING[token.origin]),
    make("dl", {}, ...definitions([
      ["text", shown(token)],
      ["token id", token.id],
      ["step", token.step],
      ["position", `${token.place} of ${token.size} in the step`],
      ...(token.tree ? [["tree", sizeOf(token.tree)]] : []),
    ])),
    ...(token.tree ? [drawTree(token.tree)] : []),
  );
  detail.hidden = false;
  const box = token.element.getClientRects()[0] ?? token.element.getBoundingClientRect();
  const own = detail.getBoundingClientRect();
  const below = box.bottom + 8 + own.height < window.innerHeight;
  const left = Math.max(8, Math.min(box.left, window.innerWidth - own.width - 8));
  detail.style.left = `${left}px`;
  detail.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - own.height - 8)}px`;
}
