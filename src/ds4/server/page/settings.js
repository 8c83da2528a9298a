// The settings form, the panel that it stands in, and the colours.

import { byId, setText } from "./dom.js";
import { read, readJson, write } from "./store.js";

const FIELDS = { effort: "effort", temperature: "temperature", maxTokens: "max-tokens", system: "system", toolChoice: "tool-choice" };

/** What the form says now; `key` is the API key. Empty ones are the server's. */
export class Settings {
  constructor({ keyChanged }) {
    const stored = readJson("settings", {});
    for (const [name, id] of Object.entries(FIELDS)) {
      const field = byId(id);
      if (typeof stored[name] === "string") field.value = stored[name];
      // A choice that there is no more.
      if (field.tagName === "SELECT" && field.selectedIndex < 0) field.selectedIndex = 0;
      field.addEventListener("input", () => this.save());
    }
    const key = byId("key");
    key.value = read("key", "sessionStorage");
    key.addEventListener("input", () => {
      write("key", this.key, "sessionStorage");
      keyChanged();
    });
    byId("settings").addEventListener("submit", (event) => event.preventDefault());
  }

  get key() {
    return byId("key").value.trim();
  }

  /** The settings by their names in FIELDS. */
  values() {
    return Object.fromEntries(Object.entries(FIELDS).map(([name, id]) => [name, byId(id).value]));
  }

  /** What cannot be sent, for people; empty if all can. */
  problem() {
    for (const [id, name] of [["temperature", "Temperature"], ["max-tokens", "Max tokens"]]) {
      if (!byId(id).validity.valid) return `${name}: ${byId(id).validationMessage}`;
    }
    return "";
  }

  save() {
    write("settings", JSON.stringify(this.values()));
  }
}

/** The panel at the side. On a narrow screen it covers the conversation, which cannot be reached then. */
export class Panel {
  constructor({ toggled }) {
    this.node = byId("panel");
    this.toggle = byId("panel-toggle");
    this.narrow = window.matchMedia("(max-width: 60rem)");
    this.toggled = toggled;
    this.toggle.addEventListener("click", () => this.show(this.node.hidden));
    byId("panel-close").addEventListener("click", () => this.show(false));
    this.node.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.narrow.matches) {
        event.stopPropagation();
        this.show(false);
      }
    });
    this.narrow.addEventListener("change", () => this.cover());
    this.show(read("panel") === "open" && !this.narrow.matches, { quietly: true });
  }

  get open() {
    return !this.node.hidden;
  }

  show(open, { quietly = false, focus = null } = {}) {
    this.node.hidden = !open;
    this.toggle.setAttribute("aria-expanded", String(open));
    this.cover();
    if (!quietly) {
      write("panel", open ? "open" : "");
      if (focus) focus.focus();
      else if (!open) this.toggle.focus();
      else if (this.narrow.matches) byId("panel-close").focus();
    }
    this.toggled();
  }

  cover() {
    byId("main").inert = this.open && this.narrow.matches;
  }
}

const THEMES = { "": "Colours: as the system", light: "Colours: light", dark: "Colours: dark" };
const SIGNS = { "": "◐", light: "○", dark: "●" };

/** The button that goes from the system's colours to light, dark, and back. */
export function themeButton() {
  const button = byId("theme");
  const show = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    setText(button, SIGNS[theme]);
    button.setAttribute("aria-label", THEMES[theme]);
    button.title = THEMES[theme];
  };
  let theme = read("theme");
  if (!(theme in THEMES)) theme = "";
  show(theme);
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    write("theme", theme);
    show(theme);
  });
}
