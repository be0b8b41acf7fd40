// A conversation with one model, or with two side by side. Answers stream.

import { History } from "./history.js";
import { keep } from "./kept.js";
import { fill, messagesOf, newAnswer } from "./stream.js";
import { AnswerView, MessageView, add } from "./turns.js";

const $ = (id) => document.getElementById(id);

// One column: a conversation, whose next answer comes from `model`.
class Pane {
  // `chat` is asked to edit a message and to retry an answer; `turns` are those that the column begins with.
  constructor(model, chat, turns = []) {
    this.chat = chat;
    this.turns = [];
    this.views = [];
    this.box = add($("panes"), "pane");
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "log");
    this.title = add(this.box, "", "", "h3");
    this.use(model);
    for (const turn of turns) this.view(structuredClone(turn));
    this.settle();
  }

  // Answers come from this model from now on.
  use(model) {
    this.model = model;
    this.title.textContent = model;
    this.box.setAttribute("aria-label", `Conversation with ${model}`);
  }

  view(turn) {
    const place = this.turns.push(turn) - 1;
    const made = turn.role === "user"
      ? new MessageView(this.box, turn, (text) => this.chat.edit(place, text))
      : new AnswerView(this.box, turn, () => this.chat.retry(this));
    this.views.push(made);
    return made;
  }

  // Only the last answer can be asked for again.
  settle() {
    for (const [place, view] of this.views.entries()) if (view.retry) view.retry.hidden = place < this.views.length - 1;
  }

  // Forgets the turns from a place on.
  cut(place) {
    this.turns.splice(place);
    for (const view of this.views.splice(place)) view.box.remove();
  }

  // Returns whether the model answered the last message, or was stopped while it did.
  async answer(options, headers, signal, waitedFor) {
    const system = $("system").value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...messagesOf(this.turns)];
    const turn = newAnswer();
    const view = this.view(turn);
    this.settle();
    this.box.setAttribute("aria-busy", "true"); // a screen reader waits for the whole answer
    const endWait = view.wait(() => waitedFor(this.model));
    this.follow();
    view.shown = () => this.isFollowed && this.follow();
    await fill(turn, { model: this.model, messages, ...options }, headers, signal, (tokens) => {
      this.isFollowed = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 60;
      if (tokens) endWait();
      view.change();
    });
    endWait();
    view.end();
    this.box.removeAttribute("aria-busy");
    if (this.isFollowed) this.follow();
    return turn.reason !== "error";
  }

  follow() {
    this.isFollowed = true;
    this.box.scrollTop = this.box.scrollHeight;
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
    const chosen = (panes) => {
      this.open(panes);
      $("message").focus();
    };
    this.history = new History(chosen, () => this.leave());
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
    $("clear").addEventListener("click", () => {
      this.leave();
      this.history.begin();
      chosen([]);
    });
    window.addEventListener("pagehide", () => this.save());
    this.open(this.history.current());
  }

  // Shows a conversation of the browser's storage, or none.
  open(panes) {
    this.abort?.abort();
    $("panes").replaceChildren();
    $("note").textContent = "";
    this.panes = panes.map(({ model, turns }) => new Pane(model, this, turns));
    for (const pane of this.panes) pane.follow();
  }

  // Keeps the conversation. An answer that still comes is kept as if it were stopped.
  save() {
    const kept = (turn) => (turn.reason === "" ? { ...turn, reason: "stopped" } : turn);
    this.history.save(this.panes.map(({ model, turns }) => ({ model, turns: turns.map(kept) })));
  }

  // Ends what runs, before another conversation is shown.
  leave() {
    this.save();
    this.abort?.abort();
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

  // The chosen models and options; null, with a note that says why, when nothing can be sent.
  choices() {
    const models = [$("model").value, $("other").value].filter(Boolean);
    $("note").textContent = "";
    if (!models.length) {
      $("note").textContent = `Not sent: no model is known yet (${this.state()}).`;
      return null;
    }
    try {
      return { models, options: this.options() };
    } catch (error) {
      $("note").textContent = `The tools are not JSON: ${error.message}`;
      return null;
    }
  }

  // A column for each chosen model. A column keeps its conversation when another model is chosen for it, and a second
  // column begins with the conversation of the first.
  arrange(models) {
    for (const pane of this.panes.splice(models.length)) pane.box.remove();
    for (const [place, model] of models.entries()) {
      if (this.panes[place]) this.panes[place].use(model);
      else this.panes.push(new Pane(model, this, this.panes[0]?.turns));
    }
  }

  // Sends the message. Its text stays in the field, or returns to it, when no model answers it.
  async send() {
    const text = $("message").value.trim();
    if (!text || this.abort) return;
    const chosen = this.choices();
    if (!chosen) return;
    this.write("");
    const answered = await this.say(text, chosen);
    if (!answered && !$("message").value) this.write(text);
  }

  // Puts another text in the place of a message, in every column; what followed it is forgotten. Returns whether it does.
  edit(place, text) {
    const chosen = this.abort ? null : this.choices();
    if (!chosen) return false;
    for (const pane of this.panes) pane.cut(place);
    this.say(text, chosen);
    $("message").focus();
    return true;
  }

  async say(text, { models, options }) {
    this.arrange(models);
    for (const pane of this.panes) pane.view({ role: "user", content: text });
    return this.answers(this.panes, options);
  }

  // Asks one column for another answer, in the place of its last one.
  async retry(pane) {
    const chosen = this.abort ? null : this.choices();
    if (!chosen) return;
    const models = chosen.models[this.panes.indexOf(pane)];
    if (models) pane.use(models);
    const message = pane.turns.at(-2).content;
    pane.cut(pane.turns.length - 1);
    $("message").focus();
    if (await this.answers([pane], chosen.options)) {
      if ($("message").value === message) this.write(""); // it came back when the first answer failed
    }
  }

  // Lets columns answer their last message; returns whether one of them did.
  async answers(panes, options) {
    const abort = (this.abort = new AbortController());
    this.setBusy(true);
    this.save();
    const answered = await Promise.all(
      panes.map((pane) => pane.answer(options, this.headers(), abort.signal, this.waitedFor)),
    );
    this.abort = null;
    this.setBusy(false);
    if (panes.every((pane) => this.panes.includes(pane))) this.save(); // else another conversation was opened
    return answered.includes(true);
  }

  setBusy(isBusy) {
    $("go").disabled = isBusy;
    $("stop").disabled = !isBusy;
    $("panes").classList.toggle("busy", isBusy);
  }

  write(text) {
    $("message").value = text;
    keep("message");
  }
}
