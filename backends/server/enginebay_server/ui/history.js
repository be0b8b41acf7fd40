// The conversations that this browser keeps. The server keeps none.

import { button } from "./copying.js";
import { attempt } from "./kept.js";

const CHATS = "enginebay.chats"; // of all tabs
const CHAT = "enginebay.chat"; // the one that this tab shows
const MAX_CHATS = 50;
const MAX_TITLE = 60;
const $ = (id) => document.getElementById(id);

function read() {
  const chats = attempt(() => JSON.parse(localStorage.getItem(CHATS)));
  return Array.isArray(chats) ? chats : [];
}

// Keeps the newest conversations that there is room for.
function write(chats) {
  for (let kept = chats.slice(0, MAX_CHATS); ; kept = kept.slice(0, -1)) {
    const isDone = attempt(() => {
      if (kept.length) localStorage.setItem(CHATS, JSON.stringify(kept));
      else localStorage.removeItem(CHATS);
      return true;
    });
    if (isDone || !kept.length) return;
  }
}

export class History {
  // `open(panes)` shows a conversation that a person chose; `leave()` is called before it is chosen.
  constructor(open, leave) {
    this.open = open;
    this.leave = leave;
    this.kept = ""; // what was last read or written of the shown one, as JSON
    this.id = attempt(() => sessionStorage.getItem(CHAT)) ?? this.begin();
    $("forget").addEventListener("click", () => {
      write([]);
      this.begin();
      this.open([]);
      this.list();
    });
    window.addEventListener("storage", () => this.list()); // another tab has written
    this.list();
  }

  // Begins a conversation, which is kept once it has a message.
  begin() {
    this.show(crypto.getRandomValues(new Uint32Array(2)).join("-"));
    return this.id;
  }

  show(id) {
    this.id = id;
    this.kept = "";
    attempt(() => sessionStorage.setItem(CHAT, id));
    this.list();
  }

  current() {
    const panes = read().find((chat) => chat.id === this.id)?.panes ?? [];
    this.kept = JSON.stringify(panes);
    return panes;
  }

  // Writes a conversation that has changed: another one may have been deleted in another tab.
  save(panes) {
    const text = JSON.stringify(panes);
    if (!panes[0]?.turns.length || text === this.kept) return;
    this.kept = text;
    const title = panes[0].turns[0].content.slice(0, MAX_TITLE);
    write([{ id: this.id, title, at: Date.now(), panes }, ...read().filter((chat) => chat.id !== this.id)]);
    this.list();
  }

  forget(id) {
    write(read().filter((chat) => chat.id !== id));
    if (id === this.id) {
      this.begin();
      this.open([]);
    } else this.list();
    $("clear").focus();
  }

  list() {
    const chats = read();
    $("nothing-kept").hidden = chats.length > 0;
    $("forget").hidden = !chats.length;
    $("kept").replaceChildren(...chats.map(({ id, title, at, panes }) => {
      const line = document.createElement("li");
      const chosen = button(title, "", () => {
        this.leave();
        this.show(id);
        this.open(this.current());
      });
      chosen.title = `${new Date(at).toLocaleString()}, ${panes.map((pane) => pane.model).join(" and ")}`;
      if (id === this.id) chosen.setAttribute("aria-current", "true");
      line.append(chosen, button("×", `Delete the conversation "${title}"`, () => this.forget(id)));
      return line;
    }));
  }
}
