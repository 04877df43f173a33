// The same prompt with and without speculation, one after the other: both speeds and texts.

import { Speed } from "./chat.js";
import { byId, fixed, make } from "./dom.js";
import { streamChat } from "./stream.js";

const SEED = 7;
const RUNS = [
  { name: "without", enabled: false },
  { name: "with", enabled: true },
];

export class Compare {
  #isRunning = false;

  constructor(model) {
    this.model = model;
    byId("compare-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run();
    });
  }

  async #run() {
    if (this.#isRunning) return;
    this.#isRunning = true;
    const button = byId("compare-run");
    button.disabled = true;
    const results = [];
    try {
      for (const run of RUNS) {
        show(`Running ${run.name} speculation …`);
        results.push(await this.#once(run.enabled));
      }
      byId("compare-result").replaceChildren(...report(results));
    } catch (error) {
      byId("compare-result").replaceChildren(make("p", { class: "failed" }, error.message));
    } finally {
      this.#isRunning = false;
      button.disabled = false;
    }
  }

  async #once(enabled) {
    const speed = new Speed(performance.now());
    const texts = [];
    const fields = {
      model: this.model(),
      messages: [{ role: "user", content: byId("compare-prompt").value }],
      max_tokens: Number.parseInt(byId("compare-tokens").value, 10) || 128,
      temperature: 0,
      seed: SEED,
      speculative: { enabled },
    };
    let steps = 0;
    for await (const delta of streamChat(fields)) {
      speed.add(delta);
      if (!delta.trace) continue;
      texts.push(...delta.trace.texts);
      steps = delta.trace.step;
    }
    return { speed, text: texts.join(""), steps };
  }
}

function show(message) {
  byId("compare-result").replaceChildren(make("p", { class: "note" }, message));
}

function report([without, withDrafts]) {
  const fastest = Math.max(without.speed.tokensPerSecond, withDrafts.speed.tokensPerSecond);
  const rows = [["without", without], ["with", withDrafts]].map(([name, { speed, steps }]) =>
    make("tr", {},
      make("th", { scope: "row" }, name),
      make("td", { class: "number" }, fixed(speed.tokensPerSecond)),
      make("td", { class: "meter" }, make("meter", { min: 0, max: fastest || 1, value: speed.tokensPerSecond || 0, "aria-label": `${name} speculation` })),
      make("td", { class: "number" }, fixed(speed.ttft, 2)),
      make("td", { class: "number" }, String(speed.tokens)),
      make("td", { class: "number" }, fixed(speed.tokens / steps, 2))));
  const gain = withDrafts.speed.tokensPerSecond / without.speed.tokensPerSecond;
  const usage = withDrafts.speed.usage?.speculative;
  const facts = [
    `Speed-up by speculation: ${fixed(gain, 2)}x.`,
    usage ? `${usage.accepted} of ${usage.drafted} draft tokens were accepted.` : "",
    without.text === withDrafts.text
      ? "Both responses have the same text."
      : "The texts differ: at low precision, rounding can decide between tokens of almost equal logits.",
  ];
  return [
    make("div", { class: "scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, ...["", "tokens/s", "", "first token, s", "tokens", "tokens per step"].map((head) => make("th", { scope: "col" }, head)))),
      make("tbody", {}, ...rows))),
    make("p", { class: "note" }, facts.filter(Boolean).join(" ")),
  ];
}
