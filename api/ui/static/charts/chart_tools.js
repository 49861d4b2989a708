/** The tools of a chart: icons with their names, which narrow charts leave out. */

import { h, s } from "../core/dom.js";
import { menu } from "../core/menu.js";

const ICONS = {
  log: "M2 2v12h12M4 12c5 0 8-3 9-9",
  reset: "M13 8a5 5 0 1 1-2-4M11 1v3H8",
  full: "M2 6V2h4M10 2h4v4M14 10v4h-4M6 14H2v-4",
  download: "M8 2v8M5 7l3 3 3-3M2 13h12",
};

function icon(name) {
  return s(
    "svg",
    { class: "icon", viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true" },
    s("path", { d: ICONS[name] }),
  );
}

/** A button of the chart `title`. */
export function tool(name, label, title, act) {
  const named = { title: label, "aria-label": `${label}: ${title}` };
  return h("button", { class: "plain tool", ...named, onclick: act }, icon(name), h("span", {}, label));
}

/** The menu that downloads a chart; `act(kind)` with png, svg or csv. */
export function downloadTool(title, act) {
  const list = menu(`Download: ${title}`, {
    title: "Download",
    entries: ["png", "svg", "csv"].map((kind) => [kind, kind.toUpperCase()]),
    classes: "plain",
    act,
  });
  return h("span", { class: "tool", title: "Download" }, icon("download"), list);
}
