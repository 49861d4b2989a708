/** The page's colors for what is drawn on canvases, which know no style sheets. */

import { onThemeChanged } from "../core/theme.js";

const SERIES = [
  "#2f7bf6",
  "#e0960c",
  "#0d9f8c",
  "#9366f0",
  "#d6409f",
  "#6b8e23",
  "#2b95c4",
  "#c2561a",
  "#7a8798",
  "#b03060",
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

/** Have `draw` called when the colors change; returns what ends that. */
export function onColorsChanged(draw) {
  waiting.add(draw);
  return () => waiting.delete(draw);
}

onThemeChanged(() => {
  known = null;
  for (const draw of waiting) draw();
});
