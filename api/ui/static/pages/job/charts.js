/** All charts of a job, on one axis and with one cursor. */

import { h } from "../../core/dom.js";
import { JobEvents } from "../../parts/events.js";
import { ExpertMap } from "../../parts/expert_map.js";
import { CHARTS, EXPERT_CHARTS, JobCharts, chartControls, marksOf } from "../../parts/job_charts.js";

/** The tab. */
export function create({ id, job, query }) {
  const experts = job.spec?.model?.moe ? new ExpertMap(id) : null;
  const names = Object.keys(CHARTS).filter((name) => experts || !EXPERT_CHARTS.includes(name));
  const charts = new JobCharts(id, job.spec, names, query);
  const events = new JobEvents(id);
  const element = h(
    "div",
    {},
    h("div", { class: "toolbar" }, chartControls(charts.group)),
    h("div", { class: "chart-grid" }, charts.elements),
    experts?.element,
  );
  return {
    element,
    async refresh(signal, now, moved) {
      if (moved && (await events.poll(signal))) charts.mark(marksOf(events.items));
      await charts.refresh(signal, now);
      if (moved) await experts?.refresh(signal);
    },
    close() {
      charts.close();
      experts?.close();
    },
  };
}
