// Plots with axes, units, a legend and what is under the pointer. Colours come from the style sheet.

import uPlot from "./vendor/uplot.js";

// Each percentile with its colour, width and dashes.
export const PERCENTILES = [[50, "decode", 4], [90, "compile", 2.5, [7, 4]], [99, "preempt", 1.5, [2, 3]]];
const HEIGHT = 178; // of a plot without its legend
const FONT = "11px system-ui, sans-serif";
const COUNTS = [1, 2, 5].flatMap((one) => [one, 10 * one, 100 * one, 1000 * one]).sort((a, b) => a - b);
const LANES = ["preempt", "decode", "prefill", "compile"]; // from below
const LANE_NAMES = ["preemption", "decode", "prefill", "compilation"];
const $ = (id) => document.getElementById(id);

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const digits = (value) => (value < 10 ? value.toFixed(1) : value.toFixed(0));
const clock = (seconds, parts = 0) => {
  const text = new Date(1000 * seconds).toLocaleTimeString("en-GB");
  return parts ? `${text}.${Math.floor((seconds % 1) * 10 ** parts).toString().padStart(parts, "0")}` : text;
};

// A plot that is made when its place is first seen, and made anew when its width or the colours change.
class Plot {
  constructor(id, empty) {
    this.place = $(id);
    this.empty = document.createElement("p");
    this.empty.className = "empty";
    this.empty.textContent = empty;
    this.place.append(this.empty);
    this.width = 0;
    this.range = [0, 1]; // of time
    const forget = () => this.forget();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forget);
    new ResizeObserver(() => this.place.clientWidth && this.place.clientWidth !== this.width && this.forget()).observe(this.place);
  }

  forget() {
    this.plot?.destroy();
    this.plot = null;
    this.again?.();
  }

  // Shows `data` between two times, if the place is seen.
  show(range, data, isEmpty) {
    this.range = range;
    this.again = () => this.show(range, data, isEmpty);
    this.empty.hidden = !isEmpty;
    const { clientWidth: width } = this.place;
    if (!width) return;
    if (width !== this.width) {
      this.plot?.destroy();
      this.plot = null;
      this.width = width;
    }
    this.plot ??= new uPlot(this.options(), data, this.place);
    this.plot.setData(data);
  }

  common(height) {
    const axis = { stroke: colour("soft"), font: FONT, labelFont: FONT, ticks: { stroke: colour("line") }, grid: { stroke: colour("line"), width: 1 } };
    return {
      width: this.width,
      height,
      padding: [8, 28, 0, 0], // room for half of the last time
      cursor: { drag: { x: false, y: false }, points: { size: 6 } },
      axis,
      time: { ...axis, size: 26, space: 80, values: (_, at) => at.map((seconds) => clock(seconds)) },
      x: { time: true, range: () => this.range },
    };
  }
}

// Lines and points over time. `series`: [{label, colour, dots, fill, width, dash}].
export class Chart extends Plot {
  constructor(id, unit, series, empty) {
    super(id, empty);
    this.unit = unit;
    this.series = series;
  }

  options() {
    const { axis, time, x, ...common } = this.common(HEIGHT);
    const value = (_, number) => (number == null ? "–" : `${digits(number)} ${this.unit === "count" ? "" : this.unit}`.trim());
    return {
      ...common,
      scales: { x, y: { range: (_, low, high) => [0, high > 0 ? 1.08 * high : 1] } },
      axes: [time, { ...axis, label: this.unit, labelSize: 16, size: 46, ...(this.unit === "count" ? { incrs: COUNTS } : {}), values: (_, at) => at.map((number) => +number.toFixed(3)) }],
      series: [
        { label: "time", value: (_, seconds) => (seconds == null ? "–" : clock(seconds)) },
        ...this.series.map(({ label, colour: name, dots, fill, width = 1.5, dash }) => ({
          label,
          value,
          stroke: colour(name),
          fill: fill ? `${colour(name)}33` : undefined,
          width,
          dash,
          spanGaps: true,
          paths: dots ? () => null : undefined,
          points: { show: Boolean(dots), size: 4, fill: colour(name) },
        })),
      ],
    };
  }

  // `lines`: for each series its points [seconds ago, value].
  draw(now, span, lines) {
    const tables = lines.map((points) => {
      const sorted = [...points].sort((one, other) => other[0] - one[0]);
      return [sorted.map(([ago]) => now - ago), sorted.map(([, value]) => value)];
    });
    this.show([now - span, now], uPlot.join(tables), lines.every((points) => !points.length));
  }
}

// Bars of steps and compilations over time, each kind in a lane of its own.
export class Timeline extends Plot {
  constructor(id, span, empty) {
    super(id, empty);
    this.span = span;
    this.bars = [];
    this.over = $(`over-${id}`);
  }

  options() {
    const { axis, time, x, ...common } = this.common(HEIGHT);
    return {
      ...common,
      cursor: { ...common.cursor, y: false },
      legend: { show: false },
      scales: { x, y: { range: [0, LANES.length] } },
      axes: [time, { ...axis, size: 84, splits: () => LANES.map((_, lane) => lane + 0.5), values: () => LANE_NAMES, grid: { show: false }, ticks: { show: false } }],
      series: [{}, {}],
      hooks: { draw: [(plot) => this.paint(plot)], setCursor: [(plot) => this.tell(plot)] },
    };
  }

  draw(now, bars) {
    this.bars = bars.filter((bar) => now - bar.at - bar.s <= this.span);
    this.show([now - this.span, now], [[now - this.span, now], [null, null]], !this.bars.length);
  }

  paint(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const tall = bbox.height / LANES.length;
    for (const bar of this.bars) {
      const lane = LANES.indexOf(bar.kind);
      const left = Math.floor(plot.valToPos(bar.at, "x", true));
      const right = Math.ceil(plot.valToPos(bar.at + bar.s, "x", true));
      ctx.fillStyle = colour(bar.kind);
      ctx.fillRect(left, bbox.top + (LANES.length - 1 - lane) * tall + 3, Math.max(2, right - left), tall - 6);
    }
    ctx.restore();
  }

  // Says what is under the pointer.
  tell(plot) {
    const at = plot.cursor.left < 0 ? null : plot.posToVal(plot.cursor.left, "x");
    const lane = LANES.length - 1 - Math.floor((LANES.length * plot.cursor.top) / plot.over.clientHeight);
    const reach = (3 * this.span) / plot.over.clientWidth; // a step may be thinner than a pixel
    const found = at === null ? undefined : this.bars.find((bar) =>
      bar.kind === LANES[lane] && at >= bar.at - reach && at <= bar.at + bar.s + reach);
    if (!found) this.over.textContent = "";
    else {
      const { kind, rows, tokens, prompt_tokens: prompt, s } = found;
      const facts = [LANE_NAMES[LANES.indexOf(kind)], `at ${clock(found.at, 2)}`];
      if (rows) facts.push(`${rows} ${rows === 1 ? "row" : "rows"}`);
      if (prompt) facts.push(`${prompt} prompt tokens`);
      if (tokens) facts.push(`${tokens} new tokens`);
      if (s) facts.push(s < 1 ? `${(1000 * s).toFixed(1)} ms` : `${s.toFixed(1)} s${found.runs ? " so far" : ""}`);
      this.over.textContent = facts.join(", ");
    }
  }
}

const MAX_SIDE = 24; // of a page, in pixels
const holderName = (count) => (count < 0 ? "kept" : count === 0 ? "fill" : count === 1 ? "decode" : "shared");
const HOLDERS = { kept: "kept prefix", fill: "free", decode: "one row" };

// The pages of a cache as squares.
export class PageMap {
  constructor(id) {
    this.place = $(id);
    this.canvas = document.createElement("canvas");
    this.empty = document.createElement("p");
    this.empty.className = "empty";
    this.place.append(this.canvas, this.empty);
    this.pages = [];
    this.canvas.addEventListener("mousemove", (event) => this.tell(event.offsetX, event.offsetY));
    this.canvas.addEventListener("mouseleave", () => this.tell(-1, -1));
  }

  // `groups`: the number of holders of each page of each group; null when it is not known.
  draw(groups) {
    this.pages = Object.entries(groups ?? {}).flatMap(([name, pages]) =>
      pages.map((count, number) => ({ name, number, count })).slice(1)); // page 0 is never used
    this.empty.hidden = this.pages.length > 0;
    this.empty.textContent = "Pages appear when a request has run, if the cache of this engine has pages.";
    const { clientWidth: width, clientHeight: height } = this.place;
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    this.side = MAX_SIDE;
    while (this.side > 2 && Math.ceil(this.pages.length / Math.floor(width / this.side)) * this.side > height) this.side -= 1;
    this.perLine = Math.floor(width / this.side);
    for (const [place, { count }] of this.pages.entries()) {
      const x = (place % this.perLine) * this.side;
      const y = Math.floor(place / this.perLine) * this.side;
      context.fillStyle = colour(holderName(count));
      context.fillRect(x, y, this.side - 1, this.side - 1);
    }
    const count = (test) => this.pages.filter((page) => test(page.count)).length;
    const [used, shared, kept] = [count((n) => n > 0), count((n) => n > 1), count((n) => n < 0)];
    $("now-pages").textContent = this.pages.length ? `${used} used, ${shared} of them shared, ${kept} kept` : "";
  }

  // Says what is under the pointer.
  tell(x, y) {
    const column = Math.floor(x / this.side);
    const page = x < 0 || column >= this.perLine ? undefined : this.pages[Math.floor(y / this.side) * this.perLine + column];
    const who = page && (HOLDERS[holderName(page.count)] ?? `${page.count} rows`);
    $("over-pages").textContent = page ? `page ${page.number} of ${page.name}: ${who}` : "";
  }
}
