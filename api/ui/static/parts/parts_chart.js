/** The parts of a step over a job's steps, as the engine times some of them by the way. */

import { ChartGroup } from "../charts/group.js";
import { LineChart } from "../charts/line_chart.js";
import { setVisible } from "../core/dom.js";
import { JobCurves } from "./curves.js";

/** The chart; hidden while nothing is known. `parts`: labels by name; `every`: the job's `train.time_parts_every`. */
export class PartsChart {
  constructor(id, parts, every) {
    this.parts = parts;
    this.group = new ChartGroup();
    const axis = { label: "per step", floor: 0, style: "seconds" };
    this.chart = new LineChart(this.group, "Parts of a step over time", axis, { stack: true });
    this.names = Object.keys(parts).map((part) => `${part}_seconds`);
    this.curves = new JobCurves(id, ["step_seconds"], this.names, every);
    this.element = this.chart.element;
    setVisible(this.element, false);
  }

  /** Read what is new, and draw it. Throws like `get`. */
  async refresh(signal) {
    await this.curves.poll(signal);
    const known = this.curves.seldom;
    if (!known) return;
    const lines = Object.values(this.parts).map((name, place) => ({
      name,
      x: known.x(null),
      y: known.columns[this.names[place]],
    }));
    setVisible(
      this.element,
      lines.some((line) => line.y.some(Number.isFinite)),
    );
    this.chart.show(lines.filter((line) => line.y.some((value) => value > 0)));
  }

  close() {
    this.chart.close();
  }
}
