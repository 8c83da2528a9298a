// Markdown as elements. What did not change keeps its elements, so that growing answers do not flicker or lose a selection.

import { el } from "./dom.js";
import { parse } from "./markdown.js";

const shown = new WeakMap();

/** Let an element show a text. */
export function showProse(container, text) {
  const before = shown.get(container) ?? { text: "", keys: [] };
  if (text === before.text) return;
  const blocks = parse(text);
  const keys = blocks.map((block) => JSON.stringify(block));
  let same = 0;
  while (same < keys.length && keys[same] === before.keys[same]) same++;
  while (container.children.length > same) container.lastElementChild.remove();
  for (const block of blocks.slice(same)) container.append(blockElement(block));
  shown.set(container, { text, keys });
}

function blockElement(block) {
  switch (block.type) {
    case "code":
      return codeElement(block);
    case "heading":
      // The page has the first two levels.
      return el(`h${Math.min(6, block.level + 2)}`, {}, pieces(block.inline));
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", { dir: "auto" }, block.blocks.map(blockElement));
    case "list":
      return listElement(block);
    case "table":
      return tableElement(block);
    default:
      return el("p", {}, pieces(block.inline));
  }
}

function codeElement({ language, text }) {
  const copy = navigator.clipboard && el("button", { type: "button", class: "quiet copy" }, "Copy");
  copy?.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed";
    }
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const head = el("figcaption", {}, el("span", {}, language || "code"), copy);
  return el("figure", { class: "code" }, head, el("pre", { tabindex: "0", dir: "ltr" }, el("code", {}, text)));
}

function listElement({ ordered, start, items }) {
  const entries = items.map((blocks) => {
    // One paragraph, maybe with a list behind it, is written without the space of paragraphs.
    const [first, ...rest] = blocks;
    if (first?.type !== "paragraph" || rest.some((block) => block.type === "paragraph")) {
      return el("li", {}, blocks.map(blockElement));
    }
    return el("li", {}, pieces(first.inline), rest.map(blockElement));
  });
  return el(ordered ? "ol" : "ul", { dir: "auto", start: ordered && start !== 1 ? start : null }, entries);
}

function tableElement({ head, rows }) {
  const row = (cells, tag) => el("tr", {}, cells.map((cell) => el(tag, {}, pieces(cell))));
  const table = el("table", { dir: "auto" }, el("thead", {}, row(head, "th")), el("tbody", {}, rows.map((cells) => row(cells, "td"))));
  return el("div", { class: "wide", tabindex: "0" }, table);
}

function pieces(inline) {
  return inline.map((piece) => {
    switch (piece.type) {
      case "code":
        return el("code", {}, piece.text);
      case "strong":
        return el("strong", {}, pieces(piece.inline));
      case "emphasis":
        return el("em", {}, pieces(piece.inline));
      case "link": {
        const attributes = { href: piece.address, title: piece.address, target: "_blank", rel: "noopener noreferrer nofollow" };
        return el("a", attributes, pieces(piece.inline));
      }
      default:
        return piece.text;
    }
  });
}
