/** Where a step goes, part by part: measured and planned, how it is known, what would help. */

import { bar, fill, h } from "../core/dom.js";
import { duration, percent, sentence, words } from "../core/format.js";

/** `{element, show(budget)}`; parts are `{name, seconds, fraction, how, help}`. */
export function budgetTable() {
  const element = h("div", { class: "budget" });
  let shown = "";
  return {
    element,
    show(budget) {
      const text = JSON.stringify(budget);
      if (text === shown) return;
      shown = text;
      const planned = new Map((budget.planned ?? []).map((part) => [part.name, part]));
      fill(
        element,
        budget.parts.map((part) => rowOf(part, planned.get(part.name), budget.step_seconds)),
      );
    },
  };
}

function rowOf(part, planned, step) {
  const filled = bar(words(part.name));
  filled.show(Math.max(0, Math.min(1, part.seconds / step)), part.name === "arithmetic" ? "good" : "active");
  const plan = planned && planned.seconds > 0 ? `Planned: ${duration(planned.seconds)}` : "";
  const texts = [part.what ?? part.how, part.help ? `What helps: ${part.help}` : "", plan]
    .filter(Boolean)
    .map(sentence)
    .join(" ");
  return h(
    "div",
    { class: "budget-row" },
    h("b", {}, words(part.name)),
    filled.element,
    h("span", { class: "number" }, duration(part.seconds)),
    h("span", { class: "number" }, percent(part.seconds / step)),
    texts ? h("div", { class: "budget-how" }, texts) : null,
  );
}
