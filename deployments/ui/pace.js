// The plan in force, and its control for whoever has the admin key. The key is kept in this object only.

import { byId, definitions } from "./dom.js";
import { getJson } from "./stream.js";

const ROUTE = "admin/pace";

export class Pace {
  #key = null;
  #isEdited = false;

  /** @param changed called after a change, to show it at once */
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

  /** The plan that the server follows now. */
  show(plan) {
    byId("plan").replaceChildren(...definitions([
      ["Drafting", plan.enabled === false ? "disabled" : "enabled"],
      ["Policy", plan.policy],
      ["Most K", plan.max_k],
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
      say("Applied; engines follow with their next report.");
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
  if (error.status === 401) return "That is not the admin key.";
  if (error.status === 404) return "This server was started without an admin key, so its pace cannot be changed from here.";
  return error.message;
}

function say(message) {
  byId("pace-message").textContent = message;
}
