/**
 * Lines over steps, tokens or time.
 *
 * A line is `{name, color, x, y, axis, dash, sparse, smooth}`: `x` and `y` are columns of equal length, x ascending;
 * `axis` 0 is at the left, 1 at the right; `sparse` also draws points; `smooth: false` is never smoothed.
 * A mark is `{x, label, tone}`.
 */

import { download, csv } from "../core/download.js";
import { fill, h, setText, setVisible } from "../core/dom.js";
import { clock, compact } from "../core/format.js";
import { menu } from "../core/menu.js";
import { paintMarks, paintX, paintY } from "./axes.js";
import { color, onColorsChanged, seriesColor } from "./colors.js";
import { X_AXES } from "./group.js";
import { CanvasPen, SvgPen } from "./pen.js";
import { extent, nearest, scale, smoothed } from "./scale.js";

const MARGIN = { top: 10, bottom: 34, left: 58, right: 14, rightAxis: 54 };
const LEAST_DRAG = 6;

/** A chart with its legend and tools; `element` goes into the page. */
export class LineChart {
  /** `axes`: `[{label, log, floor, format}]`, one or two. */
  constructor(group, title, axes, { height = 250 } = {}) {
    this.group = group;
    this.title = title;
    this.axes = axes;
    this.height = height;
    this.lines = [];
    this.marks = [];
    this.hidden = new Set();
    this.log = axes[0].log ?? false;
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
    this.tip = h("div", { class: "chart-tip", hidden: true });
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
      this.tip,
      this.note,
    );
    this.plot.style.height = `${this.height}px`;
    this.legend = h("div", { class: "chart-legend" });
    const tool = (label, text, act) =>
      h("button", { class: "plain", title: label, "aria-label": `${label}: ${this.title}`, onclick: act }, text);
    this.logTool = tool("Logarithmic axis", "log", () => this.toggleLog());
    this.logTool.setAttribute("aria-pressed", String(this.log));
    const save = menu(`Save: ${this.title}`, {
      title: "save",
      entries: ["png", "svg", "csv"].map((kind) => [kind, kind.toUpperCase()]),
      classes: "plain",
      act: (kind) => this.save(kind),
    });
    this.tools = h(
      "span",
      { class: "chart-tools" },
      this.logTool,
      tool("Show all", "all", () => this.group.look(null)),
      tool("Full screen", "full", () => this.element.requestFullscreen?.()),
      save,
    );
    this.element = h(
      "section",
      { class: "panel chart", "aria-label": this.title },
      h("div", { class: "panel-head" }, h("h2", {}, this.title), this.legend, h("span", { class: "gap" }), this.tools),
      this.plot,
      this.foot,
    );
    this.element.addEventListener("fullscreenchange", () => this.fullScreen());
  }

  /** Show other lines and marks; `says` is what has to be known of lines that end. */
  show(lines, marks = [], says = "") {
    this.lines = lines;
    this.marks = marks;
    setText(this.foot, says);
    setVisible(this.foot, Boolean(says));
    setText(this.note, says ? "There are no numeric values to draw." : "There is nothing to draw.");
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
    return this.lines
      .map((line, place) => ({ ...line, color: this.colorOf(line, place) }))
      .filter((line) => !this.hidden.has(line.name) && line.x.length);
  }

  /** Draw all anew. */
  draw() {
    const [width, height] = [this.plot.clientWidth, this.plot.clientHeight];
    if (width < 40 || height < 40) return;
    const shown = this.shown();
    setVisible(this.note, shown.length === 0);
    const pen = new CanvasPen(this.canvas, width, height);
    if (shown.length) this.paint(pen, shown);
    this.plot.setAttribute(
      "aria-label",
      `${this.title}. ${shown.map((line) => `${line.name} ${lastValue(line)}`).join(", ")}`,
    );
  }

  paint(pen, shown) {
    const two = this.axes.length > 1;
    const box = {
      x: MARGIN.left,
      y: MARGIN.top,
      w: pen.width - MARGIN.left - (two ? MARGIN.rightAxis : MARGIN.right),
      h: pen.height - MARGIN.top - MARGIN.bottom,
    };
    const [from, to] = this.group.view ?? ends(shown);
    const x = scale(from, to, box.x, box.x + box.w);
    this.box = box;
    this.x = x;
    paintX(pen, box, x, this.group.axis);
    paintMarks(pen, box, x, this.marks);
    this.axes.forEach((axis, place) => {
      const lines = shown.filter((line) => (line.axis ?? 0) === place);
      const log = place === 0 && this.log;
      const [low, high] = extent(lines, from, to, { log, floor: axis.floor ?? null });
      const y = scale(low, high, box.y + box.h, box.y, log);
      paintY(pen, box, y, axis, place);
      pen.clipped(box.x, box.y - 2, box.w, box.h + 4, () => lines.forEach((line) => this.paintLine(pen, line, x, y)));
    });
  }

  paintLine(pen, line, x, y) {
    const xs = Float64Array.from(line.x, (value) => x.place(value));
    const place = (value) => (y.log && value <= 0 ? NaN : y.place(value));
    const smooth = line.smooth === false ? 0 : this.group.smoothing;
    const style = { color: line.color, width: 1.6, dash: line.dash ?? [] };
    const [px, raw] = line.sparse ? known(xs, line.y) : [xs, line.y];
    const ys = Float64Array.from(raw, place);
    if (smooth > 0 && !line.sparse) {
      pen.line(px, ys, { ...style, width: 1, alpha: 0.25 });
      pen.line(px, Float64Array.from(smoothed(raw, smooth), place), style);
    } else {
      pen.line(px, ys, style);
    }
    if (line.sparse || px.length === 1) {
      for (let at = 0; at < px.length; at += 1)
        if (Number.isFinite(ys[at])) pen.dot(px[at], ys[at], 2.6, { color: line.color });
    }
  }

  at(event) {
    return event.clientX - this.plot.getBoundingClientRect().left;
  }

  moved(event) {
    if (!this.x) return;
    const at = this.at(event);
    if (this.dragFrom !== undefined) this.drawBrush(at);
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

  /** Show the cursor at `x`, with values beside it where the pointer is `here`. */
  showCursor(x, here) {
    this.cursorAt = x;
    const inside =
      x !== null && this.x && this.x.place(x) >= this.box.x - 1 && this.x.place(x) <= this.box.x + this.box.w + 1;
    setVisible(this.cursor, inside);
    setVisible(this.tip, inside);
    if (!inside) return;
    const shown = this.shown();
    const places = shown.map((line) => nearestKnown(line, x));
    const first = places.findIndex((place) => place >= 0);
    if (first < 0) return;
    const value = shown[first].x[places[first]];
    const left = this.x.place(value);
    Object.assign(this.cursor.style, { left: `${left}px`, top: `${this.box.y}px`, height: `${this.box.h}px` });
    this.tip.classList.toggle("quiet", !here);
    this.fillTip(shown, places, value);
    const onRight = left < this.plot.clientWidth / 2;
    Object.assign(this.tip.style, {
      left: onRight ? `${left + 12}px` : "auto",
      right: onRight ? "auto" : `${this.plot.clientWidth - left + 12}px`,
      top: `${this.box.y + 4}px`,
    });
  }

  fillTip(shown, places, x) {
    const text =
      this.group.axis === "time" ? clock(1000 * x) : `${X_AXES[this.group.axis].label} ${x.toLocaleString("en-US")}`;
    const row = (line, place) => {
      const mark = h("span", { class: "key-mark" });
      mark.style.background = line.color;
      const format = this.axes[line.axis ?? 0].format ?? compact;
      return h(
        "div",
        {},
        mark,
        h("span", { class: "tip-name" }, line.name),
        h("b", {}, place < 0 ? "–" : format(line.y[place])),
      );
    };
    fill(
      this.tip,
      h("div", { class: "tip-head" }, text),
      shown.map((line, at) => row(line, places[at])),
    );
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

function known(xs, ys) {
  const places = [...ys.keys()].filter((place) => Number.isFinite(ys[place]));
  return [places.map((place) => xs[place]), places.map((place) => ys[place])];
}

function nearestKnown(line, x) {
  const place = nearest(line.x, x);
  if (place < 0 || !line.sparse) return place;
  let best = -1;
  for (let at = 0; at < line.x.length; at += 1) {
    if (Number.isFinite(line.y[at]) && (best < 0 || Math.abs(line.x[at] - x) < Math.abs(line.x[best] - x))) best = at;
  }
  return best;
}

function lastValue(line) {
  for (let place = line.y.length - 1; place >= 0; place -= 1)
    if (Number.isFinite(line.y[place])) return compact(line.y[place]);
  return "unknown";
}
