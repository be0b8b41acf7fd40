// How turns of a conversation look, and the buttons below them.

import { button, copyButton } from "./copying.js";
import { showMarkdown } from "./markdown.js";

export function add(parent, kind, text = "", tag = "div") {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = text;
  parent.append(element);
  return element;
}

// A message of a person. `edited(text)` is called with the text that replaces it.
export class MessageView {
  constructor(parent, turn, edited) {
    this.box = add(parent, "message");
    this.turn = turn;
    this.edited = edited;
    this.text = add(this.box, "turn user", turn.content);
    this.foot = add(this.box, "foot right");
    this.edit = button("Edit", "Edit this message", () => this.open());
    this.edit.dataset.act = "";
    this.foot.append(copyButton(() => turn.content, "Copy this message"), this.edit);
  }

  open() {
    const form = add(this.box, "edit", "", "form");
    const field = add(form, "", "", "textarea");
    field.value = this.turn.content;
    field.rows = 3;
    field.setAttribute("aria-label", "Edited message");
    const close = () => {
      form.remove();
      this.text.hidden = this.foot.hidden = false;
    };
    const send = add(form, "main", "Send", "button");
    send.dataset.act = "";
    form.append(button("Cancel", "", () => {
      close();
      this.edit.focus();
    }));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (text && this.edited(text)) close();
    });
    this.text.hidden = this.foot.hidden = true;
    field.focus();
  }
}

// An answer. `retried()` is called when another one is wanted in its place.
export class AnswerView {
  constructor(parent, turn, retried) {
    this.turn = turn;
    this.box = add(parent, "answer");
    this.body = add(this.box, "turn assistant");
    this.parts = {};
    this.due = null;
    this.retry = button("Retry", "Ask for another answer", retried);
    this.retry.dataset.act = "";
    if (turn.reason) this.end();
  }

  part(kind) {
    return (this.parts[kind] ??= add(this.body, kind));
  }

  // Shows the turn soon: the longer the text takes to show, the less often it is shown while it grows.
  change() {
    this.due ??= setTimeout(() => {
      const began = performance.now();
      this.show();
      this.pause = 4 * (performance.now() - began);
      this.due = null;
    }, this.pause ?? 0);
  }

  show() {
    const { thought, content, calls } = this.turn;
    if (thought) this.part("thought").textContent = thought;
    if (content) showMarkdown(this.part("text"), content);
    for (const [place, call] of calls.entries()) {
      if (call) this.part(`call call-${place}`).textContent = `${call.function.name}(${call.function.arguments})`;
    }
    this.shown?.();
  }

  // Shows the whole turn, its facts and its buttons.
  end() {
    clearTimeout(this.due);
    this.show();
    const { reason, facts, error, content } = this.turn;
    if (error) add(this.box, "turn error", error);
    const foot = add(this.box, "foot");
    add(foot, "facts", [reason, ...facts].join(" · "), "span");
    if (content) foot.append(copyButton(() => this.turn.content, "Copy this answer"));
    foot.append(this.retry);
  }

  // Shows what the answer waits for until the returned function is called.
  wait(waitedFor) {
    const element = add(this.body, "waiting");
    element.setAttribute("aria-live", "off");
    const began = performance.now();
    const show = () => {
      const seconds = Math.round((performance.now() - began) / 1000);
      element.textContent = `waiting for the first token, ${seconds} s: ${waitedFor()}`;
    };
    show();
    const timer = setInterval(show, 1000);
    return () => {
      clearInterval(timer);
      element.remove();
    };
  }
}
