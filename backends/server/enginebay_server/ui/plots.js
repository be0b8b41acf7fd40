// Plots of what the engines did, on canvases. Colours come from the style sheet.

const SPAN_S = 60;
const STEPS_SPAN_S = 10;
const MAX_RECORDS = 5000;
const WINDOW_S = 15; // a percentile at a time is that of the requests of this many seconds before it
const PERCENTILES = [[50, "decode"], [90, "compile"], [99, "preempt"]];
const $ = (id) => document.getElementById(id);

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A canvas in device pixels, cleared; returns (context, width, height) in CSS pixels.
function surface(id) {
  const canvas = $(id);
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
  return [context, width, height];
}

// Lines over the last minute. `series`: [{points: [[seconds ago, value]], colour}].
function lines(id, series, unit = "") {
  const [context, width, height] = surface(id);
  const top = Math.max(1e-9, ...series.flatMap((one) => one.points.map((point) => point[1])));
  const x = (ago) => width * (1 - ago / SPAN_S);
  const y = (value) => height - 4 - (height - 20) * (value / top);
  for (const one of series) {
    context.strokeStyle = context.fillStyle = colour(one.colour);
    context.lineWidth = 1.5;
    context.beginPath();
    for (const [ago, value] of one.points) {
      if (one.dots) context.fillRect(x(ago) - 1.5, y(value) - 1.5, 3, 3);
      else context.lineTo(x(ago), y(value));
    }
    context.stroke();
  }
  context.fillStyle = colour("soft");
  context.fillText(`${top < 10 ? top.toFixed(1) : Math.round(top)}${unit}`, 4, 12);
}

export function percentile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : NaN;
}

function inWords(values) {
  if (!values.length) return "";
  return PERCENTILES.map(([p]) => `p${p} ${percentile(values, p / 100).toFixed(0)}`).join(", ");
}

// Lines of the percentiles over the last minute; times without a request before them are left out.
export function percentileLines(points) {
  const agos = Array.from({ length: SPAN_S + 1 }, (_, place) => SPAN_S - place);
  const before = (ago) => points.filter(([at]) => at >= ago && at < ago + WINDOW_S).map((point) => point[1]);
  const windows = agos.map((ago) => [ago, before(ago)]).filter(([, values]) => values.length);
  return PERCENTILES.map(([p, name]) => ({
    points: windows.map(([ago, values]) => [ago, percentile(values, p / 100)]),
    colour: name,
  }));
}

// What is compiled, what comes, and how many steps ran as another one meanwhile.
function programs({ compiled, coming, num_stand_ins: steps }) {
  const next = coming.length ? `, ${coming.length} to come, next: ${coming[0]}` : "";
  const stood = steps ? ` ${steps} ${steps === 1 ? "step" : "steps"} ran in another program, because theirs was not compiled.` : "";
  return `${compiled} programs compiled${next}.${stood}`;
}

export class Plots {
  constructor() {
    this.of = new Map(); // label of a model -> its records, samples and latest figures
  }

  add(models) {
    const now = Date.now() / 1000;
    for (const model of models) {
      const one = this.of.get(model.label) ?? { records: [], samples: [], compiles: [], latest: model };
      if (this.of.has(model.label) && model.compiled > one.latest.compiled) {
        one.compiles.push({ at: now, count: model.compiled - one.latest.compiled });
      }
      one.records.push(...model.records);
      one.records.splice(0, one.records.length - MAX_RECORDS);
      one.samples.push({ at: now, waiting: model.waiting, reads: model.gigabytes_per_s });
      one.samples = one.samples.filter((sample) => now - sample.at <= SPAN_S);
      one.compiles = one.compiles.filter((compile) => now - compile.at <= SPAN_S);
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
    this.drawTimes("first", ends.map((end) => [now - end.at - end.s, 1000 * end.first_s]));
    const several = ends.filter((end) => end.tokens > 1);
    this.drawTimes("each", several.map((end) => [now - end.at - end.s, (1000 * (end.s - end.first_s)) / (end.tokens - 1)]));
    this.drawReads(one, now);
    this.drawSteps(one, recent, now);
    this.drawPages(one.latest.pages);
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
    lines("rate", [{ points: perSecond.map((tokens, ago) => [ago + 0.5, tokens]).reverse(), colour: "decode" }]);
    $("now-rate").textContent = String(perSecond[1]);
  }

  drawRows(one, recent, now) {
    const steps = recent.filter((record) => record.kind === "decode" || record.kind === "prefill");
    const rows = steps.map((step) => [now - step.at - step.s, step.rows]);
    const waiting = one.samples.map((sample) => [now - sample.at, sample.waiting]);
    lines("rows", [{ points: rows, colour: "decode", dots: true }, { points: waiting, colour: "preempt" }]);
    $("now-rows").textContent = `${one.latest.running} of ${one.latest.max_num_seqs} run, ${one.latest.waiting} wait`;
  }

  drawTimes(id, points) {
    lines(id, [{ points, colour: "prefill", dots: true }, ...percentileLines(points)], " ms");
    $(`now-${id}`).textContent = inWords(points.map((point) => point[1]));
  }

  drawReads(one, now) {
    const { gigabytes_per_s: rate, roofline_gigabytes_per_s: roofline } = one.latest;
    const reads = one.samples.map((sample) => [now - sample.at, sample.reads]);
    const limit = roofline ? [{ points: [[SPAN_S, roofline], [0, roofline]], colour: "soft" }] : [];
    lines("reads", [{ points: reads, colour: "decode" }, ...limit]);
    $("now-reads").textContent = roofline ? `${rate.toFixed(1)} of ${roofline.toFixed(1)}` : rate.toFixed(1);
  }

  drawSteps(one, recent, now) {
    const [context, width, height] = surface("steps");
    const x = (at) => width * (1 - (now - at) / STEPS_SPAN_S);
    const bar = (kind, at, seconds, top, tall) => {
      context.fillStyle = colour(kind);
      context.fillRect(Math.floor(x(at)), top, Math.max(1, Math.ceil((width * seconds) / STEPS_SPAN_S)), tall);
    };
    for (const record of recent) {
      if (now - record.at - record.s > STEPS_SPAN_S || record.kind === "end") continue;
      if (record.kind === "preempt") bar("preempt", record.at, 0, 0, height);
      else bar(record.kind, record.at, record.s, 22, height - 30);
    }
    for (const compile of one.compiles) bar("compile", compile.at - 1, 1, 4, 12);
    context.fillStyle = colour("soft");
    context.fillText(`${STEPS_SPAN_S} s ago`, 4, height - 2);
    context.fillText("now", width - 26, height - 2);
  }

  drawPages(groups) {
    const [context, width, height] = surface("pages");
    if (!groups || !Object.keys(groups).length) {
      context.fillStyle = colour("soft");
      context.fillText(groups ? "This engine's cache has no pages." : "not known yet", 8, 20);
      $("now-pages").textContent = "";
      return;
    }
    const holders = Object.values(groups).flatMap((pages) => pages.slice(1)); // page 0 is never used
    let side = 14;
    while (side > 2 && Math.ceil(holders.length / Math.floor(width / side)) * side > height) side -= 1;
    const perLine = Math.floor(width / side);
    for (const [place, count] of holders.entries()) {
      context.fillStyle = colour(count < 0 ? "kept" : count === 0 ? "fill" : count === 1 ? "decode" : "shared");
      context.fillRect((place % perLine) * side, Math.floor(place / perLine) * side, side - 1, side - 1);
    }
    const used = holders.filter((count) => count > 0).length;
    const shared = holders.filter((count) => count > 1).length;
    const kept = holders.filter((count) => count < 0).length;
    $("now-pages").textContent = `${used} used, ${shared} of them shared, ${kept} kept`;
  }
}
