// The server's API: requests with the key, streams of events, and errors with what to do about them.

/** What went wrong, for people: `message` says what, `remedy` what to do. */
export class Problem extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.remedy = remedy(status, code, retryAfter);
  }
}

const REMEDIES = {
  0: "Is the server still running, and can this machine reach it? Start it, then try again.",
  400: "Change what the message names, in the settings or the tools, and try again.",
  401: "Enter a key of this server under Settings, API key, and try again.",
  404: "This page may be older than the server: reload it.",
  409: "What this continues is not remembered any more. Try again.",
  413: "The conversation is too long for one request. Begin a new one, or edit an earlier message.",
  500: "The server's log says more. Try again; what was computed is kept if it could be.",
  503: "The server is shutting down, or the answer took longer than it allows (--request-timeout). Try again later.",
};

function remedy(status, code, retryAfter) {
  if (code === "context_length_exceeded") {
    return "Edit an earlier message or begin a new conversation; a larger --ctx makes room for more.";
  }
  if (status === 429) return `The server is busy. Try again${retryAfter ? ` in ${retryAfter} s` : " later"}.`;
  return REMEDIES[status] ?? (status >= 500 ? REMEDIES[500] : REMEDIES[400]);
}

const headers = (key) => (key ? { authorization: `Bearer ${key}` } : {});

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    // What cannot be a header, such as a key with other letters, never leaves the browser.
    const unsendable = error instanceof TypeError && /header|ByteString|ISO-8859-1/i.test(error.message);
    throw unsendable
      ? new Problem("The API key has characters that cannot be sent", { status: 401 })
      : new Problem("The server does not answer");
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // A proxy may answer in its own words.
  }
  const { status } = response;
  const message = typeof error?.message === "string" ? error.message : `The server answered with status ${status}`;
  return new Problem(message, { status, code: error?.code ?? null, retryAfter: response.headers.get("retry-after") });
}

/** The JSON at a path, relative to the page: it may be behind a proxy, below another path. Throws Problem. */
export async function getJson(path, key, signal) {
  const response = await ask(path, { headers: headers(key), signal });
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server's answer cannot be read");
  }
}

/**
 * The chunks of a streamed answer. `taken` is told the number of the request as soon as the server has one, which may be
 * long before the first chunk. Throws Problem, or AbortError once `signal` says so.
 */
export async function* streamChat(body, key, signal, taken) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  taken(Number(response.headers.get("x-request-id")));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const events = new EventReader();
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError" || signal?.aborted) throw error;
      throw new Problem("The connection broke before the answer was complete");
    }
    if (piece.done) throw new Problem("The connection ended before the answer was complete");
    for (const data of events.push(piece.value)) {
      if (data === "[DONE]") return;
      const chunk = readChunk(data);
      if (chunk.error) throw new Problem(chunk.error.message, { status: streamStatus(chunk.error), code: chunk.error.code });
      yield chunk;
    }
  }
}

function readChunk(data) {
  try {
    const chunk = JSON.parse(data);
    if (chunk.error || Array.isArray(chunk.choices)) return chunk;
  } catch {
    // Not of this server, or changed on the way.
  }
  throw new Problem("The server's answer cannot be read", { status: 502 });
}

/** Errors within a stream have no status of their own. */
const streamStatus = (error) => (error.type === "server_error" ? 500 : error.type === "rate_limit_error" ? 429 : 400);

/** Cuts a stream into the data of its events; comments are passed over. */
export class EventReader {
  constructor() {
    this.rest = "";
  }

  /** The data of the events that a piece of the stream completes. */
  push(piece) {
    const parts = (this.rest + piece).split("\n\n");
    this.rest = parts.pop();
    return parts.map(dataOf).filter((data) => data !== "");
  }
}

const dataOf = (event) =>
  event
    .split("\n")
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(5).trimStart())
    .join("\n");
