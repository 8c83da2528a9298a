// The live sessions of the server: asked for while something shows them.

import { getJson } from "./api.js";
import { byId, bytes, count, el, plural, setText } from "./dom.js";

const WHILE_RUNNING = 1000;
const WHILE_SHOWN = 3000;

/** Asks for the sessions as often as they are needed, and shows them in the panel. */
export class Sessions {
  /**
   * running, shown: whether an answer is written, and whether the list can be seen.
   * mine: the number of this conversation's last request, if it has one.
   * seen: is told what the server says.
   */
  constructor({ key, running, shown, mine, seen }) {
    Object.assign(this, { key, running, shown, mine, seen });
    this.timer = null;
    this.asking = false;
    document.addEventListener("visibilitychange", () => this.wake());
  }

  /** Something changed: look whether to ask, now or later. */
  wake() {
    clearTimeout(this.timer);
    this.timer = null;
    if (!this.asking && !document.hidden && (this.running() || this.shown())) this.ask();
  }

  async ask() {
    this.asking = true;
    try {
      const answer = await getJson("sessions", this.key());
      this.seen(answer);
      this.show(answer);
      this.note("");
    } catch (problem) {
      this.note(problem.status === 401 ? "They can be seen with an API key." : `${problem.message}.`);
    }
    this.asking = false;
    const wait = this.running() ? WHILE_RUNNING : WHILE_SHOWN;
    if (!document.hidden && (this.running() || this.shown())) this.timer = setTimeout(() => this.wake(), wait);
  }

  note(text) {
    setText(byId("sessions-note"), text);
    byId("sessions-note").hidden = !text;
    if (!text) return;
    setText(byId("sessions-count"), "");
    byId("sessions").replaceChildren();
  }

  show({ data, limit, waiting, context_length: context }) {
    const queue = waiting ? `, ${count(waiting)} waiting` : "";
    setText(byId("sessions-count"), `${data.length} of ${limit}${queue}`);
    if (!this.shown()) return;
    const mine = this.mine();
    const list = byId("sessions");
    const entries = data.map((session) => entry(session, session.request === mine, context));
    // Only what changed is replaced, so that a selection stays.
    entries.forEach((node, at) => {
      const old = list.children[at];
      if (!old) list.append(node);
      else if (!old.isEqualNode(node)) old.replaceWith(node);
    });
    while (list.children.length > entries.length) list.lastElementChild.remove();
    if (!entries.length) list.append(el("li", { class: "muted" }, "No conversation is live."));
  }
}

function entry(session, mine, context) {
  const { request, state, tokens, kv_bytes: size } = session;
  const what = { idle: "idle", reading: "reads its prompt", writing: "writes" }[state] ?? state;
  const bar = el("div", { class: "kv", "aria-hidden": "true" }, el("span", { class: "written" }));
  bar.firstElementChild.style.width = `${Math.min(100, (100 * tokens) / context)}%`;
  return el(
    "li",
    { class: mine ? "mine" : null },
    el(
      "div",
      { class: "session" },
      el("span", {}, `Request ${count(request)}`),
      el("span", { class: `state ${state}` }, what),
      mine ? el("span", { class: "badge" }, "this one") : null,
    ),
    el("div", { class: "muted" }, `${plural(tokens, "token")}, ${bytes(size)}${progress(session)}`),
    bar,
  );
}

function progress({ state, tokens, prompt_tokens: prompt, cached_tokens: cached }) {
  if (state === "reading") return `, ${count(Math.min(tokens, prompt))} of ${count(prompt)} read`;
  return prompt ? `, reused ${count(cached)} of ${count(prompt)}` : "";
}
