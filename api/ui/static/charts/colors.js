/** The page's colours for what is drawn on canvases, which know no style sheets. */

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
const dark = matchMedia("(prefers-color-scheme: dark)");
const waiting = new Set();
let known = null;

/** The colour of the n-th line. */
export function seriesColor(place) {
  return SERIES[place % SERIES.length];
}

/** A colour of the style sheet, by the name of its variable: ink, dim, line, panel, good, warn, bad and so on. */
export function color(name) {
  known ??= getComputedStyle(document.documentElement);
  return known.getPropertyValue(`--${name}`).trim();
}

/** Have `draw` called when the colours change; returns what ends that. */
export function onColorsChanged(draw) {
  waiting.add(draw);
  return () => waiting.delete(draw);
}

dark.addEventListener("change", () => {
  known = null;
  for (const draw of waiting) draw();
});
