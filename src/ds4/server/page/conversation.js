// A conversation as data: what it holds, what is sent of it, and how an answer grows. Nothing here touches the page.
//
// A turn is { role: "user", text } or an answer:
//   { role: "assistant", reasoning, text, calls, finish, error, numbers }
//   calls: [{ id, name, arguments: JSON text, result: text or null }]
//   finish: null while it is written; "stop", "length", "tool_calls", "stopped" (by hand), "error", "cut" (by a reload)
//   error: { message, remedy } or null
//   numbers: tokens and seconds, as far as they are known

/** An answer that has not begun. */
export function newAnswer() {
  return { role: "assistant", reasoning: "", text: "", calls: [], finish: null, error: null, numbers: {} };
}

/** Take in the delta of a chunk; whether there was anything in it. */
export function grow(answer, delta) {
  const { reasoning_content: reasoning, content, tool_calls: calls } = delta;
  if (reasoning) answer.reasoning += reasoning;
  if (content) answer.text += content;
  for (const call of calls ?? []) {
    const known = (answer.calls[call.index] ??= { id: "", name: "", arguments: "", result: null });
    if (call.id) known.id = call.id;
    if (call.function?.name) known.name = call.function.name;
    known.arguments += call.function?.arguments ?? "";
  }
  return Boolean(reasoning || content || calls?.length);
}

/** The calls of an answer that wait for a result: those of an answer that came to its end. */
export const openCalls = (turn) =>
  turn?.role === "assistant" && turn.finish === "tool_calls" ? turn.calls.filter((call) => call.result === null) : [];

/** The messages of the chat API for these turns. Calls that were cut off are not part of them. */
export function messages(turns, system) {
  const sent = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.role === "user") {
      sent.push({ role: "user", content: turn.text });
      continue;
    }
    const calls = turn.finish === "tool_calls" ? turn.calls.filter((call) => call.result !== null) : [];
    if (!turn.text && !turn.reasoning && !calls.length) continue;
    const message = { role: "assistant", content: turn.text };
    if (turn.reasoning) message.reasoning_content = turn.reasoning;
    if (calls.length) {
      message.tool_calls = calls.map(({ id, name, arguments: text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }));
    }
    sent.push(message);
    for (const call of calls) sent.push({ role: "tool", tool_call_id: call.id, content: call.result });
  }
  return sent;
}

/** The body of a request. Settings that are empty are the server's. */
export function requestBody(turns, settings, tools, model) {
  const body = {
    model,
    messages: messages(turns, settings.system),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (settings.temperature !== "") body.temperature = Number(settings.temperature);
  if (settings.maxTokens !== "") body.max_tokens = Number(settings.maxTokens);
  if (settings.effort) body.reasoning_effort = settings.effort;
  if (tools.length) {
    body.tools = tools;
    if (settings.toolChoice !== "auto") body.tool_choice = settings.toolChoice;
  }
  return body;
}

/** The turns in a stored text, or none if it is not one of ours. What was being written then was cut off. */
export function restore(text) {
  let stored;
  try {
    stored = JSON.parse(text);
  } catch {
    return [];
  }
  const turns = Array.isArray(stored) ? stored : [];
  return turns.every(isTurn) ? turns.map((turn) => (turn.finish === null ? { ...turn, finish: "cut" } : turn)) : [];
}

/** The turns as they are now; the first ones that are as before stay the same objects, and with them what is shown of them. */
export function merge(before, now) {
  let same = 0;
  while (same < now.length && JSON.stringify(now[same]) === JSON.stringify(before[same])) same++;
  return [...before.slice(0, same), ...now.slice(same)];
}

const isText = (value) => typeof value === "string";

function isTurn(turn) {
  if (turn?.role === "user") return isText(turn.text);
  return (
    turn?.role === "assistant" &&
    isText(turn.reasoning) &&
    isText(turn.text) &&
    (turn.finish === null || isText(turn.finish)) &&
    typeof turn.numbers === "object" &&
    turn.numbers !== null &&
    Object.values(turn.numbers).every((value) => typeof value === "number") &&
    (turn.error === null || (isText(turn.error?.message) && isText(turn.error?.remedy))) &&
    Array.isArray(turn.calls) &&
    turn.calls.every(
      (call) => isText(call?.id) && isText(call.name) && isText(call.arguments) && (call.result === null || isText(call.result)),
    )
  );
}
