// The requests of the page: with the reader's key, their errors as sentences, and streams of events.

const BASE = new URL("..", import.meta.url);
const LOST = "The connection to the server was lost.";

export const keys = { client: "", admin: "" };

// An error of the server, with its message, or a lost connection.
export class ServerError extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let requestKey = async () => false;

// `ask`: called with a sentence and the kind of key, "client" or "admin"; resolves to true once `keys` has another one.
export function onKeyNeeded(ask) {
  requestKey = ask;
}

// Returns the response of a request. Throws a ServerError if it is refused. `admin`: sends the operator's key in place of the client's.
export async function call(method, path, { body, admin = false, signal, keepalive = false } = {}) {
  const whose = admin ? "admin" : "client";
  for (;;) {
    const response = await fetched(method, path, { body, key: keys[whose], signal, keepalive });
    if (response.ok) return response;
    const error = await refusal(response);
    if (error.status === 401) keys[whose] = "";
    if (error.status !== 401 || keepalive || !(await requestKey(error.message, whose))) throw error;
  }
}

export async function read(path, options = {}) {
  return parsed(await (await call("GET", path, options)).text());
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ServerError(`This response is not from a Motet server: ${text.slice(0, 200)}`);
  }
}

async function fetched(method, path, { body, key, signal, keepalive }) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (method !== "GET") headers["content-type"] = "application/json"; // else a browser's request is refused
  try {
    return await fetch(new URL(path, BASE), {
      method, headers, signal, keepalive, body: body && JSON.stringify(body), cache: "no-store", credentials: "omit",
    });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError("The server cannot be reached.");
  }
}

async function refusal(response) {
  let body = null;
  try {
    body = (await response.json()).error;
  } catch {
    // a proxy can have sent the response
  }
  const status = response.status;
  return new ServerError(body?.message ?? `The server responded with status ${status}.`, { status, code: body?.code });
}

// Yields the chunks of a stream. Throws the error at its end, or an error if the stream is cut off.
export async function* chunksOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new ServerError(LOST);
    }
    if (piece.done) throw new ServerError(LOST);
    const events = (held + piece.value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data:")) continue; // a comment that keeps a connection open
      const data = event.slice(5).trim();
      if (data === "[DONE]") return;
      const chunk = parsed(data);
      if (chunk.error) throw new ServerError(chunk.error.message, { code: chunk.error.code });
      yield chunk;
    }
  }
}
