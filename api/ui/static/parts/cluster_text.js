/** The cluster in one line. */

import { counted, number } from "../core/format.js";

/** Such as "2 nodes, 8 of 16 GPUs free". */
export function clusterText({ nodes }) {
  const alive = nodes.filter((node) => node.alive);
  const lost = nodes.length - alive.length;
  const gpus = alive.filter((node) => node.accelerator === "gpu");
  const sum = (some, name) => some.reduce((total, node) => total + node[name], 0);
  const places = gpus.length ? gpus : alive;
  const slots =
    gpus.length && sum(alive, "slots_total")
      ? ` and ${number(sum(alive, "slots_free"))} of ${number(sum(alive, "slots_total"))} slots`
      : "";
  return `${counted(alive.length, "node")}${lost ? ` (${lost} lost)` : ""}, ${number(sum(places, "free"))} of ${number(sum(places, "total"))} ${gpus.length ? "GPUs" : "slots"}${slots} free`;
}
