// One call of a tool: its name and arguments as they are written, and the form for its result.

import { el, fit, growing, setText } from "./dom.js";
import { openCalls } from "./conversation.js";

export class CallCard {
  constructor(turn, call, actions) {
    Object.assign(this, { turn, call, actions });
    this.editing = false;
    this.shown = "";
    this.state = el("span", { class: "state" });
    this.arguments = el("div", { class: "arguments" });
    this.below = el("div", { class: "below" });
    this.name = el("span", { class: "mono name" });
    this.node = el("section", { class: "call" }, el("header", {}, this.name, this.state), this.arguments, this.below);
  }

  update(busy) {
    const { turn, call } = this;
    setText(this.name, call.name);
    this.node.setAttribute("aria-label", `Call of ${call.name}`);
    const key = JSON.stringify([call, turn.finish, busy, this.editing, openCalls(turn).length]);
    if (key === this.shown) return;
    this.shown = key;
    this.showArguments();
    const waits = turn.finish === "tool_calls" && (call.result === null || this.editing);
    const cut = turn.finish !== null && turn.finish !== "tool_calls";
    setText(this.state, waits ? "waits for your result" : cut ? "not complete, so not answered" : call.result === null ? "" : "answered");
    this.node.classList.toggle("open", waits);
    if (waits) this.showForm(busy);
    else if (call.result === null) this.below.replaceChildren();
    else this.showResult(busy);
  }

  showArguments() {
    const value = parsed(this.call.arguments);
    if (this.turn.finish === null || value === null) {
      this.arguments.replaceChildren(el("pre", {}, this.call.arguments));
      return;
    }
    const rows = Object.entries(value).flatMap(([name, item]) => [
      el("dt", { class: "mono" }, name),
      el("dd", {}, el("pre", {}, typeof item === "string" ? item : JSON.stringify(item, null, 2))),
    ]);
    this.arguments.replaceChildren(rows.length ? el("dl", {}, rows) : el("p", { class: "muted" }, "no arguments"));
  }

  showForm(busy) {
    const send = () => {
      // While another answer is written nothing can be sent, and nothing that was typed is thrown away.
      if (busy) return;
      this.editing = false;
      this.actions.answered(this.turn, this.call, area.value);
    };
    const cancel = () => {
      this.editing = false;
      this.update(busy);
      this.below.querySelector("button").focus();
    };
    // What was typed stays when another call of the same answer is answered first.
    const before = this.field;
    const place = document.activeElement === before && before ? [before.selectionStart, before.selectionEnd] : null;
    const draft = before?.value ?? this.call.result ?? "";
    const area = growing({ placeholder: "Result" }, { done: send, cancel: this.editing ? cancel : null });
    area.value = draft;
    area.setAttribute("aria-label", `Result of ${this.call.name}`);
    const others = openCalls(this.turn).length - (this.call.result === null ? 1 : 0);
    const label = others ? `Keep result (${others} more to answer)` : "Send result";
    this.below.replaceChildren(
      el(
        "form",
        { onsubmit: (event) => (event.preventDefault(), send()) },
        area,
        el(
          "footer",
          { class: "editing" },
          el("button", { type: "submit", class: "primary", disabled: busy }, label),
          this.editing ? el("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel") : null,
          this.editing ? el("span", { class: "muted" }, "What follows is replaced.") : null,
        ),
      ),
    );
    fit(area);
    if (place) {
      area.focus();
      area.setSelectionRange(...place);
    }
  }

  showResult(busy) {
    const edit = () => {
      this.editing = true;
      this.update(busy);
      this.field.focus();
    };
    this.below.replaceChildren(
      el("pre", { class: "result", "aria-label": "Result" }, this.call.result || "(empty)"),
      el("footer", {}, el("button", { type: "button", class: "quiet", disabled: busy, onclick: edit }, "Edit result")),
    );
  }

  /** The field for the result, if it is there. */
  get field() {
    return this.below.querySelector("textarea");
  }
}

function parsed(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}
