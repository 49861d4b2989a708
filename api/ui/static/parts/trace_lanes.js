/** A traced step as lanes: a rank a lane, stages by color, bubbles empty, the critical path underlined. */

import { color, seriesColor } from "../charts/colors.js";
import { h } from "../core/dom.js";
import { bytes, duration, words } from "../core/format.js";

const MOST_STAGES = 8; // of which the legend has an entry each

const PASSES = { forward: 0.55, backward: 0.95, backward_input: 0.95, backward_weight: 0.75 };
/** By kind: the color, what the legend calls it, and whether it happens within passes or between them. */
const OTHERS = {
  recompute: ["ink", "recompute", true],
  send: ["warn", "communication", true],
  collective: ["warn", "communication", true],
  receive: ["dim", "waiting for a message", true],
  reduction: ["good", "gradient reduction, parameter gather"],
  gather: ["good", "gradient reduction, parameter gather"],
  optimizer: ["busy", "optimizer, agreement"],
  agreement: ["busy", "optimizer, agreement"],
  loader: ["accent", "input"],
  snapshot: ["idle", "snapshot, checkpoint, validation"],
  checkpoint: ["idle", "snapshot, checkpoint, validation"],
  validation: ["idle", "snapshot, checkpoint, validation"],
};
const OTHERS_ALPHA = 0.7;

/** The lanes of a trace or of a plan in the same shape: `[{name, slices}]`. */
export function lanesOf(trace, { prefix = "rank" } = {}) {
  const critical = new Set((trace.critical_path ?? []).map(([rank, index]) => `${rank}/${index}`));
  return trace.ranks.map((rank) => ({
    name: `${prefix} ${rank.rank}`,
    slices: rank.slices
      .map((slice, index) => sliceOf(slice, critical.has(`${rank.rank}/${index}`)))
      .sort((one, other) => one.start - other.start || other.end - one.end),
  }));
}

function sliceOf(slice, critical) {
  const pass = PASSES[slice.kind];
  const [shade, , inner] = OTHERS[slice.kind] ?? ["idle"];
  return {
    start: slice.start,
    end: slice.end,
    color: pass === undefined ? color(shade) : seriesColor(slice.stage ?? 0),
    alpha: pass ?? OTHERS_ALPHA,
    inner: pass === undefined && inner,
    text: pass === undefined ? "" : `${slice.micro_batch ?? ""}`,
    textAbove: true,
    tip: tipOf(slice),
    critical,
  };
}

/** What the colors of a trace's lanes mean. */
export function traceLegend(trace) {
  const slices = trace.ranks.flatMap((rank) => rank.slices);
  const stages = [...new Set(slices.filter((each) => each.kind in PASSES).map((each) => each.stage ?? 0))];
  const entries = new Map();
  for (const stage of stages.sort((one, other) => one - other).slice(0, MOST_STAGES))
    entries.set(
      `stage ${stage}: forward, backward`,
      [PASSES.forward, PASSES.backward].map((alpha) => [seriesColor(stage), alpha]),
    );
  for (const [kind, [shade, label]] of Object.entries(OTHERS))
    if (slices.some((each) => each.kind === kind)) entries.set(label, [[color(shade), OTHERS_ALPHA]]);
  if (trace.critical_path?.length) entries.set("on the critical path (underlined)", [[color("bad"), 1]]);
  return [
    [...entries].map(([label, swatches]) =>
      h(
        "span",
        { class: "legend-entry" },
        swatches.map(([background, opacity]) => h("i", { class: "swatch", style: { background, opacity } })),
        label,
      ),
    ),
    h("span", { class: "legend-entry" }, "Numbers are micro-batches; empty is waiting."),
  ];
}

function tipOf(slice) {
  const about = [
    slice.name && slice.name !== slice.kind ? `${words(slice.kind)}: ${slice.name}` : words(slice.kind),
    slice.stage !== null && slice.stage !== undefined ? `stage ${slice.stage}` : "",
    slice.micro_batch !== null && slice.micro_batch !== undefined ? `micro-batch ${slice.micro_batch}` : "",
    slice.axis ? `${slice.axis} group` : "",
    slice.bytes ? bytes(slice.bytes) : "",
    slice.wait ? `waited ${duration(slice.wait)}` : "",
  ]
    .filter(Boolean)
    .join(", ");
  return `${about}\n${duration(slice.end - slice.start)}, from ${duration(slice.start)}`;
}

/** First and last time of all slices. */
export function rangeOf(lanes) {
  let [from, to] = [Infinity, -Infinity];
  for (const { slices } of lanes) {
    for (const slice of slices) {
      from = Math.min(from, slice.start);
      to = Math.max(to, slice.end);
    }
  }
  return from < to ? [from, to] : [0, 1];
}
