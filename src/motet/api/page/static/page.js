// The entry of the page: the form, the tabs, the dialog for a key, and the connections between them.

import { colourOf } from "./colours.js";
import { Drawing } from "./drawing.js";
import { Group } from "./group.js";
import { receipt, totals } from "./receipt.js";
import { keys, onKeyNeeded, read } from "./server.js";
import { WorkersTab } from "./workers.js";

const KEPT_S = 300;
const TEMPERATURE = 0.8; // of models that have no default
const MORE = 4;
const SENDABLE = /^[ -~]*$/; // characters that a browser sends in a header unchanged
const at = (id) => document.getElementById(id);
const TABS = [at("tab-generate"), at("tab-workers")];

let group = null;
let sending = false; // true from a click until the last choice has ended

// Announces an event in a sentence that screen readers speak: the start and end of requests, never tokens.
function say(sentence) {
  at("announcement").textContent = sentence;
}

function fail(error) {
  at("problem").textContent = error.message;
  at("problem").hidden = false;
}

function clearProblem() {
  at("problem").hidden = true;
  at("problem").textContent = "";
}

const workers = new WorkersTab({
  table: at("worker-table"), rows: at("worker-rows"), columns: at("columns"), totals: at("totals"),
  adminNote: at("admin-note"), adminKey: at("admin-key"), say, fail, clear: clearProblem, requestKey,
});
const drawing = new Drawing(
  { figure: at("figure"), picture: at("picture"), trunk: at("trunk"), tails: at("tails"), blocks: at("blocks"), legend: at("legend") },
  { onKill: (id) => workers.act(id, "kill"), canKill: () => keys.admin !== "" },
);

// Returns a field's number, or undefined if it is empty.
function number(id) {
  return at(id).value === "" ? undefined : at(id).valueAsNumber;
}

// Returns the body of the request that the form describes. `exact`: true if the model takes tokens. Throws an Error for invalid JSON.
function bodyOfForm({ exact }) {
  const body = {
    model: at("model").value || undefined,
    messages: [{ role: "user", content: at("prompt").value }],
    n: number("n"),
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (exact && at("keep").checked) body.keep_s = KEPT_S;
  if (exact) body.return_token_ids = true;
  else body.group = {}; // without it a model that takes texts has no group that can be found or ended choice by choice
  if (at("shading").checked) body.logprobs = true;
  const schema = at("schema").value.trim();
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "form", schema: parsed(schema) } };
  const [stop, k] = [at("stop").value, number("k")];
  if (stop === "finished") body.group = { stop_when: { finished: k } };
  else if (stop) body.group = { stop_when: { agree: k }, extract: stop, vote: true };
  return body;
}

function parsed(schema) {
  try {
    return JSON.parse(schema);
  } catch (error) {
    throw new Error(`The JSON Schema is not valid JSON: ${error.message}`);
  }
}

async function send() {
  if (sending || group?.open) return;
  sending = true;
  clearProblem();
  showButtons();
  try {
    await sendNew();
  } catch (error) {
    if (error.code === "model_not_found") await listModels(); // for the next attempt
    throw error;
  } finally {
    sending = false;
  }
}

async function sendNew() {
  const status = await read("status");
  if (!at("model").length) await listModels();
  const serving = workersOf(at("model").value, status);
  const kinds = serving.map((worker) => worker.kind);
  const sizes = new Set(serving.map((worker) => worker.block_size).filter(Boolean));
  for (const worker of status.workers) colourOf(worker.id);
  const exact = !kinds.includes("openai");
  const body = bodyOfForm({ exact });
  group?.leave();
  at("choices").replaceChildren();
  at("receipts").replaceChildren();
  drawing.start({ maxTokens: body.max_tokens, blockSize: sizes.size === 1 ? [...sizes][0] : null });
  const view = { list: at("choices"), drawing, say, fail, changed: showButtons };
  group = new Group(view, { shaded: Boolean(body.logprobs), keptS: body.keep_s ?? 0, canGrow: exact });
  await follow(group, "v1/chat/completions", body, { count: body.n ?? 1, title: "Receipt" });
}

// Returns the workers of a model; all workers if none has a model of this name.
function workersOf(model, { workers }) {
  const named = workers.filter((worker) => worker.model === model || worker.models?.includes(model));
  return named.length ? named : workers;
}

async function sendMore() {
  clearProblem();
  const path = `v1/groups/${encodeURIComponent(group.id)}/more`;
  const body = { n: MORE, stream: true, stream_options: { include_usage: true } };
  await follow(group, path, body, { count: MORE, title: `Receipt for ${MORE} more choices` });
}

// Shows the choices while they are generated, then their costs.
async function follow(target, path, body, { count, title }) {
  say(`${count} ${count === 1 ? "choice is" : "choices are"} requested.`);
  const requesting = target.request(path, body, { count, before: totals });
  showButtons();
  showAnswers();
  try {
    const result = await requesting;
    const after = await totals();
    if (target !== group) return;
    at("receipts").append(receipt(title, result, after));
    say(`${count} ${count === 1 ? "choice has" : "choices have"} ended.`);
  } catch (error) {
    const refused = target.choices.size ? "No choices are added." : "No choices are generated.";
    if (target === group) say(error.refused ? refused : "The answer is incomplete.");
    throw error;
  } finally {
    showButtons();
  }
}

function showButtons() {
  at("stop-all").disabled = !group?.open;
  at("more").disabled = !group?.canHaveMore;
  at("send").disabled = sending || Boolean(group?.open);
}

// Scrolls to the answers, since the form fills the screen of a phone.
function showAnswers() {
  if (at("answers").getBoundingClientRect().top > innerHeight / 2) at("answers").scrollIntoView();
}

function handler(action) {
  return (event) => {
    event?.preventDefault();
    action().catch(fail).finally(showButtons);
  };
}

function openTab(tab) {
  for (const other of TABS) {
    const open = other === tab;
    other.setAttribute("aria-selected", open);
    other.tabIndex = open ? 0 : -1;
    at(other.getAttribute("aria-controls")).hidden = !open;
  }
  if (tab.id === "tab-workers") workers.open();
  else workers.close();
}

let openDialog = null;
let defaults = new Map(); // the default values of sampling fields of each model

// Opens the dialog for a key of this server, one at a time. Resolves to false if the reader cancels it.
function requestKey(why, whose) {
  openDialog ??= keyFromDialog(why, whose).finally(() => (openDialog = null));
  return openDialog;
}

function keyFromDialog(why, whose) {
  const dialog = at("key-dialog");
  at("key-label").textContent = whose === "admin" ? "Admin key of this server" : "API key of this server";
  at("key-why").textContent = why;
  at("key-why").hidden = !why;
  const typed = (key) => at("key").setCustomValidity(SENDABLE.test(key) ? "" : "Keys consist of letters, digits and other ASCII characters.");
  at("key").value = "";
  typed("");
  at("key").oninput = () => typed(at("key").value);
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    at("key-form").onsubmit = (event) => {
      event.preventDefault();
      keys[whose] = at("key").value;
      dialog.close("key");
    };
    dialog.onclose = () => {
      at("key").value = "";
      resolve(dialog.returnValue === "key");
      dialog.returnValue = "";
    };
    at("key-cancel").onclick = () => dialog.close();
  });
}

async function listModels() {
  const { data } = await read("v1/models");
  const chosen = at("model").value;
  at("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
  defaults = new Map(data.map((card) => [card.id, card.default_sampling_params ?? {}]));
  showTemperature();
}

// Shows the default temperature of the chosen model, unless the reader has entered another.
function showTemperature() {
  at("temperature").defaultValue = defaults.get(at("model").value)?.temperature ?? TEMPERATURE;
}

function listen() {
  onKeyNeeded(requestKey);
  at("form").addEventListener("submit", handler(send));
  at("more").addEventListener("click", handler(sendMore));
  at("stop-all").addEventListener("click", handler(() => group.stopAll()));
  at("model").addEventListener("change", showTemperature);
  at("stop").addEventListener("change", () => (at("k").disabled = at("stop").value === ""));
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
  });
  for (const tab of TABS) tab.addEventListener("click", () => openTab(tab));
  at("tabs").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = TABS.find((tab) => tab.tabIndex === -1);
    openTab(other);
    other.focus();
  });
  addEventListener("pagehide", () => group?.leave());
}

listen();
handler(listModels)();
