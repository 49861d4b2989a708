/** Memory of the ranks: what the plan says by part and stage, and what the ranks use. */

import { get, optional, send } from "../../core/api.js";
import { fill, h, panel, setText, table } from "../../core/dom.js";
import { bytes, number } from "../../core/format.js";
import { JobCharts } from "../../parts/job_charts.js";
import { memoryBars } from "../../parts/memory_bars.js";

/** The tab. */
export function create({ id, job }) {
  const charts = new JobCharts(id, job.spec, ["memory"]);
  const planned = panel("Planned, by stage", { note: "bytes of a device, before the job runs" });
  const measured = panel("Measured, by rank");
  const bars = memoryBars();
  const none = h("p", { class: "empty-note" }, "Waiting for the planner ...");
  planned.body.append(none, bars.element);
  const { element: list, body } = table(["Rank", "Stage", "Tensor", "Replica", "Now", "Planned", "Difference"], {
    label: "Memory by rank",
  });
  const note = h("p", { class: "note" });
  measured.body.append(h("div", { class: "tall" }, list), note);
  let [asked, stages] = [null, null];

  async function askPlanner(now) {
    const layout = JSON.stringify(now.parallel);
    if (asked === layout) return;
    asked = layout;
    const { world_size: _world, ...parallel } = now.parallel;
    const { model, train, data } = now.spec;
    const plan = await optional(
      send("POST", "/v1/plans", { model, train, data, parallel, cluster: { current: true }, explain: true }),
    ).catch(() => null);
    stages = plan?.explanation?.memory_by_stage ?? null;
    setText(none, stages ? "" : "There is no plan for this job.");
    if (stages)
      bars.show(
        stages.map((memory, stage) => [`stage ${stage}`, memory, plan.explanation.usable_by_stage[stage]]),
        plan.explanation.usable_bytes,
      );
  }

  return {
    element: h("div", {}, planned.element, charts.elements, measured.element),
    async refresh(signal, now, moved) {
      await charts.refresh(signal, now);
      if (!moved) return;
      const { items } = await get(`/v1/jobs/${id}/ranks`, {}, { signal });
      await askPlanner(now);
      const known = items.filter((rank) => Number.isFinite(rank.memory_bytes));
      const cpu = known.some((rank) => rank.device === "cpu");
      setText(
        note,
        cpu
          ? "On CPUs this is the whole process, Python and torch included; the plan is of tensors alone."
          : known.length
            ? ""
            : `Not known by rank; the highest of all ranks is ${bytes(now.metrics.latest.memory_bytes)}.`,
      );
      fill(
        body,
        known.slice(0, 512).map((rank) => row(rank, stages?.[rank.pipeline]?.total)),
      );
    },
    close: () => charts.close(),
  };
}

function row(rank, planned) {
  const onDevice = rank.device !== "cpu"; // of a process on CPUs the figure holds Python and torch too
  const difference = planned && onDevice ? `${(100 * (rank.memory_bytes / planned - 1)).toFixed(1)}%` : "–";
  return h(
    "tr",
    {},
    [
      number(rank.rank),
      number(rank.pipeline),
      number(rank.tensor),
      number(rank.data),
      bytes(rank.memory_bytes),
      planned ? bytes(planned) : "–",
      difference,
    ].map((text) => h("td", { class: "number" }, text)),
  );
}
