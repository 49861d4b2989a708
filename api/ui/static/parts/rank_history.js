/** The ranks' own times over the last steps: a row of pixels for each rank, so that a slow one is a stripe. */

import { get, optional } from "../core/api.js";
import { color } from "../charts/colors.js";
import { CanvasPen } from "../charts/pen.js";
import { setVisible } from "../core/dom.js";
import { duration, numberOf } from "../core/format.js";
import { MapPanel } from "./map_panel.js";
import { usualOf } from "./rank_grid.js";

const [HEIGHT, LEFT, BOTTOM] = [220, 44, 18];
const SLOW = 1.5; // times the median

/** How an own time is drawn that is `ratio` times the median: the longer, the stronger, and red from SLOW on. */
function shadeOf(ratio) {
  return { shade: color(ratio >= SLOW ? "bad" : "active"), alpha: Math.max(0.06, Math.min(1, (ratio - 0.8) / 1.2)) };
}

/** A panel; `refresh(signal, ranks)` reads what is new. */
export class RankHistory extends MapPanel {
  constructor(id) {
    super(
      "Own time by step",
      "a row for each rank, compared with the median of its stage in the same step",
      "Own time of every rank over the last steps",
    );
    this.id = id;
    this.plot.style.height = `${HEIGHT}px`;
  }

  async refresh(signal, ranks) {
    const answer = await optional(get(`/v1/jobs/${this.id}/ranks/history`, { max_points: 300 }, { signal }));
    if (!answer?.steps?.length) return;
    this.steps = answer.steps;
    this.own = answer.own_seconds.map((row) => row.map(numberOf));
    this.stages = ranks.map((rank) => rank.pipeline);
    this.usual = this.own.map((row) =>
      usualOf(row.map((own_seconds, rank) => ({ pipeline: this.stages[rank], own_seconds }))),
    );
    setVisible(this.element, true);
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width || !this.steps) return;
    const pen = new CanvasPen(this.canvas, width, HEIGHT);
    const count = this.own[0].length;
    this.box = { left: LEFT, w: (width - LEFT) / this.steps.length, h: (HEIGHT - BOTTOM) / count };
    this.own.forEach((row, at) =>
      row.forEach((seconds, rank) => {
        const ratio = seconds / this.usual[at].get(this.stages[rank]);
        if (!Number.isFinite(ratio)) return;
        const { shade, alpha } = shadeOf(ratio);
        pen.rectangle(
          LEFT + at * this.box.w,
          rank * this.box.h,
          Math.ceil(this.box.w),
          Math.max(1, this.box.h - (this.box.h > 4 ? 1 : 0)),
          { color: shade, alpha },
        );
      }),
    );
    for (let rank = 0; rank < count; rank += Math.max(1, Math.ceil(count / 12)))
      pen.text(LEFT - 6, Math.max(6, (rank + 0.5) * this.box.h), String(rank), {
        color: color("dim"),
        align: "right",
        size: 10,
      });
    const texts = { 1: "as the median", 2: "2 times or longer" };
    this.showLegend([1, 1.2, SLOW, 2].map((ratio) => ({ ...shadeOf(ratio), text: texts[ratio] ?? `${ratio} times` })));
    pen.text(LEFT, HEIGHT - 6, `step ${this.steps[0]}`, { color: color("dim"), size: 10 });
    pen.text(width, HEIGHT - 6, `step ${this.steps.at(-1)}`, { color: color("dim"), size: 10, align: "right" });
  }

  textAt(at, rank) {
    const seconds = this.own[at]?.[rank];
    if (seconds === undefined) return undefined;
    const median = duration(this.usual[at].get(this.stages[rank]));
    return `rank ${rank}, step ${this.steps[at]}\nown ${duration(seconds)}, median of its stage ${median}`;
  }
}
