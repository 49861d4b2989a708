/** Tokens of a job's experts in one step: a row for each layer that has experts, a column for each expert. */

import { get, optional } from "../core/api.js";
import { color } from "../charts/colors.js";
import { CanvasPen } from "../charts/pen.js";
import { h, setText, setVisible } from "../core/dom.js";
import { number } from "../core/format.js";
import { MapPanel } from "./map_panel.js";

const [LEFT, BOTTOM, LEAST_ROW, MOST_ROW, MOST_HEIGHT] = [64, 20, 4, 22, 420]; // pixels
const FEW = 0.5; // times the mean of the layer
const MANY = 1.5;

/** How an expert is drawn that gets `ratio` times the mean of its layer. */
export function shadeOf(ratio) {
  if (ratio >= MANY) return { shade: color("bad"), alpha: Math.min(1, 0.4 + (ratio - MANY) / 3) };
  if (ratio <= FEW) return { shade: color("warn"), alpha: 1 - ratio };
  return { shade: color("active"), alpha: 0.1 + 0.5 * (ratio - FEW) };
}

/** A panel; `refresh(signal)` reads what is new. It stays hidden for a job without experts. */
export class ExpertMap extends MapPanel {
  constructor(id) {
    super(
      "Tokens by expert",
      "a row for each layer with experts, a column for each expert, compared with the mean of its layer",
      "Tokens of every expert",
    );
    this.id = id;
    this.said = h("p", { class: "note" });
    this.plot.after(this.said);
  }

  async refresh(signal) {
    const answer = await optional(get(`/v1/jobs/${this.id}/experts`, {}, { signal }));
    if (!answer?.tokens?.length) return;
    this.shown = answer;
    setVisible(this.element, true);
    setText(this.said, saidOf(answer));
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width || !this.shown) return;
    const { tokens, layers } = this.shown;
    const row = Math.max(LEAST_ROW, Math.min(MOST_ROW, Math.floor(MOST_HEIGHT / layers.length)));
    const height = row * layers.length + BOTTOM;
    this.plot.style.height = `${height}px`;
    const pen = new CanvasPen(this.canvas, width, height);
    const experts = tokens[0].length;
    this.box = { left: LEFT, w: (width - LEFT) / experts, h: row };
    tokens.forEach((counts, at) => {
      const mean = meanOf(counts);
      counts.forEach((count, expert) => {
        const { shade, alpha } = shadeOf(mean ? count / mean : 1);
        const gap = this.box.w > 4 ? 1 : 0;
        pen.rectangle(LEFT + expert * this.box.w, at * row, Math.max(1, this.box.w - gap), row - (row > 4 ? 1 : 0), {
          color: shade,
          alpha,
        });
      });
    });
    const dim = { color: color("dim"), size: 10 };
    for (let at = 0; at < layers.length; at += Math.max(1, Math.ceil(14 / row)))
      pen.text(LEFT - 6, (at + 0.5) * row, `layer ${layers[at]}`, { ...dim, align: "right" });
    pen.text(LEFT, height - 6, "expert 0", dim);
    pen.text(width, height - 6, String(experts - 1), { ...dim, align: "right" });
    const texts = { 0: "no tokens", 1: "the mean", 3: "3 times or more" };
    this.showLegend([0, FEW, 1, MANY, 3].map((ratio) => ({ ...shadeOf(ratio), text: texts[ratio] ?? `${ratio} times` })));
  }

  textAt(expert, at) {
    const count = this.shown.tokens[at]?.[expert];
    if (count === undefined) return undefined;
    const ratio = (count / (meanOf(this.shown.tokens[at]) || 1)).toFixed(2);
    return `layer ${this.shown.layers[at]}, expert ${expert}\n${number(count)} tokens, ${ratio} times the mean`;
  }
}

/** What the picture shows, in words. */
export function saidOf({ step, layers, load }) {
  const most = Math.max(...load);
  return `Step ${number(step)}: the busiest expert gets ${most.toFixed(2)} times the mean of its layer, in layer ${layers[load.indexOf(most)]}.`;
}

function meanOf(counts) {
  return counts.reduce((sum, count) => sum + count, 0) / counts.length;
}
