// A conversation with one model, or with two side by side. Answers stream.

import { keep } from "./kept.js";

const $ = (id) => document.getElementById(id);

// Reads the data of server-sent events from a response, one by one.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

// When the tokens of an answer came. Its figures mean what they mean in the command line's chat: tokens per second are
// those after the first token, which the time to the first token leaves out.
export class Times {
  constructor() {
    this.began = performance.now();
    this.tokens = 0;
    this.first = null; // when the first tokens came, and how many
    this.last = null;
  }

  // Takes the usage of an event, which counts all tokens so far. `isChoice`: the event is part of the answer.
  add(usage, isChoice) {
    if (!usage?.completion_tokens) return;
    this.tokens = usage.completion_tokens;
    if (!isChoice) return;
    this.last = performance.now();
    this.first ??= { at: this.last, tokens: this.tokens };
  }

  facts() {
    if (!this.first) return [];
    const facts = [`${this.tokens} tokens`];
    const seconds = (this.last - this.first.at) / 1000;
    const after = this.tokens - this.first.tokens;
    if (after > 0 && seconds > 0) facts.push(`${(after / seconds).toFixed(1)} tokens/s`);
    return [...facts, `first token after ${((this.first.at - this.began) / 1000).toFixed(2)} s`];
  }
}

function add(parent, kind, text = "") {
  const element = document.createElement("div");
  element.className = kind;
  element.textContent = text;
  parent.append(element);
  return element;
}

// One column: a conversation, whose next answer comes from `model`.
class Pane {
  // `origin`: the column whose conversation this one continues, if any.
  constructor(model, parent, origin) {
    this.messages = structuredClone(origin?.messages ?? []);
    this.box = add(parent, "pane");
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "log");
    this.title = document.createElement("h3");
    this.box.append(this.title, ...[...(origin?.box.children ?? [])].slice(1).map((turn) => turn.cloneNode(true)));
    this.use(model);
  }

  // Answers come from this model from now on.
  use(model) {
    this.model = model;
    this.title.textContent = model;
    this.box.setAttribute("aria-label", `Conversation with ${model}`);
  }

  // Shows what the answer waits for until the returned function is called.
  wait(turn, began, waitedFor) {
    const element = add(turn, "waiting");
    element.setAttribute("aria-live", "off");
    const show = () => {
      const seconds = Math.round((performance.now() - began) / 1000);
      element.textContent = `waiting for the first token, ${seconds} s: ${waitedFor(this.model)}`;
    };
    show();
    const timer = setInterval(show, 1000);
    return () => {
      clearInterval(timer);
      element.remove();
    };
  }

  // Returns whether the model answered, or was stopped while it did.
  async ask(text, options, headers, signal, waitedFor) {
    add(this.box, "turn user", text);
    this.messages.push({ role: "user", content: text });
    const turn = add(this.box, "turn assistant");
    const answer = { role: "assistant", content: "" };
    const calls = [];
    const parts = {};
    const part = (kind) => (parts[kind] ??= add(turn, kind));
    const times = new Times();
    const endWait = this.wait(turn, times.began, waitedFor);
    this.box.scrollTop = this.box.scrollHeight;
    let reason = "";
    try {
      const system = $("system").value.trim();
      const messages = system ? [{ role: "system", content: system }, ...this.messages] : this.messages;
      const stream_options = { include_usage: true, continuous_usage_stats: true };
      const response = await fetch("../v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json", ...headers },
        body: JSON.stringify({ model: this.model, messages, stream: true, stream_options, ...options }),
        signal,
      });
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const event of eventsOf(response)) {
        if (event.error) throw new Error(event.error.message);
        const choice = event.choices?.[0];
        times.add(event.usage, Boolean(choice));
        if (times.tokens) endWait();
        if (!choice) continue;
        reason = choice.finish_reason ?? reason;
        const { content, reasoning_content: thought, tool_calls: called } = choice.delta;
        if (thought) part("thought").textContent += thought;
        if (content) {
          answer.content += content;
          part("text").textContent += content;
        }
        for (const call of called ?? []) {
          calls[call.index] ??= { id: call.id, type: "function", function: { name: "", arguments: "" } };
          calls[call.index].function.name += call.function?.name ?? "";
          calls[call.index].function.arguments += call.function?.arguments ?? "";
          part(`call call-${call.index}`).textContent = `${calls[call.index].function.name}(${calls[call.index].function.arguments})`;
        }
        this.box.scrollTop = this.box.scrollHeight;
      }
    } catch (error) {
      if (error.name !== "AbortError") add(this.box, "turn error", error.message);
      reason = error.name === "AbortError" ? "stopped" : "error";
    }
    endWait();
    if (calls.length) answer.tool_calls = calls.filter(Boolean);
    if (reason !== "error") this.messages.push(answer);
    else this.messages.pop();
    add(this.box, "facts", [reason, ...times.facts()].join(" · "));
    this.box.scrollTop = this.box.scrollHeight;
    return reason !== "error";
  }
}

export class Chat {
  // `waitedFor(model)` says what an answer without a token waits for, and `state()` the state of the server.
  constructor(headers, waitedFor, state) {
    this.headers = headers;
    this.waitedFor = waitedFor;
    this.state = state;
    this.panes = [];
    this.abort = null;
    $("send").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    $("stop").addEventListener("click", () => this.abort?.abort());
    $("clear").addEventListener("click", () => this.clear());
  }

  clear() {
    this.abort?.abort();
    this.panes = [];
    $("panes").replaceChildren();
    $("note").textContent = "";
    $("message").focus();
  }

  options() {
    const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
    const options = {
      temperature: number("temperature"),
      top_p: number("top_p"),
      max_tokens: number("max_tokens"),
      seed: number("seed"),
    };
    const tools = $("tools").value.trim();
    if (tools) {
      options.tools = JSON.parse(tools);
      options.tool_choice = $("tool_choice").value || undefined;
    }
    return options;
  }

  // A column for each chosen model. A column keeps its conversation when another model is chosen for it, and a second
  // column begins with the conversation of the first.
  arrange(models) {
    for (const pane of this.panes.splice(models.length)) pane.box.remove();
    for (const [place, model] of models.entries()) {
      if (this.panes[place]) this.panes[place].use(model);
      else this.panes.push(new Pane(model, $("panes"), this.panes[0]));
    }
  }

  // Sends the message. Its text stays in the field, or returns to it, when no model answers it.
  async send() {
    const text = $("message").value.trim();
    if (!text || this.abort) return;
    const models = [$("model").value, $("other").value].filter(Boolean);
    $("note").textContent = "";
    if (!models.length) {
      $("note").textContent = `Not sent: no model is known yet (${this.state()}).`;
      return;
    }
    let options;
    try {
      options = this.options();
    } catch (error) {
      $("note").textContent = `The tools are not JSON: ${error.message}`;
      return;
    }
    this.arrange(models);
    this.write("");
    this.abort = new AbortController();
    const { signal } = this.abort;
    $("go").disabled = true;
    $("stop").disabled = false;
    const answered = await Promise.all(
      this.panes.map((pane) => pane.ask(text, options, this.headers(), signal, this.waitedFor)),
    );
    if (!answered.includes(true) && !$("message").value) this.write(text);
    this.abort = null;
    $("go").disabled = false;
    $("stop").disabled = true;
  }

  write(text) {
    $("message").value = text;
    keep("message");
  }
}
