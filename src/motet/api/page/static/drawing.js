// The picture of a group: the trunk that all choices share, and their tails, drawn to the same scale.

import { colourOf } from "./colours.js";
import { made } from "./group.js";

const MIN_MARKED_PX = 5; // narrower blocks are not marked
const PICTURE_PX = 168;

export class Drawing {
  // `onKill`: called with the id of a worker. `canKill()`: true if the reader has the key for it.
  constructor({ figure, picture, trunk, tails, blocks, legend }, { onKill, canKill }) {
    Object.assign(this, { figure, picture, trunk, tails, blocks, legend, onKill, canKill });
    this.rows = new Map();
    this.chips = new Map();
  }

  // `maxTokens`: maximum number of tokens of a choice, if known. `blockSize`: tokens of a KV block, null if no worker reports it.
  start({ maxTokens, blockSize }) {
    this.maxTokens = maxTokens;
    this.blockSize = blockSize;
    this.rows.clear();
    this.chips.clear();
    this.tails.replaceChildren();
    this.legend.replaceChildren();
    this.blocks.textContent = "";
    this.figure.hidden = true;
  }

  show(group) {
    const prompt = group.promptTokens;
    this.figure.hidden = prompt === null;
    if (prompt === null) return;
    const choices = [...group.choices.values()];
    const longest = Math.max(16, ...choices.map((choice) => choice.tokens));
    const expected = this.maxTokens ?? 2 ** Math.ceil(Math.log2(longest));
    const scale = this.picture.clientWidth / (prompt + Math.max(expected, longest));
    const marked = this.blockSize && this.blockSize * scale >= MIN_MARKED_PX;
    this.picture.classList.toggle("marked", Boolean(marked));
    set(this.picture, "--scale", `${scale}px`);
    set(this.picture, "--block", `${(this.blockSize ?? 1) * scale}px`);
    set(this.picture, "--height", `${Math.max(2, Math.min(14, PICTURE_PX / choices.length))}px`);
    set(this.trunk, "--tokens", prompt);
    for (const [choice, row] of this.rows) {
      if (!choices.includes(choice)) row.remove(), this.rows.delete(choice);
    }
    for (const choice of choices) this.showTail(choice);
    this.showSizes(prompt, choices);
    this.showLegend(choices);
  }

  showTail(choice) {
    if (!this.rows.has(choice)) {
      this.rows.set(choice, made("div", "tail"));
      this.tails.append(this.rows.get(choice));
    }
    const row = this.rows.get(choice);
    row.classList.toggle("over", choice.state === "over");
    while (row.children.length < choice.parts.length) row.append(made("span"));
    choice.parts.forEach((part, index) => {
      row.children[index].className = colourOf(part.worker);
      set(row.children[index], "--tokens", part.tokens);
    });
  }

  showSizes(prompt, choices) {
    const size = this.blockSize;
    const output = choices.reduce((sum, choice) => sum + choice.tokens, 0);
    const started = choices.filter((choice) => choice.tokens > 0);
    let sizes = `Trunk: ${prompt} prompt tokens. Tails: ${output} tokens of ${started.length} choices. `;
    if (size) {
      const trunk = Math.ceil(prompt / size);
      const tails = blocksOf(started, size, 0);
      const held = blocksOf(started.filter((choice) => choice.state === "writing"), size, 0);
      const alone = blocksOf(started, size, prompt);
      sizes += `In KV blocks of ${size} tokens: ${trunk} + ${tails} (${held} of unfinished choices); ` +
        `without sharing: ${alone}.`;
    } else {
      sizes += "The workers do not report the size of their KV blocks.";
    }
    this.blocks.textContent = sizes;
    this.picture.setAttribute("aria-label", sizes);
  }

  showLegend(choices) {
    for (const worker of choices.flatMap((choice) => choice.parts.map((part) => part.worker))) {
      if (!worker || this.chips.has(worker)) continue;
      const chip = made("span");
      const button = made("button", "alarming", `Kill ${worker}`);
      button.type = "button";
      button.addEventListener("click", () => this.onKill(worker));
      chip.append(made("span", `dot ${colourOf(worker)}`), worker, " ", button);
      this.chips.set(worker, button);
      this.legend.append(chip);
    }
    for (const button of this.chips.values()) button.hidden = !this.canKill();
  }
}

function blocksOf(choices, size, before) {
  return choices.reduce((sum, choice) => sum + Math.ceil((before + choice.tokens) / size), 0);
}

function set(element, name, value) {
  element.style.setProperty(name, value);
}
