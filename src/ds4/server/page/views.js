// The turns of a conversation as elements. What a person does there is told to `actions`.

import { el, fit, growing, plural, seconds, setText } from "./dom.js";
import { reuse, speed } from "./numbers.js";
import { showProse } from "./prose.js";
import { CallCard } from "./call_card.js";

/** What was said by the user. */
export class QuestionView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.busy = false;
    this.area = null;
    this.text = el("div", { class: "said" });
    this.edit = el("button", { type: "button", class: "quiet", onclick: () => this.begin() }, "Edit");
    this.foot = el("footer", {}, this.edit);
    this.node = el("article", { class: "turn question", "aria-label": "You" }, this.text, this.foot);
    this.update();
  }

  update({ busy = false } = {}) {
    setText(this.text, this.turn.text);
    this.busy = busy;
    this.edit.disabled = busy;
    this.node.querySelectorAll(".editing .primary").forEach((again) => (again.disabled = busy));
  }

  /** Let the text be changed; what follows it goes when that is done. */
  begin() {
    if (this.area) {
      this.area.focus();
      return;
    }
    const end = (done) => {
      // While another answer is written nothing can be sent, and nothing that was typed is thrown away.
      if (done && this.busy) return;
      this.area = null;
      this.node.replaceChildren(this.text, this.foot);
      if (done && area.value.trim()) this.actions.edited(this.turn, area.value);
      else this.edit.focus();
    };
    const area = growing({ "aria-label": "Edit your message" }, { done: () => end(true), cancel: () => end(false) });
    area.value = this.turn.text;
    this.area = area;
    const buttons = el(
      "footer",
      { class: "editing" },
      el("button", { type: "button", class: "primary", onclick: () => end(true) }, "Send again"),
      el("button", { type: "button", class: "quiet", onclick: () => end(false) }, "Cancel"),
      el("span", { class: "muted" }, "What follows is replaced."),
    );
    this.node.replaceChildren(area, buttons);
    fit(area);
    area.focus();
  }
}

const NOTICES = {
  length: "The answer was cut at the limit of tokens, or where the context is full.",
  stopped: "Stopped.",
  cut: "This answer was cut off when the page was left.",
};

/** An answer: its reasoning folded, its text, its calls, how it ended. */
export class AnswerView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.label = el("span", { class: "label" });
    this.peek = el("span", { class: "peek" });
    this.reasoning = el("div", { class: "reasoning" });
    this.thinking = el("details", { class: "thinking" }, el("summary", {}, this.label, this.peek), this.reasoning);
    this.prose = el("div", { class: "prose" });
    this.calls = el("div", { class: "calls" });
    this.cards = [];
    this.notice = el("p", { class: "notice muted" });
    this.problem = el("div", { class: "problem" });
    this.numbers = el("span", { class: "muted numbers" });
    this.again = el("button", { type: "button", class: "quiet", onclick: () => actions.regenerate(turn) }, "Regenerate");
    this.foot = el("footer", {}, this.again, this.numbers);
    const parts = [this.thinking, this.prose, this.calls, this.notice, this.problem, this.foot];
    this.node = el("article", { class: "turn answer", "aria-label": "Answer" }, ...parts);
    this.update();
  }

  /** Show the turn as it is; `waiting`: what the server does before the answer begins; `busy`: some answer is written. */
  update({ busy = false, waiting = "" } = {}) {
    const { turn } = this;
    const live = turn.finish === null;
    this.node.classList.toggle("live", live);
    this.node.setAttribute("aria-busy", String(live));
    this.showReasoning(live, waiting);
    showProse(this.prose, turn.text);
    this.prose.hidden = !turn.text;
    turn.calls.forEach((call, at) => {
      if (!this.cards[at]) {
        this.cards[at] = new CallCard(turn, call, this.actions);
        this.calls.append(this.cards[at].node);
      }
      this.cards[at].update(busy);
    });
    setText(this.notice, live ? "" : (NOTICES[turn.finish] ?? (isEmpty(turn) ? "The answer is empty." : "")));
    this.notice.hidden = !this.notice.textContent;
    this.showProblem(busy);
    this.foot.hidden = live;
    this.again.disabled = busy;
    this.again.hidden = Boolean(turn.error);
    setText(this.numbers, live ? "" : told(turn.numbers));
  }

  showReasoning(live, waiting) {
    const { reasoning, text, calls, numbers } = this.turn;
    const still = live && !text && !calls.length;
    this.thinking.hidden = !reasoning && !still;
    this.thinking.classList.toggle("still", still);
    // Nothing to unfold yet.
    this.thinking.classList.toggle("bare", !reasoning);
    const words = reasoning.split(/\s+/).filter(Boolean).length;
    const long = numbers.thought === undefined ? `, ${plural(words, "word")}` : ` for ${seconds(numbers.thought)}`;
    const told = still ? "Thinking" : `Thought${long}`;
    setText(this.label, reasoning ? told : waiting || "Waiting");
    setText(this.peek, still ? lastLine(reasoning) : "");
    setText(this.reasoning, reasoning.trim());
  }

  showProblem(busy) {
    const { error } = this.turn;
    this.problem.hidden = !error;
    if (!error) return;
    const retry = el("button", { type: "button", onclick: () => this.actions.regenerate(this.turn) }, "Try again");
    retry.disabled = busy;
    const key = el("button", { type: "button", onclick: () => this.actions.enterKey() }, "Enter the key");
    this.problem.replaceChildren(
      el("p", { class: "what" }, error.message),
      el("p", { class: "muted" }, error.remedy),
      el("div", { class: "actions" }, error.status === 401 ? key : null, retry),
    );
  }
}

const isEmpty = ({ text, calls, error }) => !text && !calls.length && !error;

function told(numbers) {
  const parts = [];
  if (numbers.completion !== undefined) parts.push(plural(numbers.completion, "token"));
  if (numbers.first !== undefined) parts.push(speed(numbers));
  if (numbers.prompt) parts.push(reuse(numbers));
  return parts.join(" · ");
}

function lastLine(text) {
  const end = text.trimEnd();
  return end.slice(Math.max(end.lastIndexOf("\n") + 1, end.length - 200));
}
