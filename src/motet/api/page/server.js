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

// `ask`: gets a sentence, and resolves to true once `keys.client` is another one.
export function onKeyNeeded(ask) {
  askForKey = ask;
}

// Returns the response of a request that was not refused. `admin`: sends the operator's key in place of the client's.
export async function call(method, path, { body, admin = false, signal, keepalive = false } = {}) {
  for (;;) {
    const response = await fetched(method, path, { body, key: admin ? keys.admin : keys.client, signal, keepalive });
    if (response.ok) return response;
    const error = await refusal(response);
    if (error.status !== 401 || admin || keepalive || !(await askForKey(error.message))) throw error;
  }
}

export async function read(path) {
  return (await call("GET", path)).json();
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
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message, { code: chunk.error.code });
      yield chunk;
    }
  }
}
