// An answer of the server, as it comes.

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

// The turn of an answer that has not begun. A turn has only what JSON has, so that the browser can keep it.
export const newAnswer = () => ({ role: "assistant", content: "", thought: "", calls: [], reason: "", facts: [], error: "" });

// Asks for an answer and fills its turn, calling `changed(tokens)` after each event. Ends with a reason in any case.
export async function fill(turn, body, headers, signal, changed) {
  const times = new Times();
  try {
    const stream_options = { include_usage: true, continuous_usage_stats: true };
    const response = await fetch("../v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers },
      body: JSON.stringify({ ...body, stream: true, stream_options }),
      signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices?.[0];
      times.add(event.usage, Boolean(choice));
      if (choice) take(turn, choice);
      changed(times.tokens);
    }
  } catch (error) {
    turn.reason = error.name === "AbortError" ? "stopped" : "error";
    if (turn.reason === "error") turn.error = error.message;
  }
  turn.facts = times.facts();
}

function take(turn, { delta, finish_reason: reason }) {
  turn.reason = reason ?? turn.reason;
  turn.thought += delta.reasoning_content ?? "";
  turn.content += delta.content ?? "";
  for (const { index, id, function: part } of delta.tool_calls ?? []) {
    turn.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    turn.calls[index].function.name += part?.name ?? "";
    turn.calls[index].function.arguments += part?.arguments ?? "";
  }
}

// The messages that a request sends of some turns: a message that got no answer, and the error, are left out.
export function messagesOf(turns) {
  const messages = [];
  for (const { role, content, calls, reason } of turns) {
    if (reason === "error") messages.pop();
    else messages.push({ role, content, ...(calls?.length ? { tool_calls: calls.filter(Boolean) } : {}) });
  }
  return messages;
}
