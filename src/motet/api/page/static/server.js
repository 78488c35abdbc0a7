// What the page asks of the server: requests with the reader's key, their errors as words, and streams of events.

const BASE = new URL("..", import.meta.url);
const LOST = "The connection to the server was lost.";

export const keys = { client: "", admin: "" };

// A refusal of the server, or a connection that was lost. The message is the server's own.
export class ServerError extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let askForKey = async () => false;

// `ask`: gets a sentence and whose key is needed, "client" or "admin"; resolves to true once there is another one in `keys`.
export function onKeyNeeded(ask) {
  askForKey = ask;
}

// Returns the response of a request that was not refused. `admin`: sends the operator's key in place of the client's.
export async function call(method, path, { body, admin = false, signal, keepalive = false } = {}) {
  const whose = admin ? "admin" : "client";
  for (;;) {
    const response = await fetched(method, path, { body, key: keys[whose], signal, keepalive });
    if (response.ok) return response;
    const error = await refusal(response);
    if (error.status === 401) keys[whose] = "";
    if (error.status !== 401 || keepalive || !(await askForKey(error.message, whose))) throw error;
  }
}

export async function read(path, options = {}) {
  return parsed(await (await call("GET", path, options)).text());
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ServerError(`This is no answer of a Motet server: ${text.slice(0, 200)}`);
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
  let told = null;
  try {
    told = (await response.json()).error;
  } catch {
    // a proxy's answer, perhaps
  }
  const status = response.status;
  return new ServerError(told?.message ?? `The server answered ${status}.`, { status, code: told?.code });
}

// Yields the chunks of a stream. Throws the error that the stream ends with, or that it has no end.
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
