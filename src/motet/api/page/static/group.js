// One group of choices: its columns, the streams that fill them, and what the server tells of it meanwhile.

import { call, chunksOf, read, ServerError } from "./server.js";
import { colourOf } from "./colours.js";

const LOOK_EVERY_MS = 400;
const PATIENCE_MS = 5000; // for a look, or to stop; a stream may pause as long as it likes
const SHADES = [0.9, 0.5, 0.2, 0.05]; // a token that is likelier than the first is not shaded
const ENDS = { stop: "ended", length: "cut at max tokens", abort: "stopped", tool_calls: "ended in a call" };

// One choice, in a column of its own. Whatever the server writes becomes text, never markup.
class Choice {
  constructor(index, { onStop, shaded }) {
    this.index = index;
    this.tokens = 0;
    this.streamed = 0; // tokens that the stream has brought: a look at the group may be ahead of it
    this.state = "waiting";
    this.finish = null;
    this.firstMs = null;
    this.parts = []; // what each worker has written, in order: {worker, tokens}
    this.shaded = shaded;
    this.pieces = []; // what is not on the screen yet
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

  // Takes one chunk of the stream. `ms`: since the request.
  take(told, ms) {
    const { delta, logprobs, finish_reason: finish, token_ids: ids } = told;
    const thought = delta.reasoning_content ?? "";
    const text = (delta.content ?? "") + callsOf(delta.tool_calls);
    if (thought) this.pieces.push(["thought", thought]);
    if (text || logprobs) this.pieces.push(...(this.shaded && logprobs ? this.shadedPieces(text, logprobs.content ?? []) : [["", text]]));
    if (ids ? ids.length : thought || text) {
      this.firstMs ??= ms;
      this.streamed += ids?.length ?? 1;
      this.count(Math.max(this.tokens, this.streamed));
    }
    if (finish) this.end(finish);
  }

  // Cuts the text where its tokens are; what no token of the chunk begins with is left as it is.
  *shadedPieces(text, entries) {
    let rest = text;
    for (const { bytes, logprob } of entries) {
      const piece = bytes ? this.decoder.decode(new Uint8Array(bytes), { stream: true }) : "";
      if (!piece || !rest.startsWith(piece)) continue;
      rest = rest.slice(piece.length);
      const shade = SHADES.filter((least) => Math.exp(logprob) < least).length;
      yield [`s${shade}`, piece, `${(100 * Math.exp(logprob)).toPrecision(2)} % (${logprob.toFixed(3)})`];
    }
    if (rest) yield ["", rest];
  }

  // Notes so many tokens in all.
  count(tokens) {
    if (this.state === "waiting") this.state = "writing";
    if (!this.parts.length) this.parts.push({ worker: null, tokens: 0 });
    this.parts.at(-1).tokens += tokens - this.tokens;
    this.tokens = tokens;
  }

  // Takes what the server tells of the choice beside the stream.
  look(told) {
    if (told.tokens > this.tokens) this.count(told.tokens);
    const last = this.parts.at(-1);
    if (told.worker && last && last.worker === null) last.worker = told.worker;
    else if (told.worker && last && told.worker !== last.worker) this.parts.push({ worker: told.worker, tokens: 0 });
    if (told.state === "dropped") this.state = "never begun";
  }

  end(finish) {
    this.finish = finish;
    this.state = "over";
    this.button.disabled = true;
  }

  // Ends with the stream, however that ended.
  close() {
    this.button.disabled = true;
    if (this.state === "writing") this.end("broken off");
    if (this.state === "waiting") this.state = "never begun";
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
    const state = this.finish ? ENDS[this.finish] ?? this.finish : this.state;
    const words = `${state}${this.moved ? ", moved" : ""} · ${this.tokens} tokens`;
    const workers = this.parts.map((part) => part.worker).filter(Boolean).join(" → ");
    this.facts.replaceChildren(words, ...(workers ? [made("b", "", workers)] : []));
    this.element.className = `choice ${colourOf(this.worker)}`;
    this.element.dataset.state = this.state;
    this.element.dataset.moved = this.moved;
  }
}

export class Group {
  // `view`: {list, drawing, say, fail, changed}: where columns go, the picture, and how the page hears of something.
  // `canGrow`: the server writes more choices of the prompt, if asked.
  constructor(view, { shaded, keptS, canGrow }) {
    this.view = view;
    this.shaded = shaded;
    this.keptS = keptS;
    this.canGrow = canGrow;
    this.id = null;
    this.promptTokens = null;
    this.choices = new Map();
    this.streams = new Set();
    this.waiting = 0; // requests that the server has not answered yet
    this.looking = null;
    this.silent = false; // the last look had no answer
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

  // Asks for `count` choices and shows them as they come. `before`: what to look at first. Returns what it told, and what
  // the stream told at its end. Throws an error with `refused` if nothing of them was begun.
  async ask(path, body, { count, before }) {
    const control = new AbortController();
    const first = this.choices.size;
    const mine = Array.from({ length: count }, (_, place) => this.add(first + place));
    this.streams.add(control);
    const told = { usage: null, group: null, mine, before: null, began: 0, endMs: 0 };
    let response = null;
    const looking = setInterval(() => this.look(), LOOK_EVERY_MS);
    try {
      response = await this.answer(path, body, { signal: control.signal, before, told });
      for await (const chunk of chunksOf(response)) {
        if (this.id === null) this.named(chunk.id);
        this.promptTokens ??= chunk.choices[0]?.prompt_token_ids?.length ?? null;
        for (const choice of chunk.choices) this.take(choice, performance.now() - told.began);
        told.usage = chunk.usage ?? told.usage;
        if (body.group?.stop_when) told.group = chunk.groups?.[0] ?? told.group;
      }
      this.promptTokens ??= told.usage?.prompt_tokens ?? null;
    } catch (error) {
      if (error.name !== "AbortError") throw Object.assign(error, { refused: response === null });
    } finally {
      clearInterval(looking);
      told.endMs = performance.now() - told.began;
      await this.looking; // what it was told may be older than the end of the stream
      this.forgotten ||= !this.keptS && this.streams.size === 1; // by the server, with the last of its answers
      await this.look();
      this.streams.delete(control);
      for (const choice of mine) this.close(choice, { refused: response === null });
    }
    return told;
  }

  async answer(path, body, { signal, before, told }) {
    this.waiting += 1;
    try {
      told.before = await before();
      told.began = performance.now();
      return await call("POST", path, { body, signal });
    } catch (error) {
      if (error.status === 404) this.forgotten = true; // or there has never been one
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
    this.choices.delete(choice.index); // the server gives its number to the next one
    choice.element.remove();
  }

  add(index) {
    const choice = new Choice(index, { shaded: this.shaded, onStop: (one) => this.stop(one) });
    this.choices.set(index, choice);
    this.view.list.append(choice.element);
    this.view.list.classList.toggle("many", this.choices.size > 16);
    return choice;
  }

  take(told, ms) {
    const choice = this.choices.get(told.index) ?? this.add(told.index);
    choice.button.disabled = false;
    choice.take(told, ms);
    this.touch(choice);
  }

  touch(choice) {
    this.dirty.add(choice);
    this.frame ||= requestAnimationFrame(() => this.show());
  }

  // Puts on the screen what has come since the last frame, for all columns together: writes, then reads, then writes.
  show() {
    this.frame = 0;
    const columns = [...this.dirty];
    this.dirty.clear();
    const following = columns.filter(({ text }) => text.scrollHeight - text.scrollTop - text.clientHeight < 40);
    for (const choice of columns) choice.append(), choice.showFacts();
    const heights = following.map((choice) => choice.text.scrollHeight);
    following.forEach((choice, place) => (choice.text.scrollTop = heights[place]));
    this.view.drawing.show(this);
  }

  // Asks how the group is: the stream does not tell which worker writes, nor that it has changed. One look at a time.
  look() {
    return (this.looking ??= this.lookNow().finally(() => (this.looking = null)));
  }

  async lookNow() {
    if (this.id === null || this.forgotten) return;
    let told;
    try {
      told = await read(this.path(), { signal: AbortSignal.timeout(PATIENCE_MS) });
    } catch (error) {
      this.hear(error.status !== 0); // it is forgotten, or the stream tells what is wrong
      return;
    }
    this.hear(true);
    this.promptTokens ??= told.prompt_tokens;
    const movedTo = new Set();
    for (const one of told.choices) {
      const choice = this.choices.get(one.index);
      if (!choice) continue;
      const before = choice.worker;
      choice.look(one);
      if (before && choice.worker !== before) movedTo.add(choice.worker);
      this.touch(choice);
    }
    if (movedTo.size) this.view.say(`Choices go on at ${[...movedTo].join(" and ")}.`);
  }

  // Notes whether the server answers, while a stream may pause for other reasons.
  hear(answers) {
    if (this.open && this.silent === answers) {
      this.view.say(answers ? "The server answers again." : "The server does not answer at this moment.");
    }
    this.silent = !answers;
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

  // Ends all choices. If the server has not named the group yet, or cannot be reached, closing the connections does it.
  async stopAll() {
    if (this.id === null) return this.disconnect();
    await this.look(); // it is forgotten then
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

  // Called when the page goes: closing its connections ends the choices, and this makes the server forget the group.
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
