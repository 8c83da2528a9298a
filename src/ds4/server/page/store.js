// What the browser keeps. The API key is kept for this tab only, all else until it is deleted.

const PREFIX = "ds4.";

/** The name under which the browser has it. */
export const stored = (name) => PREFIX + name;

/** Read a stored text; empty if there is none, or if storage is forbidden. */
export function read(name, storage = "localStorage") {
  try {
    return window[storage].getItem(stored(name)) ?? "";
  } catch {
    return "";
  }
}

/** Store a text; an empty one is deleted. False if there is no room for it. */
export function write(name, text, storage = "localStorage") {
  try {
    if (text) window[storage].setItem(stored(name), text);
    else window[storage].removeItem(stored(name));
    return true;
  } catch {
    return false;
  }
}

/** Read stored JSON; `otherwise` if there is none. */
export function readJson(name, otherwise) {
  try {
    return JSON.parse(read(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}
