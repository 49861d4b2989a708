/** A traced step as lanes: a rank a lane, stages by colour, bubbles empty, the critical path underlined. Pure but for colours. */

import { color, seriesColor } from "../charts/colors.js";
import { bytes, duration, words } from "../core/format.js";

const PASSES = { forward: 0.55, backward: 0.95, backward_input: 0.95, backward_weight: 0.75 };
const OTHERS = {
  recompute: "idle",
  send: "warn",
  receive: "track",
  collective: "warn",
  reduction: "good",
  agreement: "busy",
  optimizer: "bad",
  gather: "good",
  loader: "dim",
  snapshot: "idle",
  checkpoint: "idle",
  validation: "busy",
};

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
  const text = pass === undefined ? "" : `${slice.micro_batch ?? ""}`;
  const shade = pass === undefined ? color(OTHERS[slice.kind] ?? "idle") : seriesColor(slice.stage ?? 0);
  return {
    start: slice.start,
    end: slice.end,
    color: shade,
    alpha: pass ?? 0.7,
    inner: pass === undefined,
    text,
    tip: tipOf(slice),
    critical,
  };
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
