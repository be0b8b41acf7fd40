// What a person typed and a reload keeps: the API key and the unsent message until the tab is closed, and the system
// prompt and tools until they are changed.

const STORES = { key: "sessionStorage", message: "sessionStorage", system: "localStorage", tools: "localStorage" };
const $ = (id) => document.getElementById(id);

// A browser may forbid a page to keep anything; the page then works without.
export function attempt(what) {
  try {
    return what();
  } catch {
    return null;
  }
}

// Keeps the present text of a field.
export function keep(id) {
  const name = `enginebay.${id}`;
  attempt(() => ($(id).value ? window[STORES[id]].setItem(name, $(id).value) : window[STORES[id]].removeItem(name)));
}

// Fills the fields with what was kept, and keeps what is typed into them from now on.
export function restore() {
  for (const id of Object.keys(STORES)) {
    $(id).value ||= attempt(() => window[STORES[id]].getItem(`enginebay.${id}`)) ?? "";
    $(id).addEventListener("input", () => keep(id));
  }
  // A prompt that is in use is seen.
  if ($("system").value || $("tools").value) $("system").closest("details").open = true;
}
