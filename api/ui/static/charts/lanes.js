/**
 * Lanes of slices over time: a rank's passes, a job's states. Wheel or drag with Shift zooms, drag moves, double-click
 * shows all.
 *
 * A lane is `{name, slices}`, a slice `{start, end, color, alpha, text, tip, critical}`; slices of a lane may nest, the
 * later one is drawn on top. An `inner` slice is a strip in the lower part of its lane.
 */

import { h, setText, setVisible } from "../core/dom.js";
import { color, inkOn, onColorsChanged } from "./colors.js";
import { CanvasPen, SvgPen } from "./pen.js";
import { scale, ticks, timeTicks } from "./scale.js";

const [LEFT, AXIS, GAP] = [96, 22, 3];
const STRIP = 0.62; // where inner slices begin, as a share of their lane

/** The lanes; `element` goes into the page. `format(seconds)` writes a time; `moments`: times are Unix seconds. */
export class Lanes {
  constructor(label, { format, laneHeight = 26, mostHeight = 520, moments = false, onView = () => {} } = {}) {
    Object.assign(this, { label, format, laneHeight, mostHeight, onView, ticks: moments ? timeTicks : ticks });
    this.lanes = [];
    this.view = null;
    this.canvas = h("canvas", { class: "lane-canvas" });
    this.tip = h("div", { class: "chart-tip", hidden: true });
    this.plot = h(
      "div",
      {
        class: "lane-plot",
        tabindex: "0",
        role: "img",
        "aria-label": label,
        onpointermove: (event) => this.moved(event),
        onpointerdown: (event) => this.pressed(event),
        onpointerup: () => (this.drag = null),
        onpointerleave: () => setVisible(this.tip, false),
        ondblclick: () => this.look(null),
        onkeydown: (event) => this.key(event),
      },
      this.canvas,
      this.tip,
    );
    this.plot.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.element = this.plot;
    this.unwatch = onColorsChanged(() => this.draw());
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.plot);
  }

  /** Show other lanes, which reach over `[from, to]`. */
  show(lanes, [from, to]) {
    this.lanes = lanes;
    this.whole = [from, to];
    this.height = Math.max(4, Math.min(this.laneHeight, (this.mostHeight - AXIS) / Math.max(1, lanes.length)));
    this.plot.style.height = `${this.height * lanes.length + AXIS}px`;
    this.draw();
  }

  look(view) {
    if (view) {
      const width = Math.min(view[1] - view[0], this.whole[1] - this.whole[0]);
      const from = Math.max(this.whole[0], Math.min(view[0], this.whole[1] - width));
      view = [from, from + width];
    }
    this.view = view;
    this.draw();
    this.onView(view);
  }

  draw() {
    const width = this.plot.clientWidth;
    if (width < 60 || !this.whole) return;
    this.paint(new CanvasPen(this.canvas, width, this.plot.clientHeight));
  }

  paint(pen) {
    const [from, to] = this.view ?? this.whole;
    const x = scale(from, to, LEFT, pen.width - 6);
    this.x = x;
    const bottom = this.height * this.lanes.length;
    for (const value of this.ticks(from, to, (pen.width - LEFT) / 100)) {
      pen.rectangle(x.place(value), 0, 1, bottom, { color: color("line"), alpha: 0.7 });
      const align = x.place(value) > pen.width - 30 ? "right" : "center";
      pen.text(Math.min(x.place(value), pen.width), bottom + 12, this.format(value), {
        color: color("dim"),
        size: 10,
        align,
      });
    }
    const nameEvery = Math.max(1, Math.ceil(13 / this.height));
    this.lanes.forEach((lane, place) => {
      const top = place * this.height;
      if (place % nameEvery === 0)
        pen.text(LEFT - 8, top + this.height / 2, lane.name, { color: color("dim"), align: "right", size: 10.5 });
      pen.clipped(LEFT, top, pen.width - LEFT - 5, this.height, () => this.paintLane(pen, lane, top, x, from, to));
    });
  }

  paintLane(pen, lane, top, x, from, to) {
    const inner = this.height - (this.height > 8 ? GAP : 1);
    for (const slice of lane.slices) {
      if (slice.end < from || slice.start > to) continue;
      const left = x.place(slice.start);
      const width = Math.max(0.75, x.place(slice.end) - left);
      const above = slice.inner ? inner * STRIP : 0;
      pen.rectangle(left, top + above, width, inner - above, { color: slice.color, alpha: slice.alpha ?? 1 });
      if (slice.critical) pen.rectangle(left, top + inner - 2.5, width, 2.5, { color: color("bad") });
      if (slice.text && inner > 12 && width > pen.textWidth(slice.text, 10) + 2) {
        pen.clipped(left, top, width, inner, () =>
          pen.text(left + width / 2, top + inner * (slice.textAbove ? STRIP / 2 : 0.5), slice.text, {
            color: slice.ink ?? inkOn(slice.color, slice.alpha),
            size: 10,
            align: "center",
          }),
        );
      }
    }
  }

  svg(width = 1200) {
    const pen = new SvgPen(width, this.height * this.lanes.length + AXIS, color("panel"));
    this.paint(pen);
    this.draw();
    return pen.svg();
  }

  wheel(event) {
    if (!this.x || !(event.ctrlKey || event.shiftKey || event.altKey || document.activeElement === this.plot)) return;
    event.preventDefault();
    const at = this.x.value(event.clientX - this.plot.getBoundingClientRect().left);
    this.zoom(at, event.deltaY > 0 ? 1.25 : 0.8);
  }

  zoom(at, factor) {
    const [from, to] = this.view ?? this.whole;
    const view = [at - (at - from) * factor, at + (to - at) * factor];
    this.look(view[1] - view[0] >= this.whole[1] - this.whole[0] ? null : view);
  }

  pressed(event) {
    if (event.button !== 0) return;
    this.plot.focus();
    this.drag = { x: event.clientX, view: this.view ?? this.whole };
    this.plot.setPointerCapture(event.pointerId);
  }

  moved(event) {
    if (!this.x) return;
    if (this.drag && this.view) {
      const [from, to] = this.drag.view;
      const shift = ((this.drag.x - event.clientX) * (to - from)) / (this.plot.clientWidth - LEFT);
      this.look([from + shift, to + shift]);
      return;
    }
    this.hover(event);
  }

  hover(event) {
    const bounds = this.plot.getBoundingClientRect();
    const [left, top] = [event.clientX - bounds.left, event.clientY - bounds.top];
    const lane = this.lanes[Math.floor(top / this.height)];
    const at = this.x.value(left);
    const slice = left < LEFT ? null : lane?.slices.findLast((each) => each.start <= at && each.end >= at);
    setVisible(this.tip, Boolean(slice));
    if (!slice) return;
    setText(this.tip, `${lane.name}\n${slice.tip}`);
    Object.assign(this.tip.style, { left: `${Math.min(left + 14, bounds.width - 300)}px`, top: `${top + 14}px` });
  }

  key(event) {
    if (!this.x) return;
    const [from, to] = this.view ?? this.whole;
    const middle = (from + to) / 2;
    const acts = {
      "+": () => this.zoom(middle, 0.7),
      "=": () => this.zoom(middle, 0.7),
      "-": () => this.zoom(middle, 1.4),
      0: () => this.look(null),
      Escape: () => this.look(null),
      ArrowLeft: () => this.view && this.look([from - (to - from) / 5, to - (to - from) / 5]),
      ArrowRight: () => this.view && this.look([from + (to - from) / 5, to + (to - from) / 5]),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  close() {
    this.unwatch();
    this.observer.disconnect();
  }
}
