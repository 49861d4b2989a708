/** What a step was planned to take beside what steps take. */

import { fill, h, marked, table } from "../core/dom.js";
import { bytes, counted, duration, layout, number, percent, sentence, signed } from "../core/format.js";

/** `{element, show(plan)}`, of `GET /v1/jobs/{id}/plan`. */
export function planTable() {
  const element = h("div");
  let shown = "";
  return {
    element,
    show(plan) {
      const text = JSON.stringify(plan);
      if (text === shown) return;
      shown = text;
      if (!plan.planned)
        fill(element, h("p", { class: "empty-note" }, marked(sentence(plan.problem ?? "No plan yet."))));
      else fill(element, contents(plan));
    },
  };
}

/** A ratio to the plan: as a percentage, or where that would be hard to read, as a factor. */
function differenceOf(ratio) {
  return ratio >= 3 ? `${number(ratio)} times` : signed(ratio - 1);
}

function contents({ planned, measured, compared, drift, generation }) {
  const { element, body } = table(["Part", "Planned", "Measured", "Difference"], { label: "Planned and measured" });
  const row = (name, one, other, write) =>
    h(
      "tr",
      {},
      [name, write(one), other === null ? "–" : write(other), other && one ? differenceOf(other / one) : "–"].map(
        (cell) => h("td", { class: "number" }, cell),
      ),
    );
  const memory = planned.has_gpus
    ? [row("memory of the fullest rank", planned.memory_bytes.total, measured?.memory_bytes ?? null, bytes)]
    : [];
  fill(
    body,
    row("whole step", planned.step_seconds, measured?.step_seconds ?? null, duration),
    memory,
    compared.map((part) => row(part.label, part.planned, part.measured, duration)),
  );
  const from = measured
    ? `; measured: median of steps ${number(measured.first_step)} to ${number(measured.last_step)}`
    : "; nothing measured yet";
  return [
    drift ? h("p", { class: planned.assumed ? "note" : "kind tone-warn" }, marked(sentence(drift.message))) : null,
    element,
    h(
      "p",
      { class: "note" },
      marked(
        `Planned for generation ${generation}${from}.${planned.assumed ? " The plan uses default efficiency for this hardware and is a rough estimate; `manta calibrate` makes it realistic." : ""}`,
      ),
    ),
    planned.sizes.length > 1
      ? h(
          "p",
          { class: "note" },
          `If it loses ranks, it continues as ${planned.sizes.map((size) => `${layout(size.parallel)} on ${counted(size.gpus, "rank")}`).join(", ")}.`,
        )
      : null,
  ];
}
