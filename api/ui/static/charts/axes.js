/** What is around the lines of a chart: its axes, and marks of what happened. */

import { clock } from "../core/format.js";
import { color } from "./colors.js";
import { X_AXES } from "./group.js";
import { byteTicks, styleOf, tickTexts, ticks, timeTicks } from "./scale.js";

/** The axis below: moments, steps or tokens, whichever `measure` says. */
export function paintX(pen, box, x, measure) {
  const time = measure === "time";
  const values = time
    ? timeTicks(x.low, x.high, box.w / 75)
    : ticks(x.low, x.high, box.w / 60, { whole: measure === "step" });
  const days = x.high - x.low > 86_400;
  const texts = time ? values.map((value) => clock(1000 * value, days).slice(0, days ? 11 : 8)) : tickTexts(values);
  pen.rectangle(box.x, box.y + box.h, box.w, 1, { color: color("line") });
  values.forEach((value, place) => {
    const half = pen.textWidth(texts[place]) / 2;
    const at = Math.min(x.place(value), pen.width - half - 2);
    pen.text(at, box.y + box.h + 13, texts[place], { color: color("dim"), align: "center" });
  });
  pen.text(box.x + box.w, box.y + box.h + 27, X_AXES[measure].label, {
    color: color("dim"),
    align: "right",
    size: 10,
  });
}

/**
 * The ticks of an axis from `low` to `high` that is `height` pixels high: `{values, texts, write}`, where `write(value)`
 * writes other values in the same way. `style` is one of STYLES.
 */
export function ticksOfY(low, high, height, style, log) {
  const values = (style === "bytes" ? byteTicks : ticks)(low, high, height / 45, { log });
  const write = styleOf(values, style);
  return { values, texts: tickTexts(values, write), write };
}

/** The axis beside, with its ticks. */
export function paintY(pen, box, y, label, { values, texts }) {
  values.forEach((value, at) => {
    const height = y.place(value);
    pen.rectangle(box.x, height, box.w, 1, { color: color("line"), alpha: 0.6 });
    pen.text(box.x - 7, height, texts[at], { color: color("dim"), align: "right" });
  });
  pen.text(box.x, box.y + box.h + 27, label, { color: color("dim"), size: 10 });
}

/** What happened at some x: a dashed line each, with its label where there is room. */
export function paintMarks(pen, box, x, marks) {
  let free = -Infinity;
  for (const mark of marks) {
    const at = x.place(mark.x);
    if (!(at >= box.x && at <= box.x + box.w)) continue;
    pen.line([at, at], [box.y, box.y + box.h], { color: color(mark.tone ?? "warn"), dash: [4, 3] });
    if (at < free || !mark.label) continue;
    const width = pen.textWidth(mark.label, 10);
    const fits = at + width + 5 < box.x + box.w;
    pen.text(fits ? at + 4 : at - 4, box.y + 6, mark.label, {
      color: color(mark.tone ?? "warn"),
      size: 10,
      align: fits ? "left" : "right",
    });
    free = at + width + 10;
  }
}
