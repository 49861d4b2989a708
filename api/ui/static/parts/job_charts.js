/** The charts of a job, over whatever the viewer measures its progress by. */

import { ChartGroup, X_AXES } from "../charts/group.js";
import { LineChart } from "../charts/line_chart.js";
import { h } from "../core/dom.js";
import { bytes, duration, percent } from "../core/format.js";
import { JobCurves, lostInWords, validationsOf } from "./curves.js";

const asPercent = (value) => percent(value, 1);

/** By name: title, axes and lines, each `[label, metric, axis]`. */
export const CHARTS = {
  loss: { title: "Loss", axes: [{ label: "nats per token" }], lines: [["train", "loss"]], validations: true },
  throughput: {
    title: "Throughput",
    axes: [{ label: "tokens/s", floor: 0 }],
    lines: [["tokens/s", "tokens_per_second"]],
  },
  norm: { title: "Gradient norm", axes: [{ label: "L2, before clipping" }], lines: [["gradient norm", "grad_norm"]] },
  rate: {
    title: "Learning rate",
    axes: [{ label: "learning rate", floor: 0 }],
    lines: [["learning rate", "learning_rate"]],
  },
  utilisation: {
    title: "Utilisation",
    axes: [{ label: "of the devices' peak", floor: 0, format: asPercent }],
    lines: [
      ["MFU, attention in full", "mfu_full"],
      ["MFU, attention causal", "mfu_causal"],
      ["HFU, with recomputation", "hfu_full"],
    ],
  },
  step: {
    title: "Step time",
    axes: [{ label: "seconds a step", floor: 0, format: duration }],
    lines: [["step", "step_seconds"]],
  },
  memory: {
    title: "Memory",
    axes: [{ label: "highest of a rank", floor: 0, format: bytes }],
    lines: [["memory", "memory_bytes"]],
  },
};

const SHARED = ["tokens", "time"];

/** Some of a job's charts, followed together; `elements` go into the page. `marks`: `[{step, label, tone}]`. */
export class JobCharts {
  constructor(id, spec, names, options = {}) {
    this.group = new ChartGroup({ ...options, onView: (view) => this.looked(view) });
    this.charts = names.map((name) => ({
      ...CHARTS[name],
      chart: new LineChart(this.group, CHARTS[name].title, CHARTS[name].axes, options),
    }));
    this.validations = validationsOf(spec);
    this.extra = spec?.train?.z_loss ? ["z_loss"] : [];
    const metrics = [...this.charts.flatMap(({ lines }) => lines.map(([, metric]) => metric)), ...SHARED];
    this.curves = new JobCurves(
      id,
      metrics,
      this.validations.map(([, metric]) => metric),
      spec?.train?.validate_every ?? 0,
      spec?.train?.steps ?? 0,
    );
    this.marks = [];
    this.elements = this.charts.map(({ chart }) => chart.element);
  }

  /** Read what is new, and draw it. Throws like `get`. */
  async refresh(signal, job) {
    if (this.step !== undefined && this.step === job.step && this.generation === job.generation) return;
    const different = await this.curves.poll(signal);
    [this.step, this.generation] = [job.step, job.generation];
    if (different) this.draw();
  }

  /** Show other marks. */
  mark(marks) {
    if (JSON.stringify(marks) === JSON.stringify(this.marks)) return;
    this.marks = marks;
    this.draw();
  }

  /** Measure x by another axis. */
  measureBy(axis) {
    this.group.axis = axis;
    this.group.view = null;
    this.curves.look(null);
    this.draw();
  }

  async looked(view) {
    const column = X_AXES[this.group.axis].column;
    const range = view && view.map((x) => this.curves.all.stepAt(column, x));
    if (await this.curves.look(range).catch(() => false)) this.draw();
  }

  draw() {
    const column = X_AXES[this.group.axis].column;
    const [columns, validations] = [this.curves.shown, this.curves.seldom];
    const marks = this.marks.map(({ step, ...rest }) => ({ ...rest, x: this.curves.all.at(column, step) }));
    for (const { chart, lines, validations: withValidations } of this.charts) {
      const drawn = lines.map(([name, metric]) => ({ name, x: columns.x(column), y: columns.columns[metric] }));
      if (withValidations && validations) {
        for (const [name, metric] of this.validations) {
          const y = validations.columns[metric];
          if (y.some(Number.isFinite)) drawn.push({ name, x: validations.x(column), y, sparse: true });
        }
      }
      const lost = lines.map(([name, metric]) => [name, this.curves.all.lost[metric]]);
      if (withValidations && validations)
        lost.push(...this.validations.map(([name, metric]) => [name, validations.lost[metric]]));
      const ends = lost
        .filter(([, since]) => since)
        .map(([name, { step, word }]) => ({
          x: this.curves.all.at(column, step),
          label: `${name} ${word}`,
          tone: "bad",
        }));
      chart.show(
        drawn.filter((line) => line.y.some(Number.isFinite)),
        [...marks, ...ends],
        lostInWords(lost),
      );
    }
  }

  close() {
    for (const { chart } of this.charts) chart.close();
  }
}

/** Marks of what happened to a job, of its events. */
export function marksOf(events) {
  const marks = [];
  const changes = events.filter((event) => event.type === "state_changed");
  for (const event of events) {
    if (event.step === null) continue;
    if (event.type === "state_changed" && event.data.to === "RECOVERING") {
      const failed = changes[changes.indexOf(event) + 1]?.data.to === "FAILED";
      marks.push({ step: event.step, label: failed ? "failure" : "recovery", tone: failed ? "bad" : "warn" });
    }
    if (["spike", "step_skipped", "rolled_back", "not_finite"].includes(event.type))
      marks.push({ step: event.step, label: event.type.replaceAll("_", " "), tone: "bad" });
  }
  return marks.filter(
    (mark, place) => place === 0 || mark.step !== marks[place - 1].step || mark.label !== marks[place - 1].label,
  );
}

/** Controls of a page of charts: axis below, smoothing, show all. */
export function chartControls(charts) {
  const axis = h(
    "select",
    { "aria-label": "Measure progress by", onchange: (event) => charts.measureBy(event.target.value) },
    Object.entries(X_AXES).map(([name, { label }]) => h("option", { value: name }, `by ${label}`)),
  );
  const smooth = h("input", {
    type: "range",
    min: 0,
    max: 0.99,
    step: 0.01,
    value: charts.group.smoothing,
    "aria-label": "Smoothing",
    oninput: (event) => charts.group.smooth(event.target.valueAsNumber),
  });
  return [
    axis,
    h("label", { class: "inline" }, "smoothing", smooth),
    h("button", { class: "button", onclick: () => charts.group.look(null) }, "Show all"),
    h("span", { class: "note" }, "drag to zoom, double-click for all; keys: arrows, +, -, 0"),
  ];
}
