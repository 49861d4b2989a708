/** Every second of a job as one bar, with its classes named below. */

import { fill, h, setText } from "../core/dom.js";
import { duration, ledgerName, ledgerTone, percent } from "../core/format.js";

const SHOWN = 3;

/** `{element, note, show(ledger)}`; `note` is the ledger in one line. */
export function ledgerBar() {
  const bar = h("div", { class: "ledger-bar", role: "img" });
  const names = h("div", { class: "ledger-names" });
  const note = h("span", { class: "note" });
  let shown = "";
  return {
    element: h("div", {}, bar, names),
    note,
    show(ledger) {
      setText(
        note,
        `${duration(ledger.wall_seconds)} ${ledger.closed ? "in all" : "so far"}, goodput ${percent(ledger.goodput)}`,
      );
      const parts = Object.entries(ledger.seconds).filter(([, seconds]) => seconds > 0);
      const text = JSON.stringify(parts);
      if (text === shown || !(ledger.wall_seconds > 0)) return;
      shown = text;
      const share = (seconds) => percent(seconds / ledger.wall_seconds);
      fill(
        bar,
        parts.map(([name, seconds]) =>
          h("div", {
            class: `ledger-part tone-${ledgerTone(name)}`,
            title: `${ledgerName(name)}: ${duration(seconds)}`,
            style: { flexGrow: seconds / ledger.wall_seconds },
          }),
        ),
      );
      bar.setAttribute(
        "aria-label",
        parts.map(([name, seconds]) => `${ledgerName(name)} ${share(seconds)}`).join(", "),
      );
      const isOpen = names.querySelector("details")?.open ?? false;
      fill(names, named(parts, share, isOpen));
    },
  };
}

/** The three largest parts by name, and the others below one that unfolds. */
function named(parts, share, isOpen) {
  const text = (name, seconds) => `${name} ${duration(seconds)} (${share(seconds)})`;
  const one = ([name, seconds]) =>
    h("span", { class: `ledger-name tone-${ledgerTone(name)}` }, text(ledgerName(name), seconds));
  const sorted = parts.toSorted(([, seconds], [, others]) => others - seconds);
  if (sorted.length <= SHOWN + 1) return sorted.map(one);
  const rest = sorted.slice(SHOWN);
  const sum = rest.reduce((total, [, seconds]) => total + seconds, 0);
  const others = h("div", { class: "ledger-names" }, rest.map(one));
  return [
    ...sorted.slice(0, SHOWN).map(one),
    h("details", { open: isOpen }, h("summary", {}, text("other", sum)), others),
  ];
}
