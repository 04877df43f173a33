// The page: requests measurements once a second, shows when the server does not respond, and starts the sections.

import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { byId } from "./dom.js";
import { Pace } from "./pace.js";
import { Points } from "./series.js";
import { getJson, useApiKey } from "./stream.js";

const FIRST_RETRY_S = 1;
const LONGEST_RETRY_S = 15;
const TIMEOUT_MS = 5000;

const points = new Points();
let model = "";
let timer = 0;
let failures = 0;

const charts = new Charts(points);
const pace = new Pace(() => poll());
new Chat(() => model);
new Compare(() => model);

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const data = await getJson(`ui/data?since=${points.since}`, { signal: AbortSignal.timeout(TIMEOUT_MS) });
    failures = 0;
    byId("banner").hidden = true;
    byId("api-key-form").hidden = true;
    model = data.model;
    byId("model").textContent = model;
    showHealth(data.health, data.num_engines);
    points.take(data);
    pace.show(data.plan);
    charts.update();
    timer = setTimeout(poll, data.period_s * 1000);
  } catch (error) {
    failures += 1;
    const wait = Math.min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** (failures - 1));
    setStatus("down", "no response");
    const message = error.name === "TimeoutError" ? "The server does not respond." : error.message;
    byId("banner-text").textContent = `${message} Next attempt in ${wait} s. The page shows earlier values.`;
    byId("banner").hidden = false;
    byId("api-key-form").hidden = error.status !== 401;
    timer = setTimeout(poll, wait * 1000);
  }
}

function showHealth({ status, reason, draft }, numEngines) {
  const engines = numEngines === 1 ? "1 engine" : `${numEngines} engines`;
  const drafting = draft === "none" ? "" : `, draft ${draft}`;
  if (status === "ok") setStatus("ok", `live, ${engines}${drafting}`);
  else setStatus(status === "dead" ? "down" : "degraded", `${status}: ${short(reason)}`);
  byId("status").title = reason;
}

/** The first sentence, at most 90 characters. */
function short(text) {
  const sentence = text.split(/(?<=\.)\s/)[0];
  return sentence.length > 90 ? `${sentence.slice(0, 90)}…` : sentence;
}

function setStatus(state, text) {
  const status = byId("status");
  status.dataset.state = state;
  if (status.textContent !== text) status.textContent = text;
}

byId("api-key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useApiKey(byId("api-key").value);
  byId("api-key").value = "";
  poll();
});
byId("banner-retry").addEventListener("click", poll);
document.addEventListener("visibilitychange", poll);
poll();
