// The figures of the last minute as plots: what they show, from the records of the server.

import { Chart, PERCENTILES, PageMap, Timeline } from "./charts.js";

const SPAN_S = 60;
const STEPS_SPAN_S = 10;
const MAX_RECORDS = 5000;
const WINDOW_S = 15; // a percentile at a time is that of the requests of this many seconds before it
const $ = (id) => document.getElementById(id);

export function percentile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : NaN;
}

function inWords(values) {
  if (!values.length) return "";
  return `${PERCENTILES.map(([p]) => `p${p} ${percentile(values, p / 100).toFixed(0)}`).join(", ")} ms`;
}

// Lines of the percentiles over the last minute; times without a request before them are left out.
export function percentileLines(points) {
  const agos = Array.from({ length: SPAN_S + 1 }, (_, place) => SPAN_S - place);
  const before = (ago) => points.filter(([at]) => at >= ago && at < ago + WINDOW_S).map((point) => point[1]);
  const windows = agos.map((ago) => [ago, before(ago)]).filter(([, values]) => values.length);
  return PERCENTILES.map(([p]) => windows.map(([ago, values]) => [ago, percentile(values, p / 100)]));
}

// Notes what is compiled from one reading of the figures to the next: a bar that grows while a program is compiled, and a
// bar for what began and ended between two readings.
export function noteCompilations(bars, former, model, now) {
  const done = former ? model.compile_s - former.compile_s : 0; // seconds, of programs that were done meanwhile
  const begun = model.compiling_s === null ? null : now - model.compiling_s;
  let open = bars.at(-1)?.runs ? bars.at(-1) : null;
  const isOver = open && (begun === null || begun > open.at + open.s + 0.5);
  if (isOver) {
    open.runs = false;
    open.s = Math.max(open.s, Math.min(done, now - open.at));
    open = null;
  } else if (!open && done > 0) bars.push({ kind: "compile", at: (begun ?? now) - done, s: done, runs: false });
  if (begun === null) return;
  if (!open) bars.push((open = { kind: "compile", at: begun, s: 0, runs: true }));
  open.s = now - open.at;
}

// What is compiled, what comes, and how many steps ran as another one meanwhile.
function programs({ compiled, coming, compiling_s: running, num_stand_ins: steps }) {
  const next = coming.length ? `, ${coming.length} to come, next: ${coming[0]}` : "";
  const now = running ? ` One has been compiling for ${Math.round(running)} s.` : "";
  const stood = steps ? ` ${steps} ${steps === 1 ? "step" : "steps"} ran in another program, because theirs was not compiled.` : "";
  return `${compiled} programs compiled${next}.${now}${stood}`;
}

const decode = { colour: "decode" };
const times = [
  { label: "a request", colour: "prefill", dots: true },
  // Thinner lines over wider ones, so that equal percentiles are all seen.
  ...PERCENTILES.map(([p, colour, width, dash]) => ({ label: `p${p}`, colour, width, dash })),
];

export class Plots {
  constructor() {
    this.of = new Map(); // label of a model -> its records, samples and latest figures
    const requests = "appears when a request has ended. Percentiles are those of the 15 s before.";
    this.charts = {
      rate: new Chart("rate", "tokens/s", [{ label: "new tokens", ...decode, fill: true }], "Tokens appear when a request runs."),
      rows: new Chart("rows", "count", [{ label: "rows of a step", ...decode, dots: true }, { label: "waiting requests", colour: "preempt" }],
        "Rows appear when a request runs."),
      first: new Chart("first", "ms", times, `The time to the first token ${requests}`),
      each: new Chart("each", "ms", times, `The time per token ${requests}`),
      reads: new Chart("reads", "GB/s", [{ label: "read", ...decode }, { label: "rate of the memory", colour: "soft", dash: [6, 4] }],
        "What decode steps read appears when a request runs."),
    };
    this.steps = new Timeline("steps", STEPS_SPAN_S, "Steps appear when a request runs, compilations while they last.");
    this.pages = new PageMap("pages");
  }

  add(models) {
    const now = Date.now() / 1000;
    for (const model of models) {
      const one = this.of.get(model.label) ?? { records: [], samples: [], compiles: [], latest: null };
      noteCompilations(one.compiles, one.latest, model, now);
      one.records.push(...model.records);
      one.records.splice(0, one.records.length - MAX_RECORDS);
      one.samples.push({ at: now, waiting: model.waiting, reads: model.gigabytes_per_s });
      one.samples = one.samples.filter((sample) => now - sample.at <= SPAN_S);
      one.compiles = one.compiles.filter((compile) => now - compile.at - compile.s <= SPAN_S);
      one.latest = model;
      this.of.set(model.label, one);
    }
  }

  draw(label) {
    const one = this.of.get(label);
    if (!one) return;
    const now = Date.now() / 1000;
    const recent = one.records.filter((record) => now - record.at <= SPAN_S);
    this.drawRate(recent, now);
    this.drawRows(one, recent, now);
    const ends = recent.filter((record) => record.kind === "end");
    this.drawTimes("first", now, ends.map((end) => [now - end.at - end.s, 1000 * end.first_s]));
    const several = ends.filter((end) => end.tokens > 1);
    this.drawTimes("each", now, several.map((end) => [now - end.at - end.s, (1000 * (end.s - end.first_s)) / (end.tokens - 1)]));
    this.drawReads(one, now);
    const steps = recent.filter((record) => record.kind !== "end");
    this.steps.draw(now, [...steps, ...one.compiles]);
    const shown = steps.filter((step) => now - step.at - step.s <= STEPS_SPAN_S);
    $("now-steps").textContent = shown.length ? `${shown.length} steps` : "";
    this.pages.draw(one.latest.pages);
    $("programs").textContent = programs(one.latest);
  }

  drawRate(recent, now) {
    const perSecond = new Array(SPAN_S + 1).fill(0);
    for (const record of recent) {
      if (record.kind === "prefill" || record.kind === "decode") {
        const ago = Math.floor(now - record.at - record.s);
        if (ago >= 0 && ago <= SPAN_S) perSecond[ago] += record.tokens;
      }
    }
    const points = perSecond.map((tokens, ago) => [ago + 0.5, tokens]).reverse();
    this.charts.rate.draw(now, SPAN_S, [perSecond.some(Boolean) ? points : []]);
    $("now-rate").textContent = `${perSecond[1]} tokens/s`;
  }

  drawRows(one, recent, now) {
    const steps = recent.filter((record) => record.kind === "decode" || record.kind === "prefill");
    const rows = steps.map((step) => [now - step.at - step.s, step.rows]);
    const waiting = one.samples.map((sample) => [now - sample.at, sample.waiting]);
    const some = rows.length || one.samples.some((sample) => sample.waiting);
    this.charts.rows.draw(now, SPAN_S, some ? [rows, waiting] : [[], []]);
    $("now-rows").textContent = `${one.latest.running} of ${one.latest.max_num_seqs} run, ${one.latest.waiting} wait`;
  }

  drawTimes(id, now, points) {
    this.charts[id].draw(now, SPAN_S, [points, ...percentileLines(points)]);
    $(`now-${id}`).textContent = inWords(points.map((point) => point[1]));
  }

  drawReads(one, now) {
    const { gigabytes_per_s: rate, roofline_gigabytes_per_s: roofline } = one.latest;
    const reads = one.samples.map((sample) => [now - sample.at, sample.reads]);
    const limit = roofline ? [[SPAN_S, roofline], [0, roofline]] : [];
    this.charts.reads.draw(now, SPAN_S, one.samples.some((sample) => sample.reads) ? [reads, limit] : [[], []]);
    $("now-reads").textContent = roofline ? `${rate.toFixed(1)} of ${roofline.toFixed(1)} GB/s` : `${rate.toFixed(1)} GB/s`;
  }
}
