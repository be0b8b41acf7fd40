// A conversation with one model, or with two side by side. Answers stream.

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

function add(parent, kind, text = "") {
  const element = document.createElement("div");
  element.className = kind;
  element.textContent = text;
  parent.append(element);
  return element;
}

// One column: the messages of a model's conversation.
class Pane {
  constructor(model, parent) {
    this.model = model;
    this.messages = [];
    this.box = add(parent, "pane");
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "log");
    this.box.setAttribute("aria-label", `Conversation with ${model}`);
    const title = document.createElement("h3");
    title.textContent = model;
    this.box.append(title);
  }

  async ask(text, options, headers, signal) {
    add(this.box, "turn user", text);
    this.messages.push({ role: "user", content: text });
    const turn = add(this.box, "turn assistant");
    const answer = { role: "assistant", content: "" };
    const calls = [];
    const parts = {};
    const part = (kind) => (parts[kind] ??= add(turn, kind));
    const began = performance.now();
    let first = null;
    let usage = null;
    let reason = "";
    try {
      const system = $("system").value.trim();
      const messages = system ? [{ role: "system", content: system }, ...this.messages] : this.messages;
      const body = { model: this.model, messages, stream: true, stream_options: { include_usage: true }, ...options };
      const response = await fetch("../v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json", ...headers },
        body: JSON.stringify(body),
        signal,
      });
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const event of eventsOf(response)) {
        if (event.error) throw new Error(event.error.message);
        usage = event.usage ?? usage;
        const choice = event.choices?.[0];
        if (!choice) continue;
        reason = choice.finish_reason ?? reason;
        const { content, reasoning_content: thought, tool_calls: called } = choice.delta;
        if (content || thought || called) first ??= performance.now();
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
    if (calls.length) answer.tool_calls = calls.filter(Boolean);
    if (reason !== "error") this.messages.push(answer);
    else this.messages.pop();
    const seconds = (performance.now() - began) / 1000;
    const facts = [reason];
    if (usage) facts.push(`${usage.completion_tokens} tokens`, `${(usage.completion_tokens / seconds).toFixed(1)} tokens/s`);
    if (first !== null) facts.push(`first after ${Math.round(first - began)} ms`);
    add(this.box, "facts", facts.join(" · "));
    this.box.scrollTop = this.box.scrollHeight;
  }
}

export class Chat {
  constructor(headers) {
    this.headers = headers;
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

  async send() {
    const text = $("message").value.trim();
    if (!text || this.abort) return;
    const models = [$("model").value, $("other").value].filter(Boolean);
    if (this.panes.map((pane) => pane.model).join("\n") !== models.join("\n")) {
      $("panes").replaceChildren();
      this.panes = models.map((model) => new Pane(model, $("panes")));
    }
    let options;
    try {
      options = this.options();
    } catch (error) {
      add(this.panes[0].box, "turn error", `The tools are not JSON: ${error.message}`);
      return;
    }
    $("message").value = "";
    this.abort = new AbortController();
    $("go").disabled = true;
    $("stop").disabled = false;
    await Promise.all(this.panes.map((pane) => pane.ask(text, options, this.headers(), this.abort.signal)));
    this.abort = null;
    $("go").disabled = false;
    $("stop").disabled = true;
  }
}
