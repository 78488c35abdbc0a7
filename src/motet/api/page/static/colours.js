// The colour of each worker, as a class of page.css, in the order in which the workers are first shown.

const COLOURS = 8;
const classes = new Map();

export function colourOf(worker) {
  if (!worker) return "";
  if (!classes.has(worker)) classes.set(worker, `w${classes.size % COLOURS}`);
  return classes.get(worker);
}
