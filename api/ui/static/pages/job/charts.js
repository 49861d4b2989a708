/** All charts of a job, on one axis and with one cursor. */

import { h } from "../../core/dom.js";
import { JobEvents } from "../../parts/events.js";
import { CHARTS, JobCharts, chartControls, marksOf } from "../../parts/job_charts.js";

/** The tab. */
export function create({ id, job, query }) {
  const charts = new JobCharts(id, job.spec, Object.keys(CHARTS), query);
  const events = new JobEvents(id);
  const element = h(
    "div",
    {},
    h("div", { class: "toolbar" }, chartControls(charts.group)),
    h("div", { class: "chart-grid" }, charts.elements),
  );
  return {
    element,
    async refresh(signal, now, moved) {
      if (moved && (await events.poll(signal))) charts.mark(marksOf(events.items));
      await charts.refresh(signal, now);
    },
    close: () => charts.close(),
  };
}
