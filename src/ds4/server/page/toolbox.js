// The tools that the user offers to the model: their editor, and what is sent of them.

import { byId, el, fit, setText } from "./dom.js";
import { readJson, write } from "./store.js";

const EXAMPLE = {
  name: "get_weather",
  description: "The weather of a city",
  parameters: JSON.stringify(
    { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } }, required: ["city"] },
    null,
    2,
  ),
  strict: false,
};

/** What is wrong with a tool as it was typed; empty if nothing is. `others`: the names of those before it. */
export function problemOf({ name, parameters }, others = []) {
  if (!name) return "Give it a name.";
  if (!/^[A-Za-z0-9_.-]{1,64}$/.test(name)) return "A name has up to 64 letters, digits, and the signs _ . -";
  if (others.includes(name)) return "Another tool has this name.";
  let schema;
  try {
    schema = JSON.parse(parameters);
  } catch (error) {
    return `The parameters are no JSON: ${error.message}`;
  }
  const isObject = typeof schema === "object" && schema !== null && !Array.isArray(schema);
  return isObject ? "" : "The parameters are a JSON schema: an object such as {\"type\": \"object\", \"properties\": {}}.";
}

/** A tool as the chat API takes it. */
export function wire({ name, description, parameters, strict }) {
  const made = { name, parameters: JSON.parse(parameters) };
  if (description) made.description = description;
  if (strict) made.strict = true;
  return { type: "function", function: made };
}

const isTool = (tool) => ["name", "description", "parameters"].every((field) => typeof tool?.[field] === "string");

/** The editor, which is filled with what is stored. */
export class Toolbox {
  constructor() {
    const stored = readJson("tools", []);
    this.tools = Array.isArray(stored) ? stored.filter(isTool) : [];
    byId("add-tool").addEventListener("click", () => this.add());
    byId("tools-section").open = this.tools.length > 0;
    for (const tool of this.tools) byId("tools").append(this.card(tool));
    this.changed();
  }

  /** The tools that can be sent. */
  wired() {
    return this.tools.filter((tool, at) => !this.problem(tool, at)).map(wire);
  }

  problem(tool, at = this.tools.indexOf(tool)) {
    return problemOf(tool, this.tools.slice(0, at).map((other) => other.name));
  }

  add() {
    const taken = new Set(this.tools.map((tool) => tool.name));
    let name = EXAMPLE.name;
    for (let number = 2; taken.has(name); number++) name = `${EXAMPLE.name}_${number}`;
    const tool = { ...EXAMPLE, name };
    this.tools.push(tool);
    const card = this.card(tool);
    card.open = true;
    byId("tools").append(card);
    this.changed();
    card.querySelectorAll("textarea").forEach(fit);
    const field = card.querySelector("input");
    field.focus();
    field.select();
  }

  card(tool) {
    const field = (label, name, node) => {
      if (node.type === "checkbox") node.checked = Boolean(tool[name]);
      else node.value = tool[name] ?? "";
      node.addEventListener("input", () => {
        tool[name] = node.type === "checkbox" ? node.checked : node.value;
        if (node.tagName === "TEXTAREA") fit(node);
        this.changed();
      });
      return el("label", {}, el("span", {}, label), node);
    };
    const remove = el("button", { type: "button", class: "quiet" }, "Remove");
    const card = el(
      "details",
      { class: "tool" },
      el("summary", {}, el("span", { class: "mono" }), el("span", { class: "wrong" })),
      field("Name", "name", el("input", { spellcheck: "false", autocomplete: "off" })),
      field("Description", "description", el("textarea", { rows: 1 })),
      field("Parameters (JSON schema)", "parameters", el("textarea", { rows: 4, class: "mono", spellcheck: "false" })),
      el(
        "div",
        { class: "tool-foot" },
        field("Strict: arguments follow the schema", "strict", el("input", { type: "checkbox" })),
        remove,
      ),
      el("p", { class: "wrong", "aria-live": "polite" }),
    );
    card.addEventListener("toggle", () => card.querySelectorAll("textarea").forEach(fit));
    remove.addEventListener("click", () => {
      this.tools.splice(this.tools.indexOf(tool), 1);
      card.remove();
      this.changed();
      byId("add-tool").focus();
    });
    return card;
  }

  changed() {
    write("tools", this.tools.length ? JSON.stringify(this.tools) : "");
    [...byId("tools").children].forEach((card, at) => {
      const tool = this.tools[at];
      const problem = this.problem(tool, at);
      setText(card.querySelector("summary .mono"), tool.name || "(no name)");
      setText(card.querySelector("summary .wrong"), problem ? "not offered" : "");
      setText(card.querySelector("p.wrong"), problem);
    });
    const usable = this.wired().length;
    setText(byId("tools-count"), usable ? `${usable} offered` : "none");
  }
}
