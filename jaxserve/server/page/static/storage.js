// Text by name in the browser's storage, under this server's address. Where storage is blocked nothing is kept.
import { BASE } from "./base.js";

const PREFIX = `jaxserve:${BASE.pathname}:`;

function attempt(action, otherwise) {
  try {
    return action();
  } catch {
    return otherwise;
  }
}

export const readText = (name, area = "localStorage") =>
  attempt(() => window[area].getItem(PREFIX + name), null);

/** Whether it is kept: the storage may be full or blocked. */
export const writeText = (name, text, area = "localStorage") =>
  attempt(() => (window[area].setItem(PREFIX + name, text), true), false);

export const removeText = (name, area = "localStorage") =>
  attempt(() => window[area].removeItem(PREFIX + name), undefined);

/** All names that begin with `start`. */
export const namesOf = (start) =>
  attempt(
    () =>
      Object.keys(localStorage)
        .filter((key) => key.startsWith(PREFIX + start))
        .map((key) => key.slice(PREFIX.length)),
    [],
  );

/** The value that was written as JSON, or `otherwise`. */
export function readJSON(name, otherwise) {
  const text = readText(name);
  return text === null ? otherwise : attempt(() => JSON.parse(text), otherwise);
}

export const writeJSON = (name, value) => writeText(name, JSON.stringify(value));
