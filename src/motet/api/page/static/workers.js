// The workers' tab: /status, read every second while it is open, and the actions of an operator.

import { colourOf } from "./colours.js";
import { made } from "./group.js";
import { call, keys, read } from "./server.js";

const READ_EVERY_MS = 1000;
const PATIENCE_MS = 5000;
const NO_ENGINE = ["starting", "dead"];
const GIB = 2 ** 30;
const COLUMNS = [
  ["Role", (worker) => worker.role],
  ["State", (worker) => worker.state],
  ["Kernels", (worker) => worker.kernels],
  ["Memory", ({ resident_bytes: bytes }) => bytes && `${(bytes / GIB).toFixed(2)} GiB`, "figure"],
  ["KV blocks used", ({ blocks_used: used, blocks_total: total }) => (total ? `${shown(used)} of ${total}` : null), "figure"],
  ["Kept", (worker) => worker.blocks_kept, "figure"],
  ["Groups", (worker) => worker.groups_running, "figure"],
  ["Choices", (worker) => worker.choices_running, "figure"],
  ["Waiting", (worker) => worker.choices_waiting, "figure"],
  ["Leases", (worker) => worker.leases, "figure"],
  ["Last decision", (worker) => worker.note ?? worker.last_decision ?? "", "decision"],
];

export class WorkersTab {
  // `view`: {table, rows, columns, totals, adminNote, adminKey, say, fail, clear, requestKey}: its elements, and functions that update the page.
  constructor(view) {
    this.view = view;
    this.shown = new Map();
    this.timer = 0;
    this.reading = false;
    this.failed = false; // true if the last reading failed
    this.guarded = null; // true if the server has an admin key, which every action needs; null until it is known
    for (const [name, , kind = ""] of [["Worker"], ...COLUMNS, ["Action", null, "act"]]) view.columns.append(cell("th", kind, "columnheader", name));
    view.adminKey.addEventListener("click", () => this.changeKey());
  }

  open() {
    this.close();
    this.showKey();
    this.read();
    this.timer = setInterval(() => document.hidden || this.read(), READ_EVERY_MS);
  }

  close() {
    clearInterval(this.timer);
    this.timer = 0;
  }

  // Reads the status, unless the last request for it is still running.
  async read() {
    if (this.reading) return;
    this.reading = true;
    try {
      this.show(await read("status", { signal: AbortSignal.timeout(PATIENCE_MS) }));
      if (this.failed) this.view.clear();
      this.failed = false;
    } catch (error) {
      if (error.status === 401) this.close(); // the reader did not enter a key
      if (!this.failed) this.view.fail(error);
      this.failed = true;
    } finally {
      this.reading = false;
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
    this.view.totals.textContent = `Since the engines started: prefills for another worker ${prefills}, KV transfers ${transfers} ` +
      `(${bytes.toLocaleString("en")} bytes), moves of groups ${migrations}.`;
  }

  showWorker(worker) {
    if (!this.shown.has(worker.id)) this.shown.set(worker.id, this.rowOf(worker.id));
    const { cells, button } = this.shown.get(worker.id);
    COLUMNS.forEach(([, figure], index) => {
      const text = shown(figure(worker));
      if (cells[index].textContent !== text) cells[index].textContent = text;
    });
    const gone = NO_ENGINE.includes(worker.state);
    if (!gone || !button.dataset.does) this.showAction(button, worker);
    button.disabled = gone || (button.dataset.does === "drain" && worker.state === "draining");
  }

  showAction(button, { id, pid }) {
    const [does, text, label] = pid === null ? ["drain", "Drain", "Drain"] : ["kill", "Kill this engine", "Kill the engine of"];
    button.dataset.does = does;
    button.textContent = text;
    button.setAttribute("aria-label", `${label} ${id}`);
  }

  rowOf(id) {
    const element = made("tr");
    element.setAttribute("role", "row"); // it remains a table where its rows are shown as cards
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
      if (this.timer) await this.read();
    } catch (error) {
      this.view.fail(error);
    } finally {
      this.showKey();
    }
  }

  // Requests the admin key from the reader, and tries it so that a wrong key is reported at once; or forgets the key.
  async changeKey() {
    this.view.clear();
    if (keys.admin) keys.admin = "";
    else if (await this.view.requestKey("", "admin")) await this.tryKey();
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
    const { table, adminNote, adminKey } = this.view;
    const note = this.noteOnKey();
    if (adminNote.textContent !== note) adminNote.textContent = note;
    adminKey.textContent = keys.admin ? "Forget the key" : "Enter the key";
    adminKey.hidden = !this.guarded;
    table.classList.toggle("watched", !this.guarded);
  }

  noteOnKey() {
    if (this.guarded === null) return "";
    if (!this.guarded) return "Start the server with --admin-key to drain workers and kill engines here.";
    if (keys.admin) return "The page keeps the admin key until it is closed.";
    return "To drain a worker or kill an engine of this server, enter its admin key.";
  }
}

function cell(tag, kind, role, text = "", column = "") {
  const element = made(tag, kind, text);
  element.setAttribute("role", role);
  if (column) element.dataset.name = column;
  return element;
}

function shown(figure) {
  return String(figure ?? "–"); // silent workers and text upstreams report no figures, and workers on other servers no memory
}
