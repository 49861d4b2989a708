/** The values of a chart's lines at its cursor, in a box beside it. */

import { fill, h, setVisible } from "../core/dom.js";
import { UNKNOWN, clock } from "../core/format.js";
import { X_AXES } from "./group.js";
import { nearest } from "./scale.js";

const GAP = 12;
const REACH = 8; // pixels from which the cursor jumps to a point of a sparse line

/** The box; `element` goes into the chart's plot. */
export class ChartTip {
  constructor() {
    this.element = h("div", { class: "chart-tip", hidden: true });
  }

  hide() {
    setVisible(this.element, false);
  }

  /** Show the values of `lines` at `x`, which `axis` measures and `write(value)` writes. */
  show(lines, x, axis, write, isHere) {
    const place = axis === "time" ? clock(1000 * x) : `${X_AXES[axis].label} ${x.toLocaleString("en-US")}`;
    const row = (line) => {
      const mark = h("span", { class: "key-mark" });
      mark.style.background = line.color;
      return h("div", {}, mark, h("span", { class: "tip-name" }, line.name), h("b", {}, valueText(line, x, write)));
    };
    fill(this.element, h("div", { class: "tip-head" }, place), lines.map(row));
    this.element.classList.toggle("quiet", !isHere);
    setVisible(this.element, true);
  }

  /** Put it beside the pixel `left`, where it covers the fewest of the `points`, each `[x, y]`. */
  settle(left, box, points) {
    const [width, height] = [this.element.offsetWidth, this.element.offsetHeight];
    const sides = [left + GAP, left - GAP - width].filter((at) => at >= 0 && at + width <= box.x + box.w + GAP);
    const heights = [box.y + 4, Math.max(box.y + 4, box.y + box.h - height - 4)];
    const places = (sides.length ? sides : [box.x]).flatMap((x) => heights.map((y) => [x, y]));
    const covered = ([x, y]) =>
      points.filter(([px, py]) => px >= x && px <= x + width && py >= y - 4 && py <= y + height + 4).length;
    const [x, y] = places.reduce((best, each) => (covered(each) < covered(best) ? each : best));
    Object.assign(this.element.style, { left: `${x}px`, top: `${y}px` });
  }
}

/** The x of the known value that the cursor shows at `x`: that of a point of a sparse line, where one is near; null: none. */
export function cursorPlace(lines, x, scaled) {
  const near = (sparse) =>
    lines
      .filter((line) => Boolean(line.sparse) === sparse)
      .map((line) => line.x[nearestKnown(line, x)])
      .filter((each) => each !== undefined)
      .sort((one, other) => Math.abs(one - x) - Math.abs(other - x))[0];
  const [point, other] = [near(true), near(false)];
  const isNear = point !== undefined && Math.abs(scaled(point) - scaled(x)) <= REACH;
  return (isNear ? point : (other ?? point)) ?? null;
}

/** The value of a line at `x`, and its smoothed one; nothing of a sparse line that has none just there. */
function valueText(line, x, write) {
  const place = nearestKnown(line, x);
  if (place < 0 || (line.sparse && line.x[place] !== x) || x < line.x[0] || x > line.x.at(-1)) return UNKNOWN;
  const raw = write(line.y[place]);
  return line.smooth ? `${write(line.smooth[place])} (raw ${raw})` : raw;
}

function nearestKnown(line, x) {
  if (!line.sparse) return nearest(line.x, x);
  let best = -1;
  for (let at = 0; at < line.x.length; at += 1) {
    if (Number.isFinite(line.y[at]) && (best < 0 || Math.abs(line.x[at] - x) < Math.abs(line.x[best] - x))) best = at;
  }
  return best;
}
