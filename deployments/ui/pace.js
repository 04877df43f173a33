// The plan in force, and the form that changes it with the admin key. The key is kept in this object only.

import { byId, definitions } from "./dom.js";
import { getJson } from "./stream.js";

const ROUTE = "admin/pace";

export class Pace {
  #key = null;
  #isEdited = false;

  /** @param changed called after a change, so that the page shows it at once */
  constructor(changed) {
    this.changed = changed;
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#unlock();
    });
    byId("pace-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#apply();
    });
    byId("pace-form").addEventListener("input", () => { this.#isEdited = true; });
    byId("lock").addEventListener("click", () => this.#lock());
  }

  /** Show the plan in force. */
  show(plan) {
    byId("plan").replaceChildren(...definitions([
      ["Drafting", plan.enabled === false ? "disabled" : "enabled"],
      ["Policy", plan.policy],
      ["Largest K", plan.max_k],
      ["Batch limit", plan.max_batch],
    ]));
    if (!this.#isEdited) this.#fill(plan);
  }

  #fill(plan) {
    byId("policy").value = plan.policy;
    byId("max-k").value = plan.max_k;
    byId("max-batch").value = plan.max_batch;
    byId("enabled").checked = plan.enabled !== false;
    this.#isEdited = false;
  }

  async #unlock() {
    const key = byId("key").value;
    byId("key").value = "";
    this.#key = key;
    try {
      this.#fill(await this.#ask("GET"));
    } catch (error) {
      this.#key = null;
      say(explain(error));
      return;
    }
    this.#toggle(true);
    say("Unlocked.");
    byId("policy").focus();
  }

  async #apply() {
    const changes = {
      policy: byId("policy").value,
      max_k: Number.parseInt(byId("max-k").value, 10),
      max_batch: Number.parseInt(byId("max-batch").value, 10),
      enabled: byId("enabled").checked,
    };
    try {
      this.#fill(await this.#ask("PATCH", changes));
      say("Applied. Each engine uses the new plan from its next report on.");
      this.changed();
    } catch (error) {
      if (error.status === 401) this.#lock();
      say(explain(error));
    }
  }

  #lock() {
    this.#key = null;
    this.#isEdited = false;
    this.#toggle(false);
    say("Locked.");
  }

  #toggle(isUnlocked) {
    byId("key-form").hidden = isUnlocked;
    byId("pace-form").hidden = !isUnlocked;
  }

  #ask(method, changes) {
    return getJson(ROUTE, {
      method,
      headers: { authorization: `Bearer ${this.#key}`, "content-type": "application/json" },
      body: changes && JSON.stringify(changes),
    });
  }
}

function explain(error) {
  if (error.status === 401) return "Wrong admin key.";
  if (error.status === 404) return "The server has no admin key (PACELINE_ADMIN_KEY), so the pace cannot be changed here.";
  return error.message;
}

function say(message) {
  byId("pace-message").textContent = message;
}
