// The page's beginning: the form, the tabs, the dialog for a key, and what goes from one to the other.

import { colourOf } from "./colours.js";
import { Drawing } from "./drawing.js";
import { Group } from "./group.js";
import { receipt, totals } from "./receipt.js";
import { keys, onKeyNeeded, read } from "./server.js";
import { WorkersTab } from "./workers.js";

const KEPT_S = 300;
const MORE = 4;
const SENDABLE = /^[ -~]*$/; // what a browser sends in a header as it stands
const at = (id) => document.getElementById(id);
const TABS = [at("tab-ask"), at("tab-workers")];

let group = null;
let sending = false; // from a click until the last choice is over

// What has just happened, in a sentence that screen readers speak: milestones, never tokens.
function say(words) {
  at("said").textContent = words;
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
  adminSaid: at("admin-said"), adminKey: at("admin-key"), say, fail, clear: clearProblem, askForKey,
});
const drawing = new Drawing(
  { figure: at("figure"), picture: at("picture"), trunk: at("trunk"), tails: at("tails"), blocks: at("blocks"), legend: at("legend") },
  { onKill: (id) => workers.act(id, "kill"), canKill: () => keys.admin !== "" },
);

// Returns a field's number, or undefined if it is empty.
function number(id) {
  return at(id).value === "" ? undefined : at(id).valueAsNumber;
}

// Returns the body of the request that the form describes. `exact`: the model is asked in tokens. Throws an Error if a part of it is no JSON.
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
  else body.group = {}; // else a server that takes texts would not know the group, nor end one choice of it
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
    throw new Error(`The JSON Schema is no JSON: ${error.message}`);
  }
}

async function ask() {
  if (sending || group?.open) return;
  sending = true;
  clearProblem();
  showButtons();
  try {
    await askNew();
  } catch (error) {
    if (error.code === "model_not_found") await listModels(); // for the next try
    throw error;
  } finally {
    sending = false;
  }
}

async function askNew() {
  const status = await read("status");
  if (!at("model").length) await listModels();
  const asked = workersOf(at("model").value, status);
  const kinds = asked.map((worker) => worker.kind);
  const sizes = new Set(asked.map((worker) => worker.block_size).filter(Boolean));
  for (const worker of status.workers) colourOf(worker.id);
  const exact = !kinds.includes("openai");
  const body = bodyOfForm({ exact });
  group?.leave();
  at("choices").replaceChildren();
  at("receipts").replaceChildren();
  drawing.begin({ maxTokens: body.max_tokens, blockSize: sizes.size === 1 ? [...sizes][0] : null });
  const view = { list: at("choices"), drawing, say, fail, changed: showButtons };
  group = new Group(view, { shaded: Boolean(body.logprobs), keptS: body.keep_s ?? 0, canGrow: exact });
  await follow(group, "v1/chat/completions", body, { count: body.n ?? 1, title: "Receipt" });
}

// Returns the workers of a model; all, if none names it so.
function workersOf(model, { workers }) {
  const named = workers.filter((worker) => worker.model === model || worker.models?.includes(model));
  return named.length ? named : workers;
}

async function askMore() {
  clearProblem();
  const path = `v1/groups/${encodeURIComponent(group.id)}/more`;
  const body = { n: MORE, stream: true, stream_options: { include_usage: true } };
  await follow(group, path, body, { count: MORE, title: `Receipt of ${MORE} more` });
}

// Shows choices as they come, then what they have cost.
async function follow(asked, path, body, { count, title }) {
  say(`${count} ${count === 1 ? "choice is" : "choices are"} asked for.`);
  const asking = asked.ask(path, body, { count, before: totals });
  showButtons();
  showAnswers();
  try {
    const told = await asking;
    const after = await totals();
    if (asked !== group) return;
    at("receipts").append(receipt(title, told, after));
    say(`${count} ${count === 1 ? "choice is" : "choices are"} over.`);
  } catch (error) {
    const refused = asked.choices.size ? "No choices are added." : "No choices are written.";
    if (asked === group) say(error.refused ? refused : "The answer is not complete.");
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

// On a phone the form fills the screen: what has been asked for is scrolled to.
function showAnswers() {
  if (at("answers").getBoundingClientRect().top > innerHeight / 2) at("answers").scrollIntoView();
}

function tell(action) {
  return (event) => {
    event?.preventDefault();
    action().catch(fail).finally(showButtons);
  };
}

function openTab(tab) {
  for (const one of TABS) {
    const open = one === tab;
    one.setAttribute("aria-selected", open);
    one.tabIndex = open ? 0 : -1;
    at(one.getAttribute("aria-controls")).hidden = !open;
  }
  if (tab.id === "tab-workers") workers.open();
  else workers.close();
}

let keyAsked = null;

// Asks the reader for a key of this server, once at a time. Resolves to false if there is none to be had.
function askForKey(why, whose) {
  keyAsked ??= askedForKey(why, whose).finally(() => (keyAsked = null));
  return keyAsked;
}

function askedForKey(why, whose) {
  const dialog = at("key-dialog");
  at("key-label").textContent = whose === "admin" ? "Admin key of this server" : "API key of this server";
  at("key-why").textContent = why;
  at("key-why").hidden = !why;
  const typed = (key) => at("key").setCustomValidity(SENDABLE.test(key) ? "" : "Keys have only letters, digits and signs of ASCII.");
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
}

function listen() {
  onKeyNeeded(askForKey);
  at("form").addEventListener("submit", tell(ask));
  at("more").addEventListener("click", tell(askMore));
  at("stop-all").addEventListener("click", tell(() => group.stopAll()));
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
tell(listModels)();
