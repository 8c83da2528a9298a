// Elements without HTML strings: text is only ever text.

/**
 * An element; `on...` attributes are listeners, null and false ones are left out. Children may come in lists, which may be
 * longer than what a function takes as arguments.
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  // Before the attributes: with dir="auto" a browser would look through all children at each new one.
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  return node;
}

/** The element of the page with this id. */
export const byId = (id) => document.getElementById(id);

/** Set an element's text, and touch nothing if it is that already. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Make a text area as high as its text. */
export function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}

/** A text area that grows, and whose Enter calls `done`, Escape `cancel`; Shift+Enter begins a line. */
export function growing(attributes, { done, cancel = null }) {
  const area = el("textarea", { rows: 1, ...attributes });
  area.addEventListener("input", () => fit(area));
  area.addEventListener("keydown", (event) => {
    if (isEnter(event)) {
      event.preventDefault();
      done();
    } else if (cancel && event.key === "Escape") {
      event.preventDefault();
      event.stopPropagation();
      cancel();
    }
  });
  return area;
}

const touch = globalThis.matchMedia?.("(hover: none) and (pointer: coarse)");

/**
 * Whether a key is an Enter that sends. In the middle of composing a character it is not, nor on a keyboard on the
 * screen, where there is no Shift+Enter.
 */
export const isEnter = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch?.matches;

const numbers = new Intl.NumberFormat("en");

/** 12345 -> "12,345" */
export const count = (value) => numbers.format(value);

/** "1 token", "2 tokens" */
export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

/** Seconds for people: "0.35 s", "12.3 s", "2 min 5 s" */
export function seconds(value) {
  if (value < 1) return `${value.toFixed(2)} s`;
  if (value < 60) return `${value.toFixed(1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

/** Bytes for people: "1.2 MB" */
export function bytes(value) {
  for (const unit of ["B", "kB", "MB"]) {
    if (value < 1000) return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} GB`;
}
