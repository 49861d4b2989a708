/** The charts of a job, over whatever the viewer measures its progress by. */

import { ChartGroup, X_AXES } from "../charts/group.js";
import { LineChart } from "../charts/line_chart.js";
import { h, setText } from "../core/dom.js";
import { remember, remembered } from "../core/preferences.js";
import { Router } from "../core/router.js";
import { JobCurves, lostInWords, validationsOf } from "./curves.js";

/** By name: title, axis and lines, each `[label, metric]`; `raw`: its lines are never smoothed. */
export const CHARTS = {
  loss: { title: "Loss", axis: { label: "nats per token" }, lines: [["train", "loss"]], validations: true },
  throughput: {
    title: "Throughput",
    axis: { label: "tokens/s", floor: 0 },
    lines: [["tokens/s", "tokens_per_second"]],
  },
  norm: { title: "Gradient norm", axis: { label: "L2, before clipping" }, lines: [["gradient norm", "grad_norm"]] },
  rate: {
    title: "Learning rate",
    axis: { label: "learning rate", floor: 0 },
    lines: [["learning rate", "learning_rate"]],
    raw: true,
  },
  utilization: {
    title: "Utilization",
    axis: { label: "of the devices' peak", floor: 0, style: "share" },
    lines: [
      ["MFU, attention in full", "mfu_full"],
      ["MFU, attention causal", "mfu_causal"],
      ["HFU, with recomputation", "hfu_full"],
    ],
  },
  step: {
    title: "Step time",
    axis: { label: "per step", floor: 0, style: "seconds" },
    lines: [["step", "step_seconds"]],
  },
  memory: {
    title: "Memory",
    axis: { label: "highest of a rank", floor: 0, style: "bytes" },
    lines: [["memory", "memory_bytes"]],
    raw: true,
  },
  load: {
    title: "Expert load",
    axis: { label: "times the mean of a layer" },
    lines: [["busiest expert", "expert_load"]],
  },
  balance: { title: "Balance loss", axis: { label: "loss" }, lines: [["balance loss", "balance_loss"]] },
};

/** Those of jobs with experts only. */
export const EXPERT_CHARTS = ["load", "balance"];

const SHARED = ["tokens", "time"];

/** Some of a job's charts, followed together; `elements` go into the page. `marks`: `[{step, label, tone}]`. */
export class JobCharts {
  /** `query`: of the address, which then says what is looked at; without it, nothing does. */
  constructor(id, spec, names, query = null) {
    this.group = groupOf(query, (view) => this.looked(view));
    this.charts = names.map((name) => ({
      ...CHARTS[name],
      chart: new LineChart(this.group, CHARTS[name].title, CHARTS[name].axis),
    }));
    this.validations = validationsOf(spec);
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
    const isFirst = this.step === undefined;
    [this.step, this.generation] = [job.step, job.generation];
    if (isFirst && this.group.view) await this.looked(this.group.view);
    if (different) this.draw();
  }

  /** Show other marks. */
  mark(marks) {
    if (JSON.stringify(marks) === JSON.stringify(this.marks)) return;
    this.marks = marks;
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
    for (const { chart, lines, raw, validations: withValidations } of this.charts) {
      const drawn = lines.map(([name, metric]) => ({ name, raw, x: columns.x(column), y: columns.columns[metric] }));
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

/** A group of charts that shows what the query of an address says, and lets the address say what it shows. */
export function groupOf(query, onView) {
  const remembers = Number(query?.get("smoothing") ?? remembered("smoothing"));
  const [from, to] = ["from", "to"].map((name) => Number.parseFloat(query?.get(name)));
  return new ChartGroup({
    axis: X_AXES[query?.get("x")] ? query.get("x") : "step",
    smoothing: remembers > 0 && remembers < 1 ? remembers : 0,
    view: from < to ? [from, to] : null,
    onView,
    onChange: query ? addressSays : () => {},
  });
}

function addressSays({ axis, smoothing, view }) {
  const [from, to] = (view ?? ["", ""]).map((value) => (value === "" ? "" : Number(value.toFixed(3))));
  remember("smoothing", smoothing);
  Router.query({ x: axis === "step" ? "" : axis, smoothing: smoothing || "", from, to });
}

/** Controls of a page of charts: axis below, and smoothing. */
export function chartControls(group) {
  const axis = h(
    "select",
    { "aria-label": "Measure progress by", onchange: (event) => group.measureBy(event.target.value) },
    Object.entries(X_AXES).map(([name, { label }]) =>
      h("option", { value: name, selected: name === group.axis }, `by ${label}`),
    ),
  );
  return [
    axis,
    smoothingControl(group),
    h("span", { class: "note" }, "drag to zoom, double-click for all; keys: arrows, +, -, 0"),
  ];
}

/** The slider of how much is smoothed, with its value. */
export function smoothingControl(group) {
  const value = h("output", { class: "number" }, group.smoothing.toFixed(2));
  const slider = h("input", {
    type: "range",
    min: 0,
    max: 0.99,
    step: 0.01,
    value: group.smoothing,
    "aria-label": "Smoothing",
    oninput: () => {
      setText(value, slider.valueAsNumber.toFixed(2));
      group.smooth(slider.valueAsNumber);
    },
  });
  return h("label", { class: "inline smoothing" }, "smoothing", slider, value);
}
