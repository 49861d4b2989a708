/** What all charts of a page share: the axis below, the part that is looked at, the cursor, how much is smoothed. */

/** How x may be measured; `column` is the metric that says it. */
export const X_AXES = {
  step: { label: "step", column: null },
  tokens: { label: "tokens", column: "tokens" },
  time: { label: "time", column: "time" },
};

/**
 * Holds it, and tells the charts of changes. `onView(view)` hears of every other part that is looked at, `onChange(group)`
 * of everything that an address should say.
 */
export class ChartGroup {
  constructor({ axis = "step", smoothing = 0, view = null, onView = () => {}, onChange = () => {} } = {}) {
    Object.assign(this, { axis, smoothing, view, onView, onChange });
    this.charts = new Set();
  }

  add(chart) {
    this.charts.add(chart);
  }

  remove(chart) {
    this.charts.delete(chart);
  }

  /** Look at `[from, to]` of the axis; null: at all. */
  look(view) {
    this.view = view;
    this.draw();
    this.onView(view);
    this.onChange(this);
  }

  /** Put the cursor of all charts at `x`; null: away. */
  point(x, from) {
    for (const chart of this.charts) chart.showCursor(x, chart === from);
  }

  /** Measure x by another axis: all is looked at again. */
  measureBy(axis) {
    this.axis = axis;
    this.look(null);
  }

  smooth(weight) {
    this.smoothing = weight;
    this.draw();
    this.onChange(this);
  }

  draw() {
    for (const chart of this.charts) chart.draw();
  }
}
