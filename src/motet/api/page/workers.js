// The workers' tab: what /status tells, every second while it is open, and what an operator may do.

import { colourOf } from "./colours.js";
import { made } from "./group.js";
import { call, read } from "./server.js";

const LOOK_EVERY_MS = 1000;
const NO_ENGINE = ["starting", "dead"];

export class WorkersTab {
  constructor({ rows, totals }, { say, fail }) {
    Object.assign(this, { rows, totals, say, fail });
    this.shown = new Map();
    this.timer = 0;
  }

  open() {
    this.close();
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
      this.show(await read("status"));
    } catch (error) {
      if (error.status === 401) this.close(); // the reader gave no key
      this.fail(error);
    } finally {
      this.looking = false;
    }
  }

  show(status) {
    const ids = status.workers.map((worker) => worker.id);
    for (const [id, row] of this.shown) {
      if (!ids.includes(id)) row.element.remove(), this.shown.delete(id);
    }
    for (const worker of status.workers) this.showWorker(worker);
    const { prefills, transfers, transfer_bytes: bytes, migrations } = status.totals;
    this.totals.textContent = `Since the engines started: prefills for another worker ${prefills}, transfers of KV ${transfers} ` +
      `(${bytes.toLocaleString("en")} bytes), moves of groups ${migrations}.`;
  }

  showWorker(worker) {
    if (!this.shown.has(worker.id)) this.shown.set(worker.id, this.rowOf(worker.id));
    const { cells, button } = this.shown.get(worker.id);
    const words = [
      worker.role ?? "not known", worker.state, `${told(worker.blocks_used)} of ${worker.blocks_total}`, told(worker.blocks_kept),
      told(worker.groups_running), told(worker.choices_running), told(worker.choices_waiting), told(worker.leases),
      worker.note ?? worker.last_decision ?? "",
    ];
    words.forEach((text, place) => {
      if (cells[place].textContent !== String(text)) cells[place].textContent = text;
    });
    button.disabled = NO_ENGINE.includes(worker.state);
    if (button.disabled && button.dataset.does) return; // as it was with an engine
    const [does, word, label] = worker.pid === null ? ["drain", "Drain", "Drain"] : ["kill", "Kill this engine", "Kill the engine of"];
    button.dataset.does = does;
    button.textContent = word;
    button.setAttribute("aria-label", `${label} ${worker.id}`);
  }

  rowOf(id) {
    const element = made("tr");
    const name = made("th");
    name.scope = "row";
    name.append(made("span", `dot ${colourOf(id)}`), id);
    const cells = Array.from({ length: 9 }, () => made("td"));
    const button = made("button");
    button.type = "button";
    button.addEventListener("click", () => this.act(id, button.dataset.does));
    const last = made("td");
    last.append(button);
    element.append(name, ...cells, last);
    this.rows.append(element);
    return { element, cells, button };
  }

  // Drains a worker, or kills an engine of this server.
  async act(id, does) {
    try {
      await call("POST", `workers/${encodeURIComponent(id)}/${does}`, { admin: true });
      this.say(does === "kill" ? `${id} was killed.` : `${id} gets no new groups.`);
      if (this.timer) await this.look();
    } catch (error) {
      this.fail(error);
    }
  }
}

function told(figure) {
  return figure ?? "not known"; // a silent worker tells none
}
