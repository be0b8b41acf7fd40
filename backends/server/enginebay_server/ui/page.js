// The page: views, the API key, the models, and the figures that are read once a second.

import { Chat } from "./chat.js";
import { restore } from "./kept.js";
import { Plots } from "./plots.js";

const PERIOD_MS = 1000;
const $ = (id) => document.getElementById(id);
const key = () => $("key").value;
const headers = () => (key() ? { Authorization: `Bearer ${key()}` } : {});

restore();
const plots = new Plots();
let next = [];
let known = "";
let latest = { ready: false, queued: 0, models: [] };
new Chat(headers, waitedFor, () => $("state").textContent);

function fill(select, names, keep = []) {
  const chosen = select.value;
  select.replaceChildren(...[...keep, ...names.map((name) => [name, name])].map(([value, text]) => new Option(text, value)));
  if ([...select.options].some((option) => option.value === chosen)) select.value = chosen;
}

async function refresh() {
  let answer;
  try {
    answer = await fetch(`data?since=${next.join(",")}`, { headers: headers() });
  } catch {
    $("state").textContent = "the server does not answer";
    return;
  }
  if (answer.status === 401) {
    $("state").textContent = "this server needs an API key";
    return;
  }
  if (!answer.ok) {
    $("state").textContent = `the server answers ${answer.status}`;
    return;
  }
  latest = await answer.json();
  const { models } = latest;
  for (const model of models) {
    model.label = model.replica === undefined ? model.name : `${model.name}, replica ${model.replica}`;
  }
  const labels = models.map((model) => model.label);
  if (labels.join("\n") !== known) {
    known = labels.join("\n");
    const names = [...new Set(models.map((model) => model.name))];
    fill($("model"), names);
    fill($("other"), names, [["", "nothing"]]);
    fill($("watched"), labels);
    explain();
  }
  next = models.map((model) => model.next);
  setText("state", headline(latest));
  plots.add(models);
  if (!$("live").hidden) plots.draw($("watched").value);
}

// Sets a text that is read out when it changes, only when it changes.
function setText(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const requests = (count) => `${count} ${count === 1 ? "request" : "requests"}`;

function headline({ ready, queued, models }) {
  const starting = models.find((model) => model.status.warmup === "compiling");
  if (!ready && starting) return `compiling ${starting.status.compiled} of ${starting.status.programs || "?"} programs`;
  if (!ready) return "not ready";
  const waiting = queued + sum(models.map((model) => model.waiting));
  const wait = waiting ? `; ${requests(waiting)} ${waiting === 1 ? "waits" : "wait"}` : "";
  const compiling = models.filter((model) => model.compiling_s !== null).map((model) => model.label);
  if (compiling.length) return `compiling a program: ${compiling.join(", ")}${wait}`;
  const coming = sum(models.map((model) => model.coming.length));
  const come = coming ? `; ${coming} ${coming === 1 ? "program is" : "programs are"} still to compile` : "";
  return `ready: ${models.map((model) => `${model.label} on ${model.engine || "no engine"}`).join(", ")}${come}${wait}`;
}

// What an answer of a model that has no token yet waits for.
function waitedFor(name) {
  const models = latest.models.filter((model) => model.name === name);
  const compiling = models.map((model) => model.compiling_s).filter((seconds) => seconds !== null);
  if (compiling.length) return `the server has been compiling a program for ${Math.round(Math.max(...compiling))} s`;
  const waiting = sum(models.map((model) => model.waiting));
  const places = latest.queued ? `, ${requests(latest.queued)} queued` : "";
  return `${requests(sum(models.map((model) => model.running)))} running, ${waiting} waiting${places}`;
}

async function explain() {
  const answer = await fetch("../explain", { headers: headers() });
  if (!answer.ok) return;
  const tables = [];
  for (const [name, record] of Object.entries(await answer.json())) {
    const title = document.createElement("h3");
    title.textContent = `${name}, family ${record.family}`;
    const table = document.createElement("table");
    table.append(row("th", ["setting", "chosen", "why", "refused"]));
    for (const { setting, chosen, why, refused } of record.choices) {
      const others = refused.map((one) => `${one.name}: ${one.reason}`).join("; ");
      table.append(row("td", [setting, chosen, why, others]));
    }
    tables.push(title, table);
  }
  $("explained").replaceChildren(...tables);
}

function row(kind, texts) {
  const line = document.createElement("tr");
  for (const text of texts) {
    const cell = document.createElement(kind);
    if (kind === "th") cell.scope = "col";
    cell.textContent = text;
    line.append(cell);
  }
  return line;
}

// What a small window folds, a large one shows.
const wide = matchMedia("(min-width: 900px)");
const unfold = () => {
  for (const id of ["past", "numbers"]) $(id).open = wide.matches;
};
wide.addEventListener("change", unfold);
unfold();

// Tabs: arrows move between them, as the pattern of ARIA has it.
const tabs = [...document.querySelectorAll("[role=tab]")];
function show(tab) {
  for (const one of tabs) {
    const isShown = one === tab;
    one.setAttribute("aria-selected", String(isShown));
    one.tabIndex = isShown ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = !isShown;
  }
  tab.focus();
  if (tab.id === "tab-live") plots.draw($("watched").value);
}
for (const [place, tab] of tabs.entries()) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) show(tabs[(place + step + tabs.length) % tabs.length]);
  });
}
$("watched").addEventListener("change", () => plots.draw($("watched").value));
$("key").addEventListener("change", refresh);

async function run() {
  for (;;) {
    if (!document.hidden) await refresh().catch((error) => console.error(error));
    await new Promise((done) => setTimeout(done, PERIOD_MS));
  }
}
run();
