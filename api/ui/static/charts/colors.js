/** The page's colors for what is drawn on canvases, which know no style sheets. */

import { onThemeChanged } from "../core/theme.js";

const SERIES = [
  "#2f7bf6",
  "#e0960c",
  "#0d9f8c",
  "#9366f0",
  "#d43d3d",
  "#7d9a1f",
  "#e05fae",
  "#8a5a2b",
  "#53b9e6",
  "#7a8798",
];
const waiting = new Set();
let known = null;

/** The color of the n-th line. */
export function seriesColor(place) {
  return SERIES[place % SERIES.length];
}

/** A color of the style sheet, by the name of its variable: ink, dim, line, panel, good, warn, bad and so on. */
export function color(name) {
  known ??= getComputedStyle(document.documentElement);
  return known.getPropertyValue(`--${name}`).trim();
}

/** Black or white, whichever is easier to read on `fill` (#rrggbb) that is drawn with `alpha` on a panel. */
export function inkOn(fill, alpha = 1) {
  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
  const ground = channels(color("panel"));
  const linear = channels(fill).map((value, at) => {
    const shown = value * alpha + ground[at] * (1 - alpha);
    return shown <= 0.04045 ? shown / 12.92 : ((shown + 0.055) / 1.055) ** 2.4; // as WCAG 2.1 defines luminance
  });
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.179 ? "#000" : "#fff"; // where the contrasts with both are equal
}

/** Have `draw` called when the colors change; returns what ends that. */
export function onColorsChanged(draw) {
  waiting.add(draw);
  return () => waiting.delete(draw);
}

onThemeChanged(() => {
  known = null;
  for (const draw of waiting) draw();
});
