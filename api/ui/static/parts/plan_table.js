/** What a step was planned to take beside what steps take. */

import { fill, h, table } from "../core/dom.js";
import { bytes, counted, duration, layout, number, percent, sentence, signed, words } from "../core/format.js";

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
        fill(element, h("p", { class: "empty-note" }, sentence(plan.problem ?? "Nothing is planned yet.")));
      else fill(element, contents(plan));
    },
  };
}

function contents({ planned, measured, compared, drift, generation }) {
  const { element, body } = table(["", "Planned", "Measured", "Difference"], { label: "Planned and measured" });
  const row = (name, one, other, write) =>
    h(
      "tr",
      {},
      [name, write(one), other === null ? "–" : write(other), other && one ? signed(other / one - 1) : "–"].map(
        (cell) => h("td", { class: "number" }, cell),
      ),
    );
  const memory = planned.has_gpus
    ? [row("memory of a rank", planned.memory_bytes.total, measured?.memory_bytes ?? null, bytes)]
    : [];
  fill(
    body,
    row("step", planned.step_seconds, measured?.step_seconds ?? null, duration),
    memory,
    compared.map((part) => row(words(part.name), part.planned, part.measured, duration)),
  );
  const from = measured ? `, measured over steps ${number(measured.first_step)} to ${number(measured.last_step)}` : "";
  return [
    drift ? h("p", { class: "kind tone-warn" }, drift.message) : null,
    element,
    h(
      "p",
      { class: "note" },
      `Generation ${generation}${from}.${planned.assumed ? " Nothing was measured or fitted on such a machine: `manta calibrate` does." : ""}`,
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
