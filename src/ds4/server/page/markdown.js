// A small part of Markdown as data. It never fails, takes time in proportion to the text, and knows no HTML.

const DEEPEST = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])([ \t]+|$)(.*)$/;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const LONGEST_LABEL = 1000;
const LONGEST_LINK = 2000;

/** The blocks of a text: code, heading, rule, quote, list, table, paragraph. */
export function parse(text, depth = 0) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) blocks.push({ type: "paragraph", inline: inline(paragraph.join("\n")) });
    paragraph = [];
  };
  for (let at = 0; at < lines.length; ) {
    const found = block(lines, at, depth, paragraph.length > 0);
    if (found) {
      flush();
      if (found.block) blocks.push(found.block);
      at = found.next;
    } else {
      paragraph.push(lines[at++].trim());
    }
  }
  flush();
  return blocks;
}

/** The block that begins at a line, and the line behind it; null if that is text of a paragraph. */
function block(lines, at, depth, inParagraph) {
  const line = lines[at];
  if (!line.trim()) return { next: at + 1 };
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = heading[2].trim();
    return { block: { type: "heading", level: heading[1].length, inline: inline(text) }, next: at + 1 };
  }
  if (isRule(line)) return { block: { type: "rule" }, next: at + 1 };
  if (depth < DEEPEST && line.trimStart().startsWith(">")) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line) && !(inParagraph && ITEM.exec(line)[4] === "")) return list(lines, at, depth);
  if (line.includes("|") && at + 1 < lines.length && isDelimiter(lines[at + 1], cells(line).length)) return table(lines, at);
  return null;
}

function code(lines, at, [, mark, info]) {
  const body = [];
  let next = at + 1;
  for (; next < lines.length; next++) {
    const line = lines[next].trim();
    if (line.length >= mark.length && [...line].every((letter) => letter === mark[0])) {
      next++;
      break;
    }
    body.push(lines[next]);
  }
  return { block: { type: "code", language: info.trim().split(/\s/)[0].slice(0, 40), text: body.join("\n") }, next };
}

function isRule(line) {
  const marks = line.replace(/[ \t]/g, "");
  return marks.length >= 3 && "-*_".includes(marks[0]) && [...marks].every((letter) => letter === marks[0]);
}

function quote(lines, at, depth) {
  const inner = [];
  let next = at;
  for (; next < lines.length && lines[next].trimStart().startsWith(">"); next++) {
    inner.push(lines[next].trimStart().slice(1).replace(/^ /, ""));
  }
  return { block: { type: "quote", blocks: parse(inner.join("\n"), depth + 1) }, next };
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first[2]);
  const items = [];
  let next = at;
  while (next < lines.length) {
    const line = lines[next];
    const item = ITEM.exec(line);
    const outer = width(first[1]);
    if (item && width(item[1]) <= outer + 1 && !isRule(line)) {
      if (/\d/.test(item[2]) !== ordered || width(item[1]) < outer) break;
      items.push([item[4]]);
    } else if (line.trim() && width(/^[ \t]*/.exec(line)[0]) > outer) {
      items.at(-1).push(line);
    } else if (!line.trim() && continues(lines, next, outer)) {
      items.at(-1).push("");
    } else if (line.trim() && lines[next - 1].trim() && !block(lines, next, DEEPEST, true)) {
      items.at(-1).push(line);
    } else {
      break;
    }
    next++;
  }
  const blocks = items.map(([head, ...rest]) => parse([head, ...dedent(rest)].join("\n"), depth + 1));
  return { block: { type: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1, items: blocks }, next };
}

/** Whether a list goes on behind an empty line. */
function continues(lines, at, outer) {
  const line = lines[at + 1] ?? "";
  const item = ITEM.exec(line);
  return line.trim() !== "" && (width(/^[ \t]*/.exec(line)[0]) > outer || (item !== null && width(item[1]) === outer));
}

const width = (space) => [...space].reduce((sum, letter) => sum + (letter === "\t" ? 4 : 1), 0);

function dedent(lines) {
  const indents = lines.filter((line) => line.trim()).map((line) => /^ */.exec(line)[0].length);
  const least = indents.reduce((a, b) => Math.min(a, b), 1000);
  return lines.map((line) => line.slice(Math.min(least, /^ */.exec(line)[0].length)));
}

/** The cells of a line; behind a backslash a bar is text. */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function isDelimiter(line, columns) {
  const parts = cells(line);
  return line.includes("-") && parts.length === columns && parts.every((cell) => /^:?-+:?$/.test(cell));
}

function table(lines, at) {
  const head = cells(lines[at]);
  const rows = [];
  let next = at + 2;
  for (; next < lines.length && lines[next].includes("|"); next++) {
    const row = cells(lines[next]);
    // What is too much for the head is not lost.
    if (row.length > head.length) row.push(row.splice(head.length - 1).join(" | "));
    rows.push(head.map((_, column) => inline(row[column] ?? "")));
  }
  return { block: { type: "table", head: head.map((cell) => inline(cell)), rows }, next };
}

/** The pieces of a text: text, code, strong, emphasis, link. */
export function inline(text, depth = 0) {
  return new Inline(text, depth).pieces();
}

class Inline {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.at = 0;
    this.found = [];
    this.plain = "";
    // Closing marks that do not come any more need not be looked for again.
    this.missing = new Set();
    this.middle = -1;
  }

  pieces() {
    while (this.at < this.text.length) {
      const before = this.at;
      const piece = this.piece();
      if (piece) {
        this.flush();
        this.found.push(piece);
      } else if (this.at === before) {
        this.plain += this.text[this.at++];
      }
    }
    this.flush();
    return this.found;
  }

  flush() {
    if (this.plain) this.found.push({ type: "text", text: this.plain });
    this.plain = "";
  }

  /** The piece that begins here, which is passed then; null if there is none, or marks that turned out to be text. */
  piece() {
    const letter = this.text[this.at];
    if (letter === "\\" && /[!-/:-@[-`{-~]/.test(this.text[this.at + 1] ?? "")) {
      this.plain += this.text[this.at + 1];
      this.at += 2;
      return null;
    }
    if (letter === "`") return this.code();
    if (this.depth >= DEEPEST) return null;
    if (letter === "*" || letter === "_") return this.emphasis(letter);
    if (letter === "[" || (letter === "!" && this.text[this.at + 1] === "[")) return this.link();
    if (letter === "h" || letter === "<") return this.address();
    return null;
  }

  code() {
    let size = 1;
    while (this.text[this.at + size] === "`") size++;
    const start = this.at + size;
    const mark = "`".repeat(size);
    for (let end = start; !this.missing.has(mark) && (end = this.text.indexOf(mark, end)) >= 0; ) {
      let run = size;
      while (this.text[end + run] === "`") run++;
      if (run === size) {
        this.at = end + size;
        return { type: "code", text: unpadded(this.text.slice(start, end)) };
      }
      end += run;
    }
    this.missing.add(mark);
    this.plain += mark;
    this.at = start;
    return null;
  }

  emphasis(letter) {
    const mark = this.text[this.at + 1] === letter ? letter + letter : letter;
    const start = this.at + mark.length;
    const opens = /\S/.test(this.text[start] ?? "") && !(letter === "_" && isWord(this.text[this.at - 1]));
    if (opens && this.text[start] !== letter && !this.missing.has(mark)) {
      for (let end = start + 1; (end = this.text.indexOf(mark, end)) >= 0; end += 1) {
        const before = this.text[end - 1];
        const after = this.text[end + mark.length];
        // Two marks beside each other are another kind of emphasis.
        const alone = mark.length === 2 || (after !== letter && before !== letter);
        if (alone && /\S/.test(before) && !(letter === "_" && isWord(after))) {
          this.at = end + mark.length;
          const type = mark.length === 2 ? "strong" : "emphasis";
          return { type, inline: inline(this.text.slice(start, end), this.depth + 1) };
        }
      }
      this.missing.add(mark);
    }
    this.plain += mark;
    this.at = start;
    return null;
  }

  link() {
    const image = this.text[this.at] === "!";
    const start = this.at + (image ? 2 : 1);
    if (this.middle < start && !this.missing.has("](")) {
      this.middle = this.text.indexOf("](", start);
      if (this.middle < 0) this.missing.add("](");
    }
    const middle = this.middle;
    if (middle < start || middle - start > LONGEST_LABEL || !isBalanced(this.text, start, middle)) return null;
    let open = 1;
    for (let end = middle + 2; end < this.text.length && end - middle < LONGEST_LINK; end++) {
      if (this.text[end] === "(") open++;
      if (this.text[end] === ")" && --open === 0) {
        const address = safeAddress(this.text.slice(middle + 2, end).trim().split(/\s/)[0]);
        if (!address) return null;
        this.at = end + 1;
        // Images are not loaded: that would tell another server who reads this.
        const label = inline(this.text.slice(start, middle), DEEPEST);
        return { type: "link", address, inline: label.length ? label : [{ type: "text", text: address }] };
      }
    }
    return null;
  }

  address() {
    const pattern = this.text[this.at] === "<" ? /<([a-z]+:[^\s<>]{1,2000})>/y : /https?:\/\/[^\s<>"`]{1,2000}/y;
    pattern.lastIndex = this.at;
    const match = isWord(this.text[this.at - 1]) ? null : pattern.exec(this.text);
    if (!match) return null;
    const shown = match[1] ?? match[0].replace(/[.,;:!?'*_)\]]+$/, "");
    const address = safeAddress(shown);
    if (!address) return null;
    this.at += match[1] === undefined ? shown.length : match[0].length;
    return { type: "link", address, inline: [{ type: "text", text: shown }] };
  }
}

/** The text of a code span: one space at both ends belongs to its marks, if there is more than spaces. */
const unpadded = (text) => (text.startsWith(" ") && text.endsWith(" ") && text.trim() ? text.slice(1, -1) : text);

/** Whether each bracket between two places has its partner there, so that a label begins at its own bracket. */
function isBalanced(text, start, end) {
  let open = 0;
  for (let at = start; at < end; at++) {
    if (text[at] === "\\") at++;
    else if (text[at] === "[") open++;
    else if (text[at] === "]" && --open < 0) return false;
  }
  return open === 0;
}

const isWord = (letter) => letter !== undefined && /[\p{L}\p{N}_]/u.test(letter);

/** A link's target if it is one that may be followed: no scripts, no data, nothing of this server. */
export function safeAddress(address) {
  try {
    const url = new URL(address);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}
