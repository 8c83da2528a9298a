// Speed, reuse and room: of the answer that is written, or of the last one.

import { byId, count, plural, seconds, setText } from "./dom.js";

/** Measures one answer as it arrives; times in seconds. */
export class Stopwatch {
  constructor() {
    this.began = now();
    this.first = null;
    this.last = null;
    this.pieces = 0;
    this.thought = null;
  }

  /** A piece of the answer arrived; `answer` is what there is with it. */
  tick(answer) {
    this.last = now();
    this.first ??= this.last;
    this.pieces++;
    // Reasoning is over where something else begins.
    if (this.thought === null && answer.reasoning && (answer.text || answer.calls.length)) this.thought = this.last - this.first;
  }

  /** What is known now. With the server's `usage` tokens are counted, before they are pieces. */
  numbers(usage = null) {
    const made = { wait: now() - this.began };
    if (this.first === null) return made;
    made.first = this.first - this.began;
    const tokens = usage?.completion_tokens ?? this.pieces;
    const took = this.last - this.first;
    if (tokens > 1 && took > 0) made.speed = (tokens - 1) / took;
    if (this.thought !== null) made.thought = this.thought;
    return made;
  }
}

const now = () => performance.now() / 1000;

/** Tokens as the API counts them. */
export function tokensOf(usage) {
  return {
    prompt: usage.prompt_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    completion: usage.completion_tokens,
  };
}

/** "reused 98 of 120 prompt tokens (82 %)" */
export function reuse({ prompt, cached }) {
  if (!prompt) return "";
  return `reused ${count(cached)} of ${plural(prompt, "prompt token")} (${Math.floor((100 * cached) / prompt)} %)`;
}

/** "31.2 tokens/s, first after 0.35 s" */
export function speed({ speed: rate, first, wait }) {
  if (first === undefined) return wait === undefined ? "" : `waiting ${seconds(wait)}`;
  const pace = rate === undefined ? "" : `${rate < 10 ? rate.toFixed(1) : count(Math.round(rate))} tokens/s, `;
  return `${pace}first after ${seconds(first)}`;
}

/** Show the gauges below the message; `room`: the context in tokens, if that is known. */
export function showGauges(numbers, room) {
  const { prompt = 0, cached = 0, completion = 0 } = numbers;
  setText(byId("speed"), speed(numbers));
  const used = prompt + completion;
  setText(byId("reuse-text"), prompt ? `reused ${count(cached)} of ${count(prompt)}` : "");
  setText(byId("kv-text"), room ? `context ${count(used)} of ${count(room)}` : used ? plural(used, "token") : "");
  fill(byId("reuse"), prompt, { reused: cached, read: prompt - cached });
  fill(byId("kv"), room, { reused: cached, read: prompt - cached, written: completion });
  byId("reuse").setAttribute("aria-label", reuse(numbers) || "No prompt has been read yet");
  byId("kv").setAttribute("aria-label", `${count(used)} of ${room ? count(room) : "unknown"} tokens of the context are used`);
  for (const id of ["reuse", "kv"]) byId(id).parentElement.hidden = !prompt;
}

function fill(bar, whole, parts) {
  for (const [name, tokens] of Object.entries(parts)) {
    bar.querySelector(`.${name}`).style.width = whole ? `${Math.min(100, (100 * tokens) / whole)}%` : "0";
  }
}
