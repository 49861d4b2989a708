/**
 * Lines over steps, tokens or time.
 *
 * A line is `{name, color, x, y, sparse, raw}`: `x` and `y` are columns of equal length, x ascending; `sparse` also draws
 * points; `raw` is never smoothed. A mark is `{x, label, tone}`.
 */

import { download, csv } from "../core/download.js";
import { fill, h, setAttribute, setText, setVisible } from "../core/dom.js";
import { compact } from "../core/format.js";
import { paintMarks, paintX, paintY, ticksOfY } from "./axes.js";
import { ChartTip, cursorPlace } from "./chart_tip.js";
import { downloadTool, tool } from "./chart_tools.js";
import { color, onColorsChanged, seriesColor } from "./colors.js";
import { X_AXES } from "./group.js";
import { CanvasPen, SvgPen } from "./pen.js";
import { extent, scale, smoothed, stacked } from "./scale.js";

const MARGIN = { top: 10, bottom: 34, left: 46, right: 14 };
const LEAST_DRAG = 6;

/** A chart with its legend and tools; `element` goes into the page. */
export class LineChart {
  /**
   * `axis`: `{label, log, floor, style}`, where `floor` is a value that is always in it and `style` one of STYLES.
   * `stack`: lines are parts of a sum, drawn on top of each other.
   */
  constructor(group, title, axis, { height = 250, stack = false } = {}) {
    Object.assign(this, { group, title, axis, height, stack, lines: [], marks: [], drawn: [], points: [] });
    this.hidden = new Set();
    this.log = axis.log ?? false;
    this.pointer = null; // pixels from the left, while it is over the plot
    this.cursorAt = null;
    this.build();
    group.add(this);
    this.unwatch = onColorsChanged(() => this.draw());
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.plot);
  }

  build() {
    this.canvas = h("canvas", { class: "chart-canvas" });
    this.cursor = h("div", { class: "chart-cursor", hidden: true });
    this.brush = h("div", { class: "chart-brush", hidden: true });
    this.tip = new ChartTip();
    this.note = h("p", { class: "chart-empty", hidden: true });
    this.foot = h("p", { class: "chart-foot kind tone-bad", hidden: true });
    this.plot = h(
      "div",
      {
        class: "chart-plot",
        tabindex: "0",
        role: "img",
        "aria-label": this.title,
        onpointermove: (event) => this.moved(event),
        onpointerdown: (event) => this.pressed(event),
        onpointerup: (event) => this.released(event),
        onpointerleave: () => this.left(),
        ondblclick: () => this.group.look(null),
        onkeydown: (event) => this.key(event),
        onblur: () => this.left(),
      },
      this.canvas,
      this.cursor,
      this.brush,
      this.tip.element,
      this.note,
    );
    this.plot.style.height = `${this.height}px`;
    this.legend = h("div", { class: "chart-legend" });
    this.element = h(
      "section",
      { class: "panel chart", "aria-label": this.title },
      h("div", { class: "panel-head" }, h("h2", {}, this.title), h("span", { class: "gap" }), this.tools()),
      this.legend,
      this.plot,
      this.foot,
    );
    this.element.addEventListener("fullscreenchange", () => this.fullScreen());
  }

  tools() {
    this.resetTool = tool("reset", "Reset zoom", this.title, () => this.group.look(null));
    this.logTool = tool("log", "Log scale", this.title, () => this.toggleLog());
    this.logTool.setAttribute("aria-pressed", String(this.log));
    return h(
      "span",
      { class: "chart-tools" },
      this.resetTool,
      this.logTool,
      tool("full", "Full screen", this.title, () => this.element.requestFullscreen?.()),
      downloadTool(this.title, (kind) => this.save(kind)),
    );
  }

  /** Show other lines and marks; `says` is what has to be known of lines that end. */
  show(lines, marks = [], says = "") {
    this.lines = lines;
    this.marks = marks;
    setText(this.foot, says);
    setVisible(this.foot, Boolean(says));
    setText(this.note, says ? "There are no numeric values to draw." : "No data yet.");
    const names = lines.map((line) => line.name).join("\n");
    if (names !== this.named) {
      this.named = names;
      this.drawLegend();
    }
    this.draw();
  }

  drawLegend() {
    const key = (line, place) => {
      const mark = h("span", { class: "key-mark" });
      mark.style.background = this.colorOf(line, place);
      return h(
        "button",
        {
          class: "plain key",
          "aria-pressed": String(!this.hidden.has(line.name)),
          onclick: (event) => this.toggle(line.name, event.currentTarget),
        },
        mark,
        line.name,
      );
    };
    fill(this.legend, this.lines.map(key));
  }

  colorOf(line, place) {
    return line.color ?? seriesColor(place);
  }

  toggle(name, button) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
    this.draw();
  }

  toggleLog() {
    this.log = !this.log;
    this.logTool.setAttribute("aria-pressed", String(this.log));
    this.draw();
  }

  fullScreen() {
    const full = document.fullscreenElement === this.element;
    this.plot.style.height = full ? "calc(100vh - 90px)" : `${this.height}px`;
    this.draw();
  }

  shown() {
    const shown = this.lines
      .map((line, place) => ({ ...line, color: this.colorOf(line, place) }))
      .filter((line) => !this.hidden.has(line.name) && line.x.length);
    const { smoothing } = this.group;
    if (!this.stack)
      return shown.map((line) =>
        smoothing > 0 && !line.sparse && !line.raw ? { ...line, smooth: smoothed(line.y, smoothing) } : line,
      );
    const sums = stacked(shown.map((line) => line.y));
    return shown.map((line, place) => ({ ...line, low: sums[place], high: sums[place + 1] }));
  }

  /** Draw all anew. */
  draw() {
    const [width, height] = [this.plot.clientWidth, this.plot.clientHeight];
    if (width < 40 || height < 40) return;
    this.drawn = this.shown();
    setVisible(this.note, this.drawn.length === 0);
    setAttribute(this.resetTool, "class", `plain tool ${this.group.view ? "" : "away"}`);
    const pen = new CanvasPen(this.canvas, width, height);
    if (this.drawn.length) Object.assign(this, this.paint(pen, this.drawn));
    this.plot.setAttribute(
      "aria-label",
      `${this.title}. ${this.drawn.map((line) => `${line.name} ${lastValue(line)}`).join(", ")}`,
    );
    for (const [place, line] of this.drawn.entries())
      if (this.legend.children[place]) this.legend.children[place].title = summary(line, this.group.view, this.write);
    if (this.pointer !== null && this.x) this.group.point(this.x.value(this.pointer), this);
    else this.showCursor(this.cursorAt, false);
  }

  /** Draw `shown` with a pen; what became of it: `{box, x, points, write}`. */
  paint(pen, shown) {
    const [from, to] = this.group.view ?? ends(shown);
    const values = this.stack ? shown.map(({ x, high }) => ({ x, y: high })) : shown;
    const [low, high] = extent(values, from, to, { log: this.log, floor: this.axis.floor ?? null });
    const [top, h] = [MARGIN.top, pen.height - MARGIN.top - MARGIN.bottom];
    const ticks = ticksOfY(low, high, h, this.axis.style, this.log);
    const left = Math.max(MARGIN.left, ...ticks.texts.map((text) => Math.ceil(pen.textWidth(text)) + 12));
    const box = { x: left, y: top, w: pen.width - left - MARGIN.right, h };
    const x = scale(from, to, box.x, box.x + box.w);
    const y = scale(low, high, box.y + box.h, box.y, this.log);
    const points = [];
    paintX(pen, box, x, this.group.axis);
    paintMarks(pen, box, x, this.marks);
    paintY(pen, box, y, this.axis.label, ticks);
    pen.clipped(box.x - 3, box.y - 3, box.w + 6, box.h + 6, () => {
      for (const line of shown) points.push(...(this.stack ? paintArea : paintLine)(pen, line, x, y));
    });
    return { box, x, points, write: ticks.write };
  }

  at(event) {
    return event.clientX - this.plot.getBoundingClientRect().left;
  }

  moved(event) {
    if (!this.x) return;
    const at = this.at(event);
    if (this.dragFrom !== undefined) this.drawBrush(at);
    this.pointer = at;
    this.group.point(this.x.value(at), this);
  }

  pressed(event) {
    if (event.button !== 0 || !this.x || event.pointerType === "touch") return;
    this.dragFrom = this.at(event);
    this.plot.setPointerCapture(event.pointerId);
  }

  released(event) {
    if (this.dragFrom === undefined) return;
    const [from, to] = [this.dragFrom, this.at(event)].sort((one, other) => one - other);
    this.dragFrom = undefined;
    setVisible(this.brush, false);
    if (to - from >= LEAST_DRAG)
      this.group.look([this.x.value(Math.max(from, this.box.x)), this.x.value(Math.min(to, this.box.x + this.box.w))]);
  }

  drawBrush(at) {
    const [from, to] = [this.dragFrom, at].sort((one, other) => one - other);
    Object.assign(this.brush.style, {
      left: `${from}px`,
      width: `${to - from}px`,
      top: `${this.box.y}px`,
      height: `${this.box.h}px`,
    });
    setVisible(this.brush, to - from >= LEAST_DRAG);
  }

  left() {
    this.pointer = null;
    if (this.dragFrom === undefined) this.group.point(null, this);
  }

  key(event) {
    if (!this.x) return;
    const [from, to] = this.group.view ?? [this.x.low, this.x.high];
    const width = to - from;
    const at = this.cursorAt ?? from + width / 2;
    const acts = {
      ArrowLeft: () => this.group.point(Math.max(from, at - width / 50), this),
      ArrowRight: () => this.group.point(Math.min(to, at + width / 50), this),
      "+": () => this.group.look([at - width / 4, at + width / 4]),
      "=": () => this.group.look([at - width / 4, at + width / 4]),
      "-": () => this.group.look([from - width / 2, to + width / 2]),
      0: () => this.group.look(null),
      Escape: () => this.group.look(null),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  /** Show the cursor at `x`, with values beside it; `isHere`: the pointer is over this chart. */
  showCursor(x, isHere) {
    this.cursorAt = x;
    const at = x === null || !this.x ? null : cursorPlace(this.drawn, x, this.x.place);
    const left = at === null ? NaN : this.x.place(at);
    const isInside = left >= this.box?.x - 1 && left <= this.box.x + this.box.w + 1;
    setVisible(this.cursor, isInside);
    if (!isInside) {
      this.tip.hide();
      return;
    }
    Object.assign(this.cursor.style, { left: `${left}px`, top: `${this.box.y}px`, height: `${this.box.h}px` });
    this.tip.show(this.stack ? withSum(this.drawn) : this.drawn, at, this.group.axis, this.write, isHere);
    this.tip.settle(left, this.box, this.points);
  }

  save(kind) {
    const name = this.title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
    if (kind === "csv") download(`${name}.csv`, this.csv(), "text/csv");
    if (kind === "svg") download(`${name}.svg`, this.svg(), "image/svg+xml");
    if (kind === "png") this.savePng(name);
  }

  svg() {
    const pen = new SvgPen(this.plot.clientWidth, this.plot.clientHeight, color("panel"));
    this.paint(pen, this.shown());
    return pen.svg();
  }

  savePng(name) {
    const canvas = h("canvas");
    const pen = new CanvasPen(canvas, this.plot.clientWidth, this.plot.clientHeight, 2);
    pen.rectangle(0, 0, pen.width, pen.height, { color: color("panel") });
    this.paint(pen, this.shown());
    canvas.toBlob((blob) => download(`${name}.png`, blob));
  }

  /** What is drawn: a row for each x that any line has, in the part that is looked at. */
  csv() {
    const shown = this.shown();
    const [from, to] = this.group.view ?? [-Infinity, Infinity];
    const rows = new Map();
    shown.forEach((line, column) => {
      line.x.forEach((x, place) => {
        if (x < from || x > to) return;
        if (!rows.has(x)) rows.set(x, new Array(shown.length).fill(null));
        rows.get(x)[column] = line.y[place];
      });
    });
    const sorted = [...rows].sort(([one], [other]) => one - other);
    return csv(
      [X_AXES[this.group.axis].label, ...shown.map((line) => line.name)],
      sorted.map(([x, values]) => [x, ...values]),
    );
  }

  /** The chart is gone for good. */
  close() {
    this.group.remove(this);
    this.unwatch();
    this.observer.disconnect();
  }
}

function ends(lines) {
  let [from, to] = [Infinity, -Infinity];
  for (const { x } of lines) {
    from = Math.min(from, x[0]);
    to = Math.max(to, x[x.length - 1]);
  }
  if (from > to) return [0, 1];
  return from === to ? [from - 0.5, to + 0.5] : [from, to];
}

/** Draw a line; its points in pixels. */
function paintLine(pen, line, x, y) {
  const place = (value) => (y.log && value <= 0 ? NaN : y.place(value));
  const style = { color: line.color, width: 1.6 };
  const known = line.sparse ? [...line.y.keys()].filter((at) => Number.isFinite(line.y[at])) : [...line.y.keys()];
  const xs = known.map((at) => x.place(line.x[at]));
  const ys = known.map((at) => place(line.y[at]));
  const shown = line.smooth ? Array.from(line.smooth, place) : ys;
  if (line.smooth) pen.line(xs, ys, { ...style, width: 1, alpha: 0.25 });
  pen.line(xs, shown, style);
  if (line.sparse || xs.length === 1)
    xs.forEach((at, index) => Number.isFinite(ys[index]) && pen.dot(at, ys[index], 2.6, { color: line.color }));
  return xs.map((at, index) => [at, shown[index]]);
}

/** Draw a part of a sum; the points of its upper edge in pixels. */
function paintArea(pen, line, x, y) {
  const xs = Array.from(line.x, x.place);
  const [low, high] = [Array.from(line.low, y.place), Array.from(line.high, y.place)];
  pen.area(xs, low, high, { color: line.color, alpha: 0.85 });
  return xs.map((at, index) => [at, high[index]]);
}

/** The parts of a sum from above, and the sum. */
function withSum(parts) {
  const top = parts.at(-1);
  return [{ name: "together", color: "transparent", x: top.x, y: top.high }, ...parts.toReversed()];
}

/** The least, greatest and mean value of what is seen of a line. */
function summary(line, view, write) {
  const [from, to] = view ?? [-Infinity, Infinity];
  const seen = [...line.y].filter((value, at) => Number.isFinite(value) && line.x[at] >= from && line.x[at] <= to);
  if (!seen.length) return "";
  const [least, greatest] = seen.reduce(
    ([low, high], value) => [Math.min(low, value), Math.max(high, value)],
    [Infinity, -Infinity],
  );
  const mean = seen.reduce((sum, value) => sum + value, 0) / seen.length;
  return `min ${write(least)}, mean ${write(mean)}, max ${write(greatest)}`;
}

function lastValue(line) {
  const last = [...line.y].findLast(Number.isFinite);
  return last === undefined ? "unknown" : compact(last);
}
