// The chat: a conversation with the model, one response at a time.

import { byId, fixed, make } from "./dom.js";
import { streamChat } from "./stream.js";
import { ORIGINS, TokenView } from "./tokens.js";

export class Chat {
  #messages = [];
  #running = null;

  /** @param model returns the name of the model */
  constructor(model) {
    this.model = model;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("ask").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.#running?.abort());
    byId("clear").addEventListener("click", () => this.#clear());
  }

  #clear() {
    this.#running?.abort();
    this.#messages = [];
    const empty = byId("empty");
    empty.hidden = false;
    byId("log").replaceChildren(empty);
    byId("prompt").focus();
  }

  async #send() {
    const prompt = byId("prompt").value.trim();
    if (this.#running || !prompt) return;
    byId("empty").hidden = true;
    byId("prompt").value = "";
    this.#append(make("div", { class: "message user" }, prompt));
    const view = new TokenView();
    const summary = make("p", { class: "summary" }, "waiting for the first token");
    const message = make("div", { class: "message response" }, view.element, summary);
    this.#append(message);
    const messages = [...this.#messages, { role: "user", content: prompt }];
    this.#setRunning(new AbortController());
    const begin = performance.now();
    const speed = new Speed(begin);
    try {
      for await (const delta of streamChat(this.#fields(messages), this.#running.signal)) {
        speed.add(delta);
        if (delta.trace) view.add(delta.trace);
        describe(summary, view, speed);
        this.#follow();
      }
      this.#messages = [...messages, { role: "assistant", content: view.text }];
      byId("said").textContent = `Response of ${view.tokens.length} tokens: ${view.text}`;
    } catch (error) {
      const stopped = error.name === "AbortError";
      const note = stopped ? "Stopped." : error.message;
      message.append(make("p", { class: stopped ? "note" : "failed", role: stopped ? "status" : "alert" }, note));
      if (stopped) this.#messages = [...messages, { role: "assistant", content: view.text }];
      else if (!byId("prompt").value) byId("prompt").value = prompt;
      if (!view.tokens.length) {
        summary.remove();
        view.element.remove();
      }
    } finally {
      message.dataset.done = "true";
      this.#setRunning(null);
      this.#follow();
    }
  }

  #fields(messages) {
    const temperature = Number(byId("temperature").value);
    return {
      model: this.model(),
      messages,
      temperature: Number.isFinite(temperature) ? temperature : 0,
      max_tokens: Math.max(1, Number.parseInt(byId("max-tokens").value, 10) || 200),
      speculative: { enabled: byId("speculate").checked },
    };
  }

  #append(element) {
    byId("log").append(element);
    byId("log").scrollTop = byId("log").scrollHeight;
  }

  /** Scroll to the end, unless the user has scrolled up. */
  #follow() {
    const log = byId("log");
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
  }

  #setRunning(controller) {
    this.#running = controller;
    byId("send").hidden = controller !== null;
    byId("stop").hidden = controller === null;
  }
}

/** Time to the first token, and tokens per second after it. */
export class Speed {
  constructor(begin) {
    this.begin = begin;
    this.tokens = 0;
    this.usage = null;
  }

  add({ at, trace, usage }) {
    if (usage) this.usage = usage;
    if (!trace?.token_ids.length) return;
    this.tokens += trace.token_ids.length;
    this.first ??= { at, tokens: this.tokens };
    this.last = at;
  }

  /** Seconds to the tokens of the first step. */
  get ttft() {
    return this.first ? (this.first.at - this.begin) / 1000 : NaN;
  }

  /** Tokens per second after the first step. */
  get tokensPerSecond() {
    return this.first && this.last > this.first.at
      ? ((this.tokens - this.first.tokens) * 1000) / (this.last - this.first.at)
      : NaN;
  }
}

function describe(summary, view, speed) {
  const counts = ORIGINS.filter((origin) => view.counts[origin]).map((origin) =>
    make("span", { class: "count" }, make("i", { class: `dot ${origin}` }), `${view.counts[origin]} ${origin}`),
  );
  summary.replaceChildren(
    make("span", {}, `${view.tokens.length} tokens in ${view.steps} steps`),
    make("span", {}, `${fixed(speed.tokensPerSecond)} tokens/s`),
    make("span", {}, `first token after ${fixed(speed.ttft, 2)} s`),
    ...counts,
    ...(view.trees.text ? [make("span", { class: "trees" }, view.trees.text)] : []),
  );
}
