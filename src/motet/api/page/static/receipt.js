// The cost of an answer: the usage from its stream, the times measured here, and the server's counters during this time.

import { made } from "./group.js";
import { read } from "./server.js";

const SUMS = [
  ["prefill_tokens", "prompt tokens computed"],
  ["prefills", "prefills for another worker"],
  ["transfers", "KV transfers"],
  ["transfer_bytes", "bytes transferred"],
  ["migrations", "moves of groups"],
  ["choices_resumed", "choices continued on another worker"],
];

// Returns the server's totals, and the processes over which they are summed; null if the server does not report them.
export async function totals() {
  try {
    const status = await read("status");
    return { sums: status.totals, processes: status.workers.map(({ id, pid, state }) => `${id} ${pid} ${state}`).join() };
  } catch {
    return null;
  }
}

export function receipt(title, result, after) {
  const element = made("section", "receipt");
  const rows = made("dl");
  const row = (name, value, list = rows) => {
    const pair = made("div");
    pair.append(made("dt", "", name), made("dd", "", value));
    list.append(pair);
  };
  const { usage, group, mine, endMs, before } = result;
  const output = usage?.completion_tokens ?? mine.reduce((sum, choice) => sum + choice.tokens, 0);
  const firsts = mine.map((choice) => choice.firstMs).filter((ms) => ms !== null);
  row("prompt tokens", shown(usage?.prompt_tokens));
  row("cached prompt tokens", shown(usage?.prompt_tokens_details?.cached_tokens));
  row("output tokens", shown(output));
  row("time", `${(endMs / 1000).toFixed(2)} s`);
  row("tokens/s", endMs ? shown((1000 * output) / endMs) : "-");
  row("first token of the first choice", seconds(firsts.length ? Math.min(...firsts) : null));
  row("first token of the last choice", seconds(firsts.length ? Math.max(...firsts) : null));
  if (group) row("stopped by", group.stopped_by ?? "no condition: all choices ended by themselves");
  if (group?.vote) row(`majority (${group.vote.count} of ${group.finished})`, group.vote.majority ?? "none");
  const sums = made("dl");
  for (const [name, label] of SUMS) {
    const summed = name === "migrations" || name === "choices_resumed"; // the server counts these, not the engines
    const known = before && after && (summed || before.processes === after.processes);
    row(label, known ? shown(after.sums[name] - before.sums[name]) : "unknown: workers changed", sums);
  }
  element.append(made("h2", "", title), rows, made("h3", "", "All requests to this server during this time"), sums);
  return element;
}

function shown(number) {
  return number == null ? "not reported" : number.toLocaleString("en", { maximumFractionDigits: 1 });
}

function seconds(ms) {
  return ms === null ? "-" : `${(ms / 1000).toFixed(3)} s`;
}
