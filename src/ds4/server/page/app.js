// The page: one conversation, and what a person does with it.

import { getJson, streamChat } from "./api.js";
import { grow, merge, newAnswer, openCalls, requestBody, restore } from "./conversation.js";
import { byId, count, el, fit, isEnter, setText } from "./dom.js";
import { showGauges, Stopwatch, tokensOf } from "./numbers.js";
import { Sessions } from "./sessions.js";
import { Panel, Settings, themeButton } from "./settings.js";
import { read, stored, write } from "./store.js";
import { Toolbox } from "./toolbox.js";
import { AnswerView, QuestionView } from "./views.js";

const SAVE_EVERY = 1000;
const LOOK_AGAIN = 5000;

class App {
  constructor() {
    this.turns = restore(read("conversation"));
    this.views = new Map();
    this.server = { model: "", room: 0 };
    this.run = null;
    this.deleted = null;
    // Only while the page is there: after a restart of the server the number would be another's.
    this.request = null;
    this.saved = 0;
    this.follows = true;
    this.leaving = false;
    this.drawing = false;
    this.cost = 0;
    themeButton();
    this.tools = new Toolbox();
    this.settings = new Settings({ keyChanged: () => this.sessions.wake() });
    this.sessions = new Sessions({
      key: () => this.settings.key,
      running: () => this.run !== null,
      shown: () => this.panel.open && byId("sessions-section").open,
      mine: () => this.request,
      seen: (answer) => this.seen(answer),
    });
    this.panel = new Panel({ toggled: () => this.panel && this.sessions.wake() });
    byId("sessions-section").addEventListener("toggle", () => this.sessions.wake());
    this.listen();
    this.show();
    this.scroll(true);
    this.sessions.wake();
    this.look();
  }

  // ---- what a person does -------------------------------------------------------------------------------------------

  listen() {
    const message = byId("message");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    message.addEventListener("input", () => fit(message));
    message.addEventListener("keydown", (event) => {
      if (isEnter(event)) {
        event.preventDefault();
        this.send();
      } else if (event.key === "ArrowUp" && !message.value && !this.run) {
        const last = this.turns.findLast((turn) => turn.role === "user");
        if (last) {
          event.preventDefault();
          this.views.get(last).begin();
        }
      }
    });
    byId("stop").addEventListener("click", () => this.stop());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing) this.stop();
    });
    byId("new").addEventListener("click", () => this.clear());
    const scroller = byId("scroller");
    scroller.addEventListener("scroll", () => {
      this.follows = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80;
      byId("latest").hidden = this.follows;
    });
    byId("latest").addEventListener("click", () => this.scroll(true));
    new ResizeObserver(() => this.scroll()).observe(scroller);
    // The browser breaks off what is under way before the page is gone.
    window.addEventListener("beforeunload", () => (this.leaving = true));
    window.addEventListener("pageshow", () => (this.leaving = false));
    window.addEventListener("pagehide", () => this.run && this.save());
    window.addEventListener("storage", (event) => {
      // Another tab has the same conversation; what it is writing comes when it is done.
      if (event.key !== stored("conversation") || this.run || event.newValue?.includes('"finish":null')) return;
      this.turns = merge(this.turns, restore(event.newValue ?? ""));
      this.show();
    });
  }

  send() {
    const message = byId("message");
    if (this.run || openCalls(this.turns.at(-1)).length || !message.value.trim()) return;
    const turn = { role: "user", text: message.value };
    message.value = "";
    fit(message);
    this.turns.push(turn);
    this.answer();
  }

  stop() {
    this.run?.controller.abort();
  }

  edited(turn, text) {
    if (this.run) return;
    turn.text = text;
    this.cut(turn, 1);
    this.answer();
    byId("message").focus();
  }

  regenerate(turn) {
    if (this.run) return;
    this.cut(turn, 0);
    this.answer();
    byId("message").focus();
  }

  answered(turn, call, result) {
    if (this.run) return;
    call.result = result;
    this.cut(turn, 1);
    const [next] = openCalls(turn);
    if (next) {
      this.changed();
      this.focusCall(turn);
    } else {
      this.answer();
      byId("message").focus();
    }
  }

  enterKey() {
    this.panel.show(true, { focus: byId("key") });
  }

  clear() {
    this.stop();
    if (this.turns.length) this.deleted = this.turns;
    this.turns = [];
    this.request = null;
    this.changed();
    byId("message").focus();
  }

  /** Drop what comes behind a turn, of which `kept` (0 or 1) stays. */
  cut(turn, kept) {
    this.turns.length = this.turns.indexOf(turn) + kept;
  }

  // ---- an answer ----------------------------------------------------------------------------------------------------

  async answer() {
    const problem = this.settings.problem();
    const body = requestBody(this.turns, this.settings.values(), this.tools.wired(), this.server.model);
    const turn = newAnswer();
    this.turns.push(turn);
    this.deleted = null;
    const known = { usage: null, waiting: "", request: null, ended: null };
    const run = { turn, watch: new Stopwatch(), controller: new AbortController(), ...known };
    if (problem) {
      Object.assign(turn, { finish: "error", error: { message: problem, remedy: "Change it in the settings.", status: 0 } });
      this.changed();
      return;
    }
    this.run = run;
    this.changed();
    this.scroll(true);
    this.say("Waiting for the answer");
    this.sessions.wake();
    const clock = setInterval(() => this.draw(), 250);
    try {
      const taken = (number) => (run.request = this.request = number);
      for await (const chunk of streamChat(body, this.settings.key, run.controller.signal, taken)) this.take(run, chunk);
      turn.finish = run.ended ?? "stop";
    } catch (error) {
      this.fail(run, error);
    }
    clearInterval(clock);
    const tokens = run.usage ? tokensOf(run.usage) : { completion: run.watch.pieces };
    turn.numbers = { ...turn.numbers, ...run.watch.numbers(run.usage), ...tokens };
    if (this.run === run) this.run = null;
    this.changed();
    this.announce(turn);
    this.sessions.wake();
    if (openCalls(turn).length && !byId("message").value && document.activeElement === byId("message")) this.focusCall(turn);
  }

  take(run, chunk) {
    if (chunk.usage) run.usage = chunk.usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    if (grow(run.turn, choice.delta)) run.watch.tick(run.turn);
    if (run.watch.thought !== null) run.turn.numbers.thought = run.watch.thought;
    // It is over when the stream is: until then it may still fail.
    if (choice.finish_reason) run.ended = choice.finish_reason;
    this.draw();
  }

  fail(run, error) {
    if (run.controller.signal.aborted || this.leaving) {
      run.turn.finish = this.leaving ? "cut" : "stopped";
      return;
    }
    const remedy = error.remedy ?? "Reload the page; if it happens again, this is a defect of the page.";
    run.turn.finish = "error";
    run.turn.error = { message: error.message, remedy, status: error.status ?? 0 };
  }

  /** What the server says of its sessions, this conversation's among them. */
  seen({ data, waiting, running, limit, context_length: room }) {
    this.server.room = room;
    const { run } = this;
    if (!run) return this.gauges();
    const mine = data.find((session) => session.request === run.request && session.state !== "idle");
    run.waiting = "";
    if (mine) {
      const { prompt_tokens: prompt, cached_tokens: cached, completion_tokens: completion, tokens } = mine;
      Object.assign(run.turn.numbers, { prompt, cached, completion });
      if (mine.state === "reading") run.waiting = `Reading the prompt, ${count(Math.min(tokens, prompt))} of ${count(prompt)} tokens`;
    } else if (run.watch.first === null && waiting && running >= limit) {
      run.waiting = "Waiting for a place: others are being answered";
    }
    this.draw();
  }

  // ---- what is shown ------------------------------------------------------------------------------------------------

  /** The conversation is another one than before. */
  changed() {
    this.save();
    this.show();
  }

  /** Show the running answer soon: with the next frame, or later where that takes long. */
  draw() {
    if (this.drawing) return;
    this.drawing = true;
    const frame = () => requestAnimationFrame(() => {
      const began = performance.now();
      this.drawing = false;
      if (!this.run) return;
      this.views.get(this.run.turn)?.update({ busy: true, waiting: this.run.waiting });
      this.gauges();
      this.scroll();
      if (began - this.saved > SAVE_EVERY) this.save();
      this.cost = performance.now() - began;
    });
    if (this.cost > 8) setTimeout(frame, 4 * this.cost);
    else frame();
  }

  show() {
    const list = byId("turns");
    const busy = this.run !== null;
    for (const [turn, view] of this.views) {
      if (this.turns.includes(turn)) continue;
      view.node.remove();
      this.views.delete(turn);
    }
    for (const turn of this.turns) {
      if (!this.views.has(turn)) {
        const view = turn.role === "user" ? new QuestionView(turn, this) : new AnswerView(turn, this);
        this.views.set(turn, view);
        list.append(view.node);
      }
      this.views.get(turn).update({ busy });
    }
    byId("empty").hidden = this.turns.length > 0;
    byId("send").hidden = busy;
    if (busy && document.activeElement === byId("send")) byId("message").focus();
    if (!busy && document.activeElement === byId("stop")) byId("message").focus();
    byId("stop").hidden = !busy;
    const open = openCalls(this.turns.at(-1));
    byId("send").disabled = open.length > 0;
    this.hint(open);
    this.gauges();
    this.scroll();
  }

  hint(open) {
    const hint = byId("hint");
    const undo = () => {
      this.turns = this.deleted;
      this.deleted = null;
      this.changed();
      byId("message").focus();
    };
    hint.replaceChildren();
    if (this.full) hint.append("This conversation is too long to be kept when the page is reloaded. ");
    if (open.length) hint.append(`The model waits for the result of ${open.map((call) => call.name).join(", ")}.`);
    if (this.deleted && !this.turns.length) {
      hint.append("The conversation was deleted. ", el("button", { type: "button", class: "quiet", onclick: undo }, "Undo"));
    }
    hint.hidden = !hint.hasChildNodes();
  }

  gauges() {
    const known = this.turns.findLast((turn) => turn.role === "assistant" && turn.numbers.prompt);
    const numbers = { ...known?.numbers };
    if (this.run) {
      const { turn, watch } = this.run;
      Object.assign(numbers, { first: undefined, speed: undefined, ...watch.numbers() });
      // The server is asked once a second only; pieces are tokens as a rule.
      if (known === turn) numbers.completion = Math.max(numbers.completion, watch.pieces);
    }
    showGauges(numbers, this.server.room);
  }

  scroll(always = false) {
    const scroller = byId("scroller");
    if (always || this.follows) scroller.scrollTop = scroller.scrollHeight;
  }

  focusCall(turn) {
    this.views.get(turn).cards.find((card) => card.call.result === null)?.field.focus();
  }

  /** Tell those who listen instead of looking. */
  say(text) {
    setText(byId("status"), text);
  }

  announce(turn) {
    const open = openCalls(turn);
    if (open.length) this.say(`The model calls ${open.map((call) => call.name).join(", ")}, and waits for the result.`);
    else if (turn.error) this.say(`${turn.error.message} ${turn.error.remedy}`);
    else this.say(turn.finish === "stopped" ? "Stopped." : `Answer: ${turn.text.slice(0, 1000)}`);
  }

  save() {
    this.saved = performance.now();
    this.full = !write("conversation", this.turns.length ? JSON.stringify(this.turns) : "");
  }

  /** What runs there; as long as nobody answers, again and again. */
  async look() {
    try {
      const { model, context_length: room } = await getJson("health", "");
      this.server = { model, room };
      setText(byId("model"), model);
      document.title = `${model} · ds4`;
      this.gauges();
    } catch (problem) {
      setText(byId("model"), `${problem.message}.`);
      setTimeout(() => this.look(), LOOK_AGAIN);
    }
  }
}

new App();
