// The workers' tab: what /status tells, every second while it is open, and what an operator may do.

import { colourOf } from "./colours.js";
import { made } from "./group.js";
import { call, keys, read } from "./server.js";

const LOOK_EVERY_MS = 1000;
const PATIENCE_MS = 5000;
const NO_ENGINE = ["starting", "dead"];
const COLUMNS = [
  ["Role", (worker) => worker.role],
  ["State", (worker) => worker.state],
  ["KV blocks used", ({ blocks_used: used, blocks_total: total }) => (total ? `${told(used)} of ${total}` : null), "figure"],
  ["kept", (worker) => worker.blocks_kept, "figure"],
  ["Groups", (worker) => worker.groups_running, "figure"],
  ["Choices", (worker) => worker.choices_running, "figure"],
  ["waiting", (worker) => worker.choices_waiting, "figure"],
  ["Leases", (worker) => worker.leases, "figure"],
  ["Last decision", (worker) => worker.note ?? worker.last_decision ?? "", "decision"],
];

export class WorkersTab {
  // `view`: {table, rows, columns, totals, adminSaid, adminKey, say, fail, clear, askForKey}: its elements, and how the page hears of something.
  constructor(view) {
    this.view = view;
    this.shown = new Map();
    this.timer = 0;
    this.looking = false;
    this.failed = false; // the last look
    this.guarded = null; // whether the server has an admin key, without which nobody may act; null: not known yet
    for (const [name, , kind = ""] of [["Worker"], ...COLUMNS, ["Action", null, "act"]]) view.columns.append(cell("th", kind, "columnheader", name));
    view.adminKey.addEventListener("click", () => this.changeKey());
  }

  open() {
    this.close();
    this.showKey();
    this.look();
    this.timer = setInterval(() => document.hidden || this.look(), LOOK_EVERY_MS);
  }

  close() {
    clearInterval(this.timer);
    this.timer = 0;
  }

  // One look at a time: a server may take longer to answer than the next one comes.
  async look() {
    if (this.looking) return;
    this.looking = true;
    try {
      this.show(await read("status", { signal: AbortSignal.timeout(PATIENCE_MS) }));
      if (this.failed) this.view.clear();
      this.failed = false;
    } catch (error) {
      if (error.status === 401) this.close(); // the reader gave no key
      if (!this.failed) this.view.fail(error);
      this.failed = true;
    } finally {
      this.looking = false;
    }
  }

  show(status) {
    this.guarded = status.admin_key;
    if (!this.guarded) keys.admin = "";
    this.showKey();
    const ids = status.workers.map((worker) => worker.id);
    for (const [id, row] of this.shown) {
      if (!ids.includes(id)) row.element.remove(), this.shown.delete(id);
    }
    for (const worker of status.workers) this.showWorker(worker);
    const { prefills, transfers, transfer_bytes: bytes, migrations } = status.totals;
    this.view.totals.textContent = `Since the engines started: prefills for another worker ${prefills}, transfers of KV ${transfers} ` +
      `(${bytes.toLocaleString("en")} bytes), moves of groups ${migrations}.`;
  }

  showWorker(worker) {
    if (!this.shown.has(worker.id)) this.shown.set(worker.id, this.rowOf(worker.id));
    const { cells, button } = this.shown.get(worker.id);
    COLUMNS.forEach(([, words], place) => {
      const text = told(words(worker));
      if (cells[place].textContent !== text) cells[place].textContent = text;
    });
    const gone = NO_ENGINE.includes(worker.state);
    if (!gone || !button.dataset.does) this.showAction(button, worker);
    button.disabled = gone || (button.dataset.does === "drain" && worker.state === "draining");
  }

  showAction(button, { id, pid }) {
    const [does, word, label] = pid === null ? ["drain", "Drain", "Drain"] : ["kill", "Kill this engine", "Kill the engine of"];
    button.dataset.does = does;
    button.textContent = word;
    button.setAttribute("aria-label", `${label} ${id}`);
  }

  rowOf(id) {
    const element = made("tr");
    element.setAttribute("role", "row"); // a table stays one where its rows are shown as cards
    const name = cell("th", "", "rowheader");
    name.append(made("span", `dot ${colourOf(id)}`), id);
    const cells = COLUMNS.map(([column, , kind = ""]) => cell("td", kind, "cell", "", column));
    const button = made("button", "alarming");
    button.type = "button";
    button.addEventListener("click", () => this.act(id, button.dataset.does));
    const last = cell("td", "act", "cell");
    last.append(button);
    element.append(name, ...cells, last);
    this.view.rows.append(element);
    return { element, cells, button };
  }

  // Drains a worker, or kills an engine of this server.
  async act(id, does) {
    this.view.clear();
    try {
      await call("POST", `workers/${encodeURIComponent(id)}/${does}`, { admin: true });
      this.view.say(does === "kill" ? `${id} was killed.` : `${id} gets no new groups.`);
      if (this.timer) await this.look();
    } catch (error) {
      this.view.fail(error);
    } finally {
      this.showKey();
    }
  }

  // Asks for the admin key and for what only it opens, so that a wrong one is told at once; or forgets the key.
  async changeKey() {
    this.view.clear();
    if (keys.admin) keys.admin = "";
    else if (await this.view.askForKey("", "admin")) await this.tryKey();
    this.showKey();
  }

  async tryKey() {
    try {
      await read("workers", { admin: true });
    } catch (error) {
      keys.admin = "";
      this.view.fail(error);
    }
  }

  showKey() {
    const { table, adminSaid, adminKey } = this.view;
    const words = this.saidOfKey();
    if (adminSaid.textContent !== words) adminSaid.textContent = words;
    adminKey.textContent = keys.admin ? "Forget the key" : "Enter the key";
    adminKey.hidden = !this.guarded;
    table.classList.toggle("watched", !this.guarded);
  }

  saidOfKey() {
    if (this.guarded === null) return "";
    if (!this.guarded) return "Start the server with --admin-key to drain and kill workers here.";
    if (keys.admin) return "The page has the admin key until it is closed.";
    return "Draining a worker and killing an engine of this server need its admin key.";
  }
}

function cell(tag, kind, role, text = "", column = "") {
  const element = made(tag, kind, text);
  element.setAttribute("role", role);
  if (column) element.dataset.name = column;
  return element;
}

function told(figure) {
  return String(figure ?? "–"); // a silent worker tells none, and a server that takes texts has none
}
