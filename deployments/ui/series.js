// Converts the server's sums per second to the series of the charts. Knows no document and no chart library.

export const REASONS = [
  ["plan", "chosen by the policy"],
  ["probe", "probe"],
  ["acceptance", "low acceptance"],
  ["batch", "batch too large"],
  ["off", "drafting disabled"],
  ["per_request", "limit of the request"],
  ["length", "near the length limit"],
  ["catch_up", "draft catches up"],
  ["memory", "no free KV blocks"],
  ["draft_down", "draft is down"],
  ["no_match", "no n-gram match"],
  ["options", "unsupported sampling options"],
];
export const PHASES = ["schedule", "draft", "handoff", "verify", "sample"];
const KEPT_S = 600;
const SCALARS = ["num_steps", "num_decodes", "num_prefill_tokens", "num_drafted", "num_accepted", "num_emitted",
  "schedule_s", "draft_s", "handoff_s", "verify_s", "sample_s", "step_s", "plain_s"];

/** The measurements of the last minutes. */
export class Points {
  all = [];
  changes = [];
  now = 0;

  /** Add a response of /ui/data. Its first second replaces the last one here, which was incomplete. */
  take(data) {
    this.now = data.now;
    const from = data.points.length ? data.points[0].t : Infinity;
    this.all = this.all.filter((point) => point.t < from && point.t >= data.now - KEPT_S).concat(data.points);
    const known = new Set(this.changes.map((change) => change.t));
    this.changes.push(...data.changes.filter((change) => !known.has(change.t)));
  }

  /** Time of the next request's first second: the last known one, because earlier seconds are complete. */
  get since() {
    return this.all.length ? this.all[this.all.length - 1].t : 0;
  }

  within(seconds) {
    return this.all.filter((point) => point.t >= this.now - seconds);
  }
}

/** The sum of many points; null for none. */
export function add(points) {
  if (!points.length) return null;
  const sum = { waiting: 0, spans: 0, reasons: {}, accepted: [], reached: [] };
  for (const name of SCALARS) sum[name] = 0;
  for (const point of points) {
    for (const name of SCALARS) sum[name] += point[name];
    sum.waiting = Math.max(sum.waiting, point.num_waiting);
    for (const [reason, count] of Object.entries(point.k_by_reason)) {
      sum.reasons[reason] = (sum.reasons[reason] ?? 0) + count;
      sum.spans += count;
    }
    point.accepted_by_position.forEach((count, i) => { sum.accepted[i] = (sum.accepted[i] ?? 0) + count; });
    point.drafted_by_position.forEach((count, i) => { sum.reached[i] = (sum.reached[i] ?? 0) + count; });
  }
  return sum;
}

/** a / b; null if b is 0. */
export function ratio(a, b) {
  return b > 0 ? a / b : null;
}

/** Means and shares of one sum. */
export function figures(sum) {
  const known = sum.schedule_s + sum.draft_s + sum.handoff_s + sum.verify_s + sum.sample_s;
  return {
    k: ratio(sum.num_drafted, sum.spans),
    acceptance: ratio(sum.num_accepted, sum.num_drafted),
    batch: ratio(sum.spans, sum.num_steps),
    waiting: sum.waiting,
    speed: ratio(sum.num_emitted, sum.step_s),
    plainSpeed: ratio(sum.spans, sum.plain_s),
    stepMs: ratio(sum.step_s * 1000, sum.num_steps),
    phasesMs: [...PHASES.map((phase) => ratio(sum[`${phase}_s`] * 1000, sum.num_steps)),
      ratio(Math.max(0, sum.step_s - known) * 1000, sum.num_steps)],
    reasons: REASONS.map(([reason]) => ratio(100 * (sum.reasons[reason] ?? 0), sum.spans)),
  };
}

/** Sums over equal intervals that fill the window; `times` are their beginnings as Unix time in seconds. */
export function buckets(points, windowS) {
  const width = windowS <= 60 ? 1 : windowS <= 300 ? 2 : 4;
  const end = Math.ceil((points.now + 1) / width) * width;
  const count = Math.round(windowS / width);
  const groups = Array.from({ length: count }, () => []);
  const begin = end - count * width;
  for (const point of points.all) {
    const index = Math.floor((point.t - begin) / width);
    if (index >= 0 && index < count) groups[index].push(point);
  }
  return { times: groups.map((_, index) => begin + index * width), sums: groups.map(add), width };
}

/** Acceptance rate at each draft position, in percent of the tokens verified there. */
export function acceptanceByPosition(sum) {
  const reached = sum?.reached ?? [];
  return reached.map((count, index) => ratio(100 * (sum.accepted[index] ?? 0), count));
}

/** Times at which drafting was switched on or off, or the plan changed: {t, text}, in order. */
export function switches(points) {
  const marks = [];
  let before = null;
  for (const point of points.all) {
    const state = stateOf(point);
    if (state === null) continue;
    if (before !== null && state !== before) {
      marks.push({ t: point.t, text: state === "on" ? `drafting on (was off: ${reasonText(before)})` : `drafting off: ${reasonText(state)}` });
    }
    before = state;
  }
  for (const { t, plan } of points.changes) {
    const bounds = `policy ${plan.policy}, K up to ${plan.max_k}, batch limit ${plan.max_batch}`;
    marks.push({ t, text: plan.enabled === false ? "plan: drafting disabled" : `plan: ${bounds}` });
  }
  return marks.sort((a, b) => a.t - b.t);
}

/** "on", or the reason why most requests of this second had no draft; null if no reason holds for most. */
function stateOf(point) {
  const counted = Object.entries(point.k_by_reason);
  const spans = counted.reduce((total, [, count]) => total + count, 0);
  if (spans === 0) return null;
  const [reason, count] = counted.reduce((best, entry) => (entry[1] > best[1] ? entry : best));
  if (count * 2 <= spans) return null;
  if (["off", "batch", "draft_down", "memory"].includes(reason)) return reason;
  if (reason === "acceptance") return point.num_drafted / spans < 0.5 ? "acceptance" : "on";
  return reason === "plan" ? "on" : null;
}

function reasonText(reason) {
  return REASONS.find(([name]) => name === reason)?.[1] ?? reason;
}
