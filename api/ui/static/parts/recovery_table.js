/** What failures cost: one line a recovery, newest first. */

import { KeyedRows, emptyNote, fill, h, setVisible, table } from "../core/dom.js";
import { UNKNOWN, clock, counted, duration, nodeName, number, phaseName, utc } from "../core/format.js";

/** Seconds of a recovery, times the ranks that waited: what it cost, in device hours. */
function lostHours(recovery) {
  return (recovery.total_seconds * (recovery.kept + recovery.forked.length)) / 3600;
}

/** All recoveries in a sentence. */
export function costSentence(recoveries) {
  if (recoveries.length === 0) return "";
  const over = recoveries.filter((each) => each.total_seconds !== null);
  const underWay = over.length < recoveries.length ? "A recovery is under way." : "";
  if (over.length === 0) return underWay;
  const seconds = over.reduce((sum, each) => sum + each.total_seconds, 0);
  const lost = over.reduce((sum, each) => sum + (each.steps_redone ?? 0), 0);
  const hours = over.reduce((sum, each) => sum + lostHours(each), 0);
  const device = hours >= 0.1 ? `${hours.toFixed(1)} rank hours` : `${(hours * 3600).toFixed(1)} rank seconds`;
  const again = lost ? `${counted(lost, "step was", "steps were")} lost and done again` : "no step was lost";
  return `${counted(over.length, "recovery", "recoveries")} took ${duration(seconds)} from failure to the next step (${device}); ${again}. ${underWay}`;
}

/** Heading of a column of generations. */
export function generationHeading() {
  return h("abbr", { title: "Generation: the run of all ranks between two (re)starts" }, "Gen.");
}

/** `{element, show(recoveries)}`. */
export function recoveryTable() {
  const headings = [
    "Time",
    generationHeading(),
    "What failed",
    "Replaced",
    "State from",
    "Phases",
    "Steps lost",
    "Total",
    "Rank time",
  ];
  const { element, body } = table(headings, { classes: "recoveries", label: "Recoveries" });
  const none = emptyNote("No recoveries.");
  const rows = new KeyedRows(body, (each) => each.generation, row);
  return {
    element: h("div", {}, none, element),
    show(recoveries) {
      setVisible(none, recoveries.length === 0);
      setVisible(element, recoveries.length > 0);
      rows.show([...recoveries].sort((one, other) => other.generation - one.generation));
    },
  };
}

function row() {
  const element = h("tr");
  let shown = "";
  return {
    element,
    show(recovery) {
      const text = JSON.stringify(recovery);
      if (text === shown) return;
      shown = text;
      const all = recovery.kept + recovery.forked.length;
      fill(
        element,
        h("td", { class: "mono moment", title: utc(recovery.time) }, clock(recovery.time)),
        h("td", { class: "number" }, number(recovery.generation)),
        h(
          "td",
          { class: "message" },
          recovery.cause,
          recovery.node ? h("div", { class: "note", title: recovery.node }, `node ${nodeName(recovery.node)}`) : null,
        ),
        h("td", {}, `${recovery.forked.length} of ${all}`),
        h("td", {}, `${recovery.source}, step ${number(recovery.resume_step)}`),
        h("td", { class: "phases" }, phaseBar(recovery)),
        h("td", { class: "number" }, number(recovery.steps_redone)),
        h("td", { class: "number" }, duration(recovery.total_seconds)),
        h("td", { class: "number" }, duration(recovery.total_seconds === null ? null : recovery.total_seconds * all)),
      );
    },
  };
}

const PHASE_TONES = { detect: "bad", rest: "warn", re_form: "busy", restore: "active", redo: "idle" };

function phaseBar(recovery) {
  const phases = Object.entries(recovery.seconds);
  const text = phases
    .map(([name, seconds]) => `${phaseName(name)} ${seconds === null ? UNKNOWN : duration(seconds)}`)
    .join(", ");
  const parts = phases
    .filter(([, seconds]) => seconds > 0)
    .map(([name, seconds]) =>
      h("div", { class: `ledger-part tone-${PHASE_TONES[name] ?? "idle"}`, style: { flexGrow: seconds } }),
    );
  return h(
    "div",
    { title: text },
    h("div", { class: "ledger-bar thin", role: "img", "aria-label": text }, parts),
    h("div", { class: "note" }, text),
  );
}
