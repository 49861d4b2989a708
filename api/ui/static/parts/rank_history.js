/** The ranks' own times over the last steps: a row of pixels for each rank, so that a slow one is a stripe. */

import { get, optional } from "../core/api.js";
import { color, onColorsChanged } from "../charts/colors.js";
import { CanvasPen } from "../charts/pen.js";
import { fill, h, panel, setText, setVisible } from "../core/dom.js";
import { duration, numberOf } from "../core/format.js";
import { usualOf } from "./rank_grid.js";

const [HEIGHT, LEFT, BOTTOM] = [220, 44, 18];
const SLOW = 1.5; // times the median

/** How an own time is drawn that is `ratio` times the median: the longer, the stronger, and red from SLOW on. */
function shadeOf(ratio) {
  return { shade: color(ratio >= SLOW ? "bad" : "active"), alpha: Math.max(0.06, Math.min(1, (ratio - 0.8) / 1.2)) };
}

/** A panel; `refresh(signal, ranks)` reads what is new. */
export class RankHistory {
  constructor(id) {
    this.id = id;
    const { element, body } = panel("Own time by step", {
      note: "a row for each rank, compared with the median of its stage in the same step",
    });
    this.canvas = h("canvas", { class: "lane-canvas" });
    this.tip = h("div", { class: "chart-tip", hidden: true });
    this.plot = h(
      "div",
      {
        class: "lane-plot",
        role: "img",
        "aria-label": "Own time of every rank over the last steps",
        onpointermove: (event) => this.hover(event),
        onpointerleave: () => setVisible(this.tip, false),
      },
      this.canvas,
      this.tip,
    );
    this.plot.style.height = `${HEIGHT}px`;
    this.legend = h("div", { class: "legend" });
    body.append(this.plot, this.legend);
    this.element = element;
    setVisible(element, false);
    this.unwatch = onColorsChanged(() => this.draw());
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.plot);
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
    this.box = { x: LEFT, w: (width - LEFT) / this.steps.length, h: (HEIGHT - BOTTOM) / count };
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
    this.showLegend();
    pen.text(LEFT, HEIGHT - 6, `step ${this.steps[0]}`, { color: color("dim"), size: 10 });
    pen.text(width, HEIGHT - 6, `step ${this.steps.at(-1)}`, { color: color("dim"), size: 10, align: "right" });
  }

  showLegend() {
    const entries = [1, 1.2, SLOW, 2].map((ratio) => {
      const { shade, alpha } = shadeOf(ratio);
      const text = ratio === 1 ? "as the median" : `${ratio}${ratio === 2 ? " times or longer" : " times"}`;
      return h(
        "span",
        { class: "legend-entry" },
        h("i", { class: "swatch", style: { background: shade, opacity: alpha } }),
        text,
      );
    });
    fill(this.legend, entries);
  }

  hover(event) {
    if (!this.box) return;
    const bounds = this.plot.getBoundingClientRect();
    const at = Math.floor((event.clientX - bounds.left - LEFT) / this.box.w);
    const rank = Math.floor((event.clientY - bounds.top) / this.box.h);
    const seconds = this.own[at]?.[rank];
    setVisible(this.tip, seconds !== undefined);
    if (seconds === undefined) return;
    setText(
      this.tip,
      `rank ${rank}, step ${this.steps[at]}\nown ${duration(seconds)}, median of its stage ${duration(this.usual[at].get(this.stages[rank]))}`,
    );
    Object.assign(this.tip.style, {
      left: `${Math.min(event.clientX - bounds.left + 12, bounds.width - 260)}px`,
      top: `${Math.min(event.clientY - bounds.top + 10, HEIGHT - 50)}px`,
    });
  }

  close() {
    this.unwatch();
    this.observer.disconnect();
  }
}
