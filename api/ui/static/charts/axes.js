/** What is around the lines of a chart: its axes, and marks of what happened. */

import { clock } from "../core/format.js";
import { color } from "./colors.js";
import { X_AXES } from "./group.js";
import { tickTexts, ticks, timeTicks } from "./scale.js";

/** The axis below: moments, steps or tokens, whichever `measure` says. */
export function paintX(pen, box, x, measure) {
  const time = measure === "time";
  const values = time
    ? timeTicks(x.low, x.high, box.w / 90)
    : ticks(x.low, x.high, box.w / 90, { whole: measure === "step" });
  const days = x.high - x.low > 86_400;
  const texts = time ? values.map((value) => clock(1000 * value, days).slice(0, days ? 11 : 8)) : tickTexts(values);
  pen.rectangle(box.x, box.y + box.h, box.w, 1, { color: color("line") });
  values.forEach((value, place) =>
    pen.text(x.place(value), box.y + box.h + 13, texts[place], { color: color("dim"), align: "center" }),
  );
  pen.text(box.x + box.w, box.y + box.h + 27, X_AXES[measure].label, {
    color: color("dim"),
    align: "right",
    size: 10,
  });
}

/** One of the axes beside; `place` 0 is at the left, 1 at the right. */
export function paintY(pen, box, y, axis, place) {
  const values = ticks(y.low, y.high, box.h / 45, { log: y.log });
  const texts = axis.format ? values.map(axis.format) : tickTexts(values);
  values.forEach((value, at) => {
    const height = y.place(value);
    if (place === 0) pen.rectangle(box.x, height, box.w, 1, { color: color("line"), alpha: 0.6 });
    pen.text(place === 0 ? box.x - 7 : box.x + box.w + 7, height, texts[at], {
      color: color("dim"),
      align: place === 0 ? "right" : "left",
    });
  });
  pen.text(place === 0 ? box.x : box.x + box.w, box.y + box.h + 27, axis.label, {
    color: color("dim"),
    align: place === 0 ? "left" : "right",
    size: 10,
  });
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
