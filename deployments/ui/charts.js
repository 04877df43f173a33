// The charts and figures of the last minutes, drawn by uPlot. The style sheet defines the colours of both schemes.

import { byId, definitions, fixed, make } from "./dom.js";
import { PHASES, REASONS, acceptanceByPosition, add, buckets, figures, switches } from "./series.js";

const HEIGHT = 150;
const clock = (t) => new Date(t * 1000).toLocaleTimeString([], { hour12: false });
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** The charts: title, unit, and each series with its colour and its value in a bucket. */
const CHARTS = [
  {
    id: "k", title: "K", note: "mean draft tokens per request and step", digits: 2,
    series: [{ label: "K", colour: "c1", value: (f) => f.k }],
  },
  {
    id: "reasons", title: "Reason for K", note: "share of requests", unit: " %", digits: 0, stacked: true, max: 100,
    series: REASONS.map(([, label], i) => ({ label, colour: `r${i + 1}`, value: (f) => f.reasons[i] })),
  },
  {
    id: "speed", title: "Tokens per second", note: "of step time", digits: 1,
    series: [
      { label: "measured", colour: "c1", value: (f) => f.speed },
      { label: "baseline (predicted without drafts)", colour: "c2", value: (f) => f.plainSpeed, dash: [6, 4] },
    ],
  },
  {
    id: "position", title: "Acceptance by position", note: "of verified draft tokens", unit: " %",
    digits: 0, max: 100, positions: true, series: [{ label: "accepted", colour: "c1" }],
  },
  {
    id: "batch", title: "Batch", note: "requests per step", digits: 1,
    series: [
      { label: "running", colour: "c1", value: (f) => f.batch },
      { label: "waiting", colour: "c2", value: (f) => f.waiting, dash: [6, 4] },
    ],
  },
  {
    id: "phases", title: "Step time", note: "mean milliseconds per step", unit: " ms", digits: 2, stacked: true,
    series: [...PHASES, "rest"].map((label, i) => ({ label, colour: `p${i + 1}`, value: (f) => f.phasesMs[i] })),
  },
];

/** All charts, the tiles above them and the list of switches below. */
export class Charts {
  constructor(points) {
    this.points = points;
    this.windowS = 300;
    this.charts = CHARTS.map((spec) => new Chart(spec));
    byId("plots").replaceChildren(...this.charts.map((chart) => chart.element));
    const resized = new ResizeObserver(() => this.charts.forEach((chart) => chart.resize()));
    resized.observe(byId("plots"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.charts.forEach((chart) => chart.forget());
      this.update();
    });
    for (const input of document.getElementsByName("window")) {
      input.addEventListener("change", () => {
        this.windowS = Number(input.value);
        this.update();
      });
    }
    this.update();
  }

  update() {
    const { times, sums, width } = buckets(this.points, this.windowS);
    const whole = add(this.points.within(this.windowS));
    const inWindow = sums.map((sum) => (sum ? figures(sum) : null));
    const marks = switches(this.points);
    for (const chart of this.charts) {
      if (chart.spec.positions) chart.setPositions(acceptanceByPosition(whole));
      else chart.setTimes(times, inWindow, marks, width);
    }
    showTiles(this.points);
    showSwitches(marks);
  }
}

/** One uPlot chart. Its legend shows the values at the cursor, or the latest values. */
class Chart {
  #plot = null;
  #data = [[]];
  #marks = [];

  constructor(spec) {
    this.spec = spec;
    this.frame = make("div", { class: "plot" });
    this.legend = make("ul", { class: "legend" });
    this.none = make("p", { class: "none" }, "No steps in this window.");
    this.when = make("span", { class: "when" });
    this.element = make(
      "figure",
      { class: "card", tabindex: "0", id: `chart-${spec.id}`, "aria-label": `${spec.title}, ${spec.note}; arrow keys read values` },
      make("figcaption", {}, make("h3", {}, spec.title), make("span", { class: "note" }, spec.note), this.when),
      this.frame, this.none, this.legend,
    );
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("blur", () => this.#plot?.setCursor({ left: -10, top: -10 }));
  }

  setTimes(times, inWindow, marks, width) {
    const raw = this.spec.series.map(({ value }) => inWindow.map((f) => (f ? value(f) : null)));
    this.#marks = marks;
    this.#show([times, ...raw], width);
  }

  setPositions(values) {
    this.#show([values.map((_, index) => index + 1), values], 1);
  }

  resize() {
    if (this.#plot && this.frame.clientWidth > 0) this.#plot.setSize({ width: this.frame.clientWidth, height: HEIGHT });
  }

  /** Redraw with the next data, because the colours changed. */
  forget() {
    this.#plot?.destroy();
    this.#plot = null;
  }

  #show(data, width) {
    this.#data = data;
    const isEmpty = data.slice(1).every((values) => values.every((value) => value === null));
    this.none.hidden = !isEmpty;
    this.frame.classList.toggle("faint", isEmpty);
    this.#width = width;
    const drawn = this.spec.stacked ? stack(data) : data;
    if (this.#plot) this.#plot.setData(drawn);
    else this.#plot = new uPlot(this.#options(), drawn, this.frame);
    this.#showLegend(this.#plot.cursor.idx);
  }

  #width = 1;

  #options() {
    const { series, stacked, positions, max } = this.spec;
    const axis = { stroke: colour("muted"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    return {
      width: Math.max(200, this.frame.clientWidth),
      height: HEIGHT,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: {
        x: positions
          ? { time: false, range: (u, low, high) => [0.5, Math.max(3, high || 0) + 0.5] }
          : { range: (u, low, high) => [low, high + this.#width] },
        y: { range: (u, low, high) => [0, max ?? (high > 0 ? high * 1.08 : 1)] },
      },
      axes: [
        positions
          ? { ...axis, size: 26, incrs: [1], values: (u, splits) => splits.map((n) => (Number.isInteger(n) ? `${n}` : "")) }
          : { ...axis, size: 26, space: 62, incrs: [15, 30, 60, 120, 300],
            values: (u, splits) => splits.map((t) => (u.scales.x.max - u.scales.x.min > 90 ? clock(t).slice(0, 5) : clock(t))) },
        { ...axis, size: 44, space: 28, values: (u, splits) => splits.map((v) => `${+v.toFixed(3)}${this.spec.unit === " %" ? "%" : ""}`) },
      ],
      series: [{}, ...(stacked ? [...series].reverse() : series).map((one) => ({
        label: one.label,
        stroke: colour(one.colour),
        width: stacked || positions ? 0 : 2,
        fill: stacked || positions ? colour(one.colour) : undefined,
        dash: one.dash,
        paths: stacked ? uPlot.paths.bars({ size: [1, Infinity], align: 1, gap: 0 })
          : positions ? uPlot.paths.bars({ size: [0.6, 60] }) : undefined,
        points: stacked || positions ? { show: false } : { show: true, size: 4, filter: lonely },
      }))],
      hooks: {
        setCursor: [(u) => this.#showLegend(u.cursor.idx)],
        draw: positions ? [] : [(u) => drawMarks(u, this.#marks)],
      },
    };
  }

  #showLegend(index) {
    const { series, digits, unit = "", positions, stacked } = this.spec;
    const [xs, ...rows] = this.#data;
    const last = rows[0].reduce((found, value, i) => (value === null ? found : i), -1);
    const at = index ?? last;
    const isPast = index !== null && index !== undefined;
    this.when.textContent = !isPast || at < 0 ? "" : positions ? `position ${xs[at]}` : clock(xs[at]);
    const shown = series.map((one, i) => ({ ...one, now: rows[i]?.[at], ever: rows[i]?.some((value) => value > 0) }));
    this.legend.replaceChildren(...(positions
      ? xs.filter((_, i) => rows[0][i] !== null).map((x, i) => make("li", {}, `${x}: `, make("b", {}, `${fixed(rows[0][i], digits)}${unit}`)))
      : shown.filter((one) => !stacked || one.ever).map((one) => {
        const dot = make("i", { class: one.dash ? "dot dashed" : "dot" });
        dot.style.setProperty("--dot", `var(--${one.colour})`);
        return make("li", {}, dot, `${one.label} `, make("b", {}, `${fixed(one.now ?? NaN, digits)}${Number.isFinite(one.now) ? unit : ""}`));
      })));
  }

  #key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const xs = this.#data[0];
    if (!move || !xs.length || !this.#plot) return;
    event.preventDefault();
    const filled = xs.map((_, i) => i).filter((i) => this.#data.slice(1).some((row) => row[i] !== null));
    const from = this.#plot.cursor.idx ?? xs.length;
    const next = move > 0 ? filled.find((i) => i > from) : filled.findLast((i) => i < from);
    if (next === undefined) return;
    this.#plot.setCursor({ left: this.#plot.valToPos(xs[next], "x"), top: 10 });
    byId("said").textContent = `${this.when.textContent}: ${[...this.legend.children].map((li) => li.textContent).join(", ")}`;
  }
}

/** Cumulative sums from the last series up, so that each series is drawn below the next. */
function stack([xs, ...rows]) {
  const sums = xs.map(() => 0);
  const heights = rows.map((row) => row.map((value, i) => (value === null ? null : (sums[i] += value))));
  return [xs, ...heights.reverse()];
}

/** Single points between two gaps, which a line would not show. */
function lonely(u, seriesIndex) {
  const values = u.data[seriesIndex];
  return values.map((_, i) => i).filter((i) => values[i] != null && values[i - 1] == null && values[i + 1] == null);
}

function drawMarks(u, marks) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = colour("mark");
  ctx.fillStyle = colour("mark");
  ctx.lineWidth = devicePixelRatio;
  for (const { t } of marks) {
    if (t < u.scales.x.min || t > u.scales.x.max) continue;
    const x = Math.round(u.valToPos(t, "x", true));
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.beginPath();
    ctx.moveTo(x - 4 * devicePixelRatio, bbox.top);
    ctx.lineTo(x + 4 * devicePixelRatio, bbox.top);
    ctx.lineTo(x, bbox.top + 6 * devicePixelRatio);
    ctx.fill();
  }
  ctx.restore();
}

function showTiles(points) {
  const sum = add(points.within(6));
  const f = sum ? figures(sum) : null;
  const gain = f?.plainSpeed ? f.speed / f.plainSpeed : NaN;
  byId("tiles").replaceChildren(...definitions([
    ["Tokens/s", f ? fixed(f.speed ?? NaN) : "idle"],
    ["Gain", Number.isFinite(gain) ? `${fixed(gain, 2)}×` : "–"],
    ["K", fixed(f?.k ?? NaN, 2)],
    ["Acceptance", f && f.acceptance !== null ? `${fixed(100 * f.acceptance, 0)} %` : "–"],
    ["Batch", fixed(f?.batch ?? NaN)],
    ["Step", f ? `${fixed(f.stepMs ?? NaN, 0)} ms` : "–"],
  ]));
}

function showSwitches(marks) {
  const rows = marks.slice(-8).reverse().map(({ t, text }) =>
    make("li", {}, make("time", { datetime: new Date(t * 1000).toISOString() }, clock(t)), ` ${text}`));
  byId("switches").replaceChildren(...(rows.length ? rows : [make("li", { class: "note" }, "None in the last minutes.")]));
}
