// A group of choices: its columns, the streams that fill them, and the server's reports on the group.

import { call, chunksOf, read, ServerError } from "./server.js";
import { colourOf } from "./colours.js";

const REPORT_EVERY_MS = 400;
const PATIENCE_MS = 5000; // for a report, or to stop; the pauses of a stream are not limited
const SHADES = [0.9, 0.5, 0.2, 0.05]; // probabilities; a token above the first is not shaded
const STATES = { writing: "generating" }; // states with another name on the page than in the API
const ENDS = { stop: "ended", length: "cut off at max tokens", abort: "stopped", tool_calls: "ended with a tool call" };

// One choice in its column. The server's output becomes text, never markup.
class Choice {
  constructor(index, { onStop, shaded }) {
    this.index = index;
    this.tokens = 0;
    this.streamed = 0; // tokens from the stream; a report on the group can be ahead of it
    this.state = "waiting";
    this.finish = null;
    this.firstMs = null;
    this.parts = []; // the output of each worker, in order: {worker, tokens}
    this.shaded = shaded;
    this.pieces = []; // output that is not on the screen
    this.decoder = new TextDecoder();
    this.element = made("li", "choice");
    this.facts = made("p", "facts");
    this.text = made("div", "text");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", `Answer ${index}`);
    this.button = made("button", "", "Stop");
    this.button.type = "button";
    this.button.disabled = true;
    this.button.setAttribute("aria-label", `Stop choice ${index}`);
    this.button.addEventListener("click", () => onStop(this));
    const head = made("div", "head");
    head.append(made("span", "number", `#${index}`), this.button);
    this.element.append(head, this.facts, this.text);
    this.showFacts();
  }

  get worker() {
    return this.parts.at(-1)?.worker ?? null;
  }

  get moved() {
    return this.parts.length > 1;
  }

  // Adds one chunk of the stream. `ms`: time since the request.
  take(chunk, ms) {
    const { delta, logprobs, finish_reason: finish, token_ids: ids } = chunk;
    const reasoning = delta.reasoning_content ?? "";
    const text = (delta.content ?? "") + callsOf(delta.tool_calls);
    if (reasoning) this.pieces.push(["thought", reasoning]);
    if (text || logprobs) this.pieces.push(...(this.shaded && logprobs ? this.shadedPieces(text, logprobs.content ?? []) : [["", text]]));
    if (ids ? ids.length : reasoning || text) {
      this.firstMs ??= ms;
      this.streamed += ids?.length ?? 1;
      this.count(Math.max(this.tokens, this.streamed));
    }
    if (finish) this.end(finish);
  }

  // Cuts the text at its tokens. Text that does not start with a token of the chunk stays in one piece.
  *shadedPieces(text, entries) {
    let rest = text;
    for (const { bytes, logprob } of entries) {
      const piece = bytes ? this.decoder.decode(new Uint8Array(bytes), { stream: true }) : "";
      if (!piece || !rest.startsWith(piece)) continue;
      rest = rest.slice(piece.length);
      const shade = SHADES.filter((limit) => Math.exp(logprob) < limit).length;
      yield [`s${shade}`, piece, `${(100 * Math.exp(logprob)).toPrecision(2)} % (${logprob.toFixed(3)})`];
    }
    if (rest) yield ["", rest];
  }

  // Sets the number of tokens.
  count(tokens) {
    if (this.state === "waiting") this.state = "writing";
    if (!this.parts.length) this.parts.push({ worker: null, tokens: 0 });
    this.parts.at(-1).tokens += tokens - this.tokens;
    this.tokens = tokens;
  }

  // Applies the server's report on the choice.
  apply(report) {
    if (report.tokens > this.tokens) this.count(report.tokens);
    const last = this.parts.at(-1);
    if (report.worker && last && last.worker === null) last.worker = report.worker;
    else if (report.worker && last && report.worker !== last.worker) this.parts.push({ worker: report.worker, tokens: 0 });
    if (report.state === "dropped") this.state = "not started";
  }

  end(finish) {
    this.finish = finish;
    this.state = "over";
    this.button.disabled = true;
  }

  // Called when the stream has ended, completely or not.
  close() {
    this.button.disabled = true;
    if (this.state === "writing") this.end("interrupted");
    if (this.state === "waiting") this.state = "not started";
  }

  append() {
    const text = this.text;
    for (const [kind, piece, title] of this.pieces) {
      const last = text.lastChild;
      if (kind && title === undefined && last?.className === kind) last.firstChild.appendData(piece);
      else if (kind) text.append(titled(made("span", kind, piece), title));
      else if (last instanceof Text) last.appendData(piece);
      else text.append(piece);
    }
    this.pieces.length = 0;
  }

  showFacts() {
    const state = this.finish ? ENDS[this.finish] ?? this.finish : STATES[this.state] ?? this.state;
    const summary = `${state}${this.moved ? ", moved" : ""} · ${this.tokens} tokens`;
    const workers = this.parts.map((part) => part.worker).filter(Boolean).join(" → ");
    this.facts.replaceChildren(summary, ...(workers ? [made("b", "", workers)] : []));
    this.element.className = `choice ${colourOf(this.worker)}`;
    this.element.dataset.state = this.state;
    this.element.dataset.moved = this.moved;
  }
}

export class Group {
  // `view`: {list, drawing, say, fail, changed}: the list of columns, the picture, and functions that update the page.
  // `canGrow`: true if the server can generate more choices of the prompt.
  constructor(view, { shaded, keptS, canGrow }) {
    this.view = view;
    this.shaded = shaded;
    this.keptS = keptS;
    this.canGrow = canGrow;
    this.id = null;
    this.promptTokens = null;
    this.choices = new Map();
    this.streams = new Set();
    this.waiting = 0; // requests without a response so far
    this.reading = null; // the report that is being read
    this.silent = false; // true if the last request for a report had no response
    this.forgotten = false;
    this.dirty = new Set();
    this.frame = 0;
  }

  get open() {
    return this.streams.size > 0;
  }

  get canHaveMore() {
    return this.canGrow && this.id !== null && !this.forgotten && !this.waiting && (this.open || this.keptS > 0);
  }

  // Requests `count` choices and shows their output. `before`: returns the server's totals before the request. Returns the
  // result for the receipt. Throws an error with `refused` if no choice was started.
  async request(path, body, { count, before }) {
    const control = new AbortController();
    const first = this.choices.size;
    const mine = Array.from({ length: count }, (_, index) => this.add(first + index));
    this.streams.add(control);
    const result = { usage: null, group: null, mine, before: null, startMs: 0, endMs: 0 };
    let response = null;
    const timer = setInterval(() => this.readReport(), REPORT_EVERY_MS);
    try {
      response = await this.answer(path, body, { signal: control.signal, before, result });
      for await (const chunk of chunksOf(response)) {
        if (this.id === null) this.named(chunk.id);
        this.promptTokens ??= chunk.choices[0]?.prompt_token_ids?.length ?? null;
        for (const choice of chunk.choices) this.take(choice, performance.now() - result.startMs);
        result.usage = chunk.usage ?? result.usage;
        if (body.group?.stop_when) result.group = chunk.groups?.[0] ?? result.group;
      }
      this.promptTokens ??= result.usage?.prompt_tokens ?? null;
    } catch (error) {
      if (error.name !== "AbortError") throw Object.assign(error, { refused: response === null });
    } finally {
      clearInterval(timer);
      result.endMs = performance.now() - result.startMs;
      await this.reading; // a report requested before the end of the stream
      this.forgotten ||= !this.keptS && this.streams.size === 1; // the server forgets the group after its last answer
      await this.readReport();
      this.streams.delete(control);
      for (const choice of mine) this.close(choice, { refused: response === null });
    }
    return result;
  }

  async answer(path, body, { signal, before, result }) {
    this.waiting += 1;
    try {
      result.before = await before();
      result.startMs = performance.now();
      return await call("POST", path, { body, signal });
    } catch (error) {
      if (error.status === 404) this.forgotten = true; // or the group never existed
      throw error;
    } finally {
      this.waiting -= 1;
      this.view.changed();
    }
  }

  named(id) {
    this.id = id;
    this.view.changed();
  }

  close(choice, { refused }) {
    choice.close();
    this.touch(choice);
    if (!refused) return;
    this.choices.delete(choice.index); // the server uses its index for the next choice
    choice.element.remove();
  }

  add(index) {
    const choice = new Choice(index, { shaded: this.shaded, onStop: (choice) => this.stop(choice) });
    this.choices.set(index, choice);
    this.view.list.append(choice.element);
    this.view.list.classList.toggle("many", this.choices.size > 16);
    return choice;
  }

  take(chunk, ms) {
    const choice = this.choices.get(chunk.index) ?? this.add(chunk.index);
    choice.button.disabled = false;
    choice.take(chunk, ms);
    this.touch(choice);
  }

  touch(choice) {
    this.dirty.add(choice);
    this.frame ||= requestAnimationFrame(() => this.show());
  }

  // Shows the output since the last frame, in all columns together: writes to the page, then reads, then writes.
  show() {
    this.frame = 0;
    const columns = [...this.dirty];
    this.dirty.clear();
    const following = columns.filter(({ text }) => text.scrollHeight - text.scrollTop - text.clientHeight < 40);
    for (const choice of columns) choice.append(), choice.showFacts();
    const heights = following.map((choice) => choice.text.scrollHeight);
    following.forEach((choice, index) => (choice.text.scrollTop = heights[index]));
    this.view.drawing.show(this);
  }

  // Reads the server's report on the group, one at a time: the stream does not name the workers.
  readReport() {
    return (this.reading ??= this.readNow().finally(() => (this.reading = null)));
  }

  async readNow() {
    if (this.id === null || this.forgotten) return;
    let report;
    try {
      report = await read(this.path(), { signal: AbortSignal.timeout(PATIENCE_MS) });
    } catch (error) {
      this.setSilent(error.status === 0); // other errors: the group is forgotten, or the stream has the error
      return;
    }
    this.setSilent(false);
    this.promptTokens ??= report.prompt_tokens;
    const movedTo = new Set();
    for (const state of report.choices) {
      const choice = this.choices.get(state.index);
      if (!choice) continue;
      const before = choice.worker;
      choice.apply(state);
      if (before && choice.worker !== before) movedTo.add(choice.worker);
      this.touch(choice);
    }
    if (movedTo.size) this.view.say(`Choices continue on ${[...movedTo].join(" and ")}.`);
  }

  // Announces when the server stops or starts to respond; a stream can pause for other reasons.
  setSilent(silent) {
    if (this.open && this.silent !== silent) {
      this.view.say(silent ? "The server is not responding." : "The server is responding again.");
    }
    this.silent = silent;
  }

  path(rest = "") {
    return `v1/groups/${encodeURIComponent(this.id)}${rest}`;
  }

  async stop(choice) {
    choice.button.disabled = true;
    try {
      await call("DELETE", this.path(`/choices/${choice.index}`), { signal: AbortSignal.timeout(PATIENCE_MS) });
    } catch (error) {
      choice.button.disabled = choice.state !== "writing";
      this.view.fail(error);
    }
  }

  // Ends all choices. Closes the connections if the group has no id so far, or if the server cannot be reached.
  async stopAll() {
    if (this.id === null) return this.disconnect();
    await this.readReport(); // the last report, since the server then forgets the group
    this.forgotten = true;
    try {
      await call("DELETE", this.path(), { signal: AbortSignal.timeout(PATIENCE_MS) });
    } catch (error) {
      this.disconnect();
      throw error;
    }
  }

  disconnect() {
    for (const control of this.streams) control.abort();
  }

  // Called when the reader leaves the page. Its closed connections end the choices; this request makes the server forget the group.
  leave() {
    if (this.id === null || this.forgotten) return;
    this.forgotten = true;
    call("DELETE", this.path(), { keepalive: true }).catch(() => {});
  }
}

export function made(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

function titled(element, title) {
  if (title) element.title = title;
  return element;
}

function callsOf(calls) {
  return (calls ?? []).map(({ function: called }) => (called.name ? `${called.name} ` : "") + (called.arguments ?? "")).join("");
}
