// The text of a model as formatted text. It is hostile input: HTML in it is shown as text, what the parser makes of it is
// sanitised, and nothing is loaded from it.

import DOMPurify from "./vendor/purify.js";
import hljs from "./vendor/highlight.js";
import { Marked } from "./vendor/marked.js";
import { copyButton } from "./copying.js";

const MAX_HIGHLIGHTED = 20000; // characters of a block
const TAGS = ["p", "br", "hr", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong", "del", "a",
  "table", "thead", "tbody", "tr", "th", "td"];
// No `id` and no `name`: the text could then pass for a control of the page.
const RULES = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "class", "start"], ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true };

function escaped(text) {
  const element = document.createElement("p");
  element.textContent = text;
  return element.innerHTML.replaceAll('"', "&quot;");
}

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escaped(text.trim())}</p>` : escaped(text)),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    // The page has headings of its own above these.
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 3);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
  },
});

// Shows a block of code with its language, a button that copies it, and its words in colours.
function dress(code) {
  const language = code.className.match(/^language-([\w+#-]+)$/)?.[1] ?? "";
  const text = code.textContent.replace(/\n$/, "");
  code.removeAttribute("class");
  if (hljs.getLanguage(language) && text.length <= MAX_HIGHLIGHTED) {
    const coloured = hljs.highlight(text, { language, ignoreIllegals: true }).value;
    const words = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };
    code.replaceChildren(DOMPurify.sanitize(coloured, words));
  }
  code.className = "hljs";
  const block = document.createElement("div");
  const bar = document.createElement("div");
  const name = document.createElement("span");
  block.className = "code";
  bar.className = "bar";
  name.textContent = language || "text";
  bar.append(name, copyButton(() => text, "Copy the code"));
  const pre = code.parentElement;
  pre.tabIndex = 0; // so that the keyboard scrolls long lines
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
  pre.replaceWith(block);
  block.append(bar, pre);
}

// Shows a text of Markdown in an element.
export function showMarkdown(element, text) {
  const content = DOMPurify.sanitize(marked.parse(text), RULES);
  for (const one of content.querySelectorAll("[class]")) if (one.tagName !== "CODE") one.removeAttribute("class");
  for (const link of content.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  element.replaceChildren(content);
  for (const code of element.querySelectorAll("pre > code")) dress(code);
}
