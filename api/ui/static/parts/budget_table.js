/** Where a step goes, part by part, the largest first: measured and planned, how it is known, what would help. */

import { bar, fill, h, marked } from "../core/dom.js";
import { duration, percent, sentence } from "../core/format.js";

const LEAST_SHARE = 0.0005; // of a step; what is less reads 0.0%

/** `{element, show(budget)}`; parts are `{name, label, seconds, how, help}`. */
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
      const share = (part) => Math.abs(part.seconds) / budget.step_seconds;
      const [large, none] = [[], []];
      for (const part of budget.parts) (share(part) >= LEAST_SHARE ? large : none).push(part);
      large.sort((one, other) => other.seconds - one.seconds);
      const names = none.map((part) => part.label).join(", ");
      fill(
        element,
        large.map((part) => rowOf(part, planned.get(part.name), budget.step_seconds)),
        names ? h("p", { class: "note" }, `Below ${percent(LEAST_SHARE, 2)}: ${names}.`) : null,
      );
    },
  };
}

function rowOf(part, planned, step) {
  const filled = bar(part.label);
  filled.show(Math.max(0, Math.min(1, part.seconds / step)), part.name === "arithmetic" ? "good" : "active");
  const plan = planned && planned.seconds > 0 ? `planned: ${duration(planned.seconds)}` : "";
  const texts = [part.what ?? part.how, part.help ? `To reduce it: ${part.help}` : "", plan, oddOf(part)];
  const told = texts.filter(Boolean).map((text) => h("p", {}, marked(sentence(text))));
  return h(
    "details",
    { class: "budget-part" },
    h(
      "summary",
      { class: "budget-row" },
      h("b", {}, part.label),
      filled.element,
      h("span", { class: "number" }, duration(part.seconds)),
      h("span", { class: "number" }, percent(part.seconds / step)),
    ),
    h("div", { class: "budget-how" }, told),
  );
}

/** Why a part is less than nothing. */
function oddOf(part) {
  if (part.seconds >= 0) return "";
  return part.name === "products"
    ? "the passes took less time than the peak rate allows: the peak rate of this device is only roughly known"
    : "it overlaps with other parts, which are counted in full";
}
