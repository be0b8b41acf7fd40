// Buttons that copy a text.

const SHOWN_MS = 1500;

async function copy(text) {
  // Browsers have a clipboard only on pages of https and of this machine.
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  const isDone = document.execCommand("copy");
  field.remove();
  if (!isDone) throw new Error("the browser has no clipboard");
}

export function button(text, label, act) {
  const element = document.createElement("button");
  element.type = "button";
  element.textContent = text;
  if (label) element.setAttribute("aria-label", label);
  element.addEventListener("click", act);
  return element;
}

// A button that copies what `text()` returns, and says that it did.
export function copyButton(text, label) {
  const element = button("Copy", label, async () => {
    const said = await copy(text()).then(() => "Copied", () => "Not copied");
    element.textContent = said;
    element.setAttribute("aria-label", said);
    element.focus();
    setTimeout(() => {
      element.textContent = "Copy";
      element.setAttribute("aria-label", label);
    }, SHOWN_MS);
  });
  return element;
}
