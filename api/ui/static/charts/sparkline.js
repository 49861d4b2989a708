/** A line of a few numbers, as small as a word. */

import { s, setAttribute } from "../core/dom.js";

const [WIDTH, HEIGHT] = [96, 22];

/** `{element, show(values)}`; values that are null are left out. */
export function sparkline(label) {
  const path = s("path", { fill: "none" });
  const element = s(
    "svg",
    {
      class: "sparkline",
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      width: WIDTH,
      height: HEIGHT,
      role: "img",
      "aria-label": label,
    },
    path,
  );
  return {
    element,
    show(values) {
      const finite = values.filter(Number.isFinite);
      const [low, high] = [Math.min(...finite), Math.max(...finite)];
      const place = (value, at) =>
        `${((at / Math.max(1, finite.length - 1)) * (WIDTH - 2) + 1).toFixed(1)} ${(HEIGHT - 2 - ((value - low) / (high - low || 1)) * (HEIGHT - 4)).toFixed(1)}`;
      setAttribute(path, "d", finite.length < 2 ? null : `M${finite.map(place).join("L")}`);
    },
  };
}
