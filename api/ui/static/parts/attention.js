/** What somebody should know of a job without looking for it. Pure functions. */

import { counted, duration, number, sentence } from "../core/format.js";

/**
 * Sentences about a job as it is now, of its ranks and events: `[{text, tone, tab}]`, the worst first. `tab` is where more
 * is to be seen.
 */
export function attention(job, ranks, events) {
  const found = [...slowRanks(ranks), ...missingRanks(job, ranks), ...drift(events), ...nonfinite(job)];
  const order = ["bad", "warn", "idle"];
  return found.sort((one, other) => order.indexOf(one.tone) - order.indexOf(other.tone));
}

function slowRanks(ranks) {
  return ranks
    .filter((rank) => rank.straggler)
    .map((rank) => ({ text: sentence(rank.straggler.sentence), tone: "bad", tab: "ranks" }));
}

function missingRanks(job, ranks) {
  const gone = ranks.filter((rank) => rank.state === "exited");
  if (gone.length === 0 || gone.length === ranks.length || job.state !== "RUNNING") return [];
  return [
    {
      text: `${counted(gone.length, "rank has", "ranks have")} exited: ${gone
        .slice(0, 8)
        .map((rank) => rank.rank)
        .join(", ")}.`,
      tone: "bad",
      tab: "ranks",
    },
  ];
}

/** Told once a layout: it holds until the layout changes. */
function drift(events) {
  const last = events.findLast(
    (event) => event.type === "plan_drift" || (event.type === "state_changed" && event.data.to === "RESIZING"),
  );
  return last?.type === "plan_drift" ? [{ text: last.message, tone: "warn", tab: "step" }] : [];
}

function nonfinite(job) {
  const loss = job.metrics.latest.loss;
  return typeof loss === "string"
    ? [{ text: `The loss of step ${number(job.step)} is ${loss}.`, tone: "bad", tab: "charts" }]
    : [];
}

/** What a rank's own time says beside its peers', in a sentence; empty where nothing is known. */
export function slownessOf(rank, usual) {
  if (!Number.isFinite(rank.own_seconds) || !(usual > 0)) return "";
  const ratio = rank.own_seconds / usual;
  const text = `its own work takes ${duration(rank.own_seconds)} a step, the median of its stage ${duration(usual)}`;
  return ratio > 1.2 ? `${text}: ${ratio.toFixed(1)} times as long` : text;
}
