// A colour for each worker, by its class in page.css: the first one seen has the first.

const COLOURS = 8;
const seen = new Map();

export function colourOf(worker) {
  if (!worker) return "";
  if (!seen.has(worker)) seen.set(worker, `w${seen.size % COLOURS}`);
  return seen.get(worker);
}
