/** Memory of the ranks: what the plan says by part and stage, and what the ranks use. */

import { get, optional, send } from "../../core/api.js";
import { fill, h, panel, setText, setVisible, table } from "../../core/dom.js";
import { bytes, number, signed } from "../../core/format.js";
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
  const headings = ["Rank", "Stage", "Tensor", "Replica", "Context", "Now"];
  const { element: list, body } = table([...headings, "Planned", "Difference"], { label: "Memory by rank" });
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
      const onCpus = items.some((rank) => rank.device === "cpu");
      if (items.length && !onCpus) await askPlanner(now);
      setVisible(planned.element, !onCpus);
      for (const heading of [...list.querySelectorAll("th")].slice(headings.length)) setVisible(heading, !onCpus);
      const known = items.filter((rank) => Number.isFinite(rank.memory_bytes));
      const highest = bytes(now.metrics.latest.memory_bytes);
      const unknown = known.length ? "" : `Not known by rank; the highest of all ranks is ${highest}.`;
      setText(note, onCpus ? `On CPUs this is the whole process, Python and torch included. ${unknown}` : unknown);
      setVisible(list, known.length > 0);
      fill(
        body,
        known.slice(0, 512).map((rank) => row(rank, onCpus ? null : (stages?.[rank.pipeline]?.total ?? NaN))),
      );
    },
    close: () => charts.close(),
  };
}

/** The row of a rank; `planned` is null where it is left out. */
function row(rank, planned) {
  const difference = signed(rank.memory_bytes / planned - 1);
  const texts = [
    number(rank.rank),
    number(rank.pipeline),
    number(rank.tensor),
    number(rank.data),
    number(rank.context),
    bytes(rank.memory_bytes),
  ];
  if (planned !== null) texts.push(bytes(planned), difference);
  return h(
    "tr",
    {},
    texts.map((text) => h("td", { class: "number" }, text)),
  );
}
