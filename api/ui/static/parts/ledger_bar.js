/** Every second of a job as one bar, with its classes named below. */

import { fill, h, setText } from "../core/dom.js";
import { duration, ledgerTone, percent, words } from "../core/format.js";

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
            title: `${words(name)}: ${duration(seconds)}`,
            style: { flexGrow: seconds / ledger.wall_seconds },
          }),
        ),
      );
      bar.setAttribute("aria-label", parts.map(([name, seconds]) => `${words(name)} ${share(seconds)}`).join(", "));
      fill(
        names,
        parts.map(([name, seconds]) =>
          h(
            "span",
            { class: `ledger-name tone-${ledgerTone(name)}` },
            `${words(name)} ${duration(seconds)} (${share(seconds)})`,
          ),
        ),
      );
    },
  };
}
