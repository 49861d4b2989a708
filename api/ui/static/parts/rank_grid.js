/**
 * All ranks of a job on one canvas: a block for each replica, in it a column for each pipeline stage and a row for each
 * tensor (and context) rank. Colored by state, or by how a number compares with the other ranks'.
 */

import { color, inkOn, onColorsChanged } from "../charts/colors.js";
import { CanvasPen } from "../charts/pen.js";
import { fill, h, setText, setVisible } from "../core/dom.js";
import { bytes, clock, counted, duration, nodeName } from "../core/format.js";
import { slownessOf } from "./attention.js";

/** What ranks are colored by: `value(rank)` in `format`; state has none. */
export const COLORINGS = {
  state: { label: "state" },
  own: { label: "own time", value: (rank) => rank.own_seconds, format: duration },
  wait: { label: "wait time", value: (rank) => rank.wait_seconds, format: duration },
  memory: { label: "memory", value: (rank) => rank.memory_bytes, format: bytes },
};
const [SMALLEST, LARGEST] = [5, 48];
const NOBODY = "No ranks have been placed yet.";
const MOST_NAMED = 8;
const [LEAST_LABELLED, LEAST_BLOCK, MARGIN, TIP_WIDTH] = [14, 66, 58, 320]; // pixels
const CONTEXT_MARGIN = 56; // more, where rows are named after two axes

/** The grid; `element` goes into the page. `onPick(rank)` is called when one is chosen. */
export class RankGrid {
  constructor({ compact = false, onPick = null } = {}) {
    this.compact = compact;
    this.onPick = onPick;
    this.coloring = "state";
    this.ranks = [];
    this.replaced = new Map();
    this.chosen = null;
    this.canvas = h("canvas", { class: "rank-canvas" });
    this.tip = h("div", { class: "chart-tip", hidden: true });
    this.summary = h("p", { class: "rank-summary" }, NOBODY);
    this.legend = h("div", { class: "legend" });
    this.plot = h(
      "div",
      {
        class: "rank-plot",
        tabindex: onPick ? "0" : null,
        role: "img",
        "aria-label": "Ranks",
        onpointermove: (event) => this.hover(event),
        onpointerleave: () => setVisible(this.tip, false),
        onclick: (event) => this.pick(this.rankAt(event)),
        onkeydown: (event) => this.key(event),
      },
      this.canvas,
    );
    // Beside the plot, which scrolls where it is narrow, and would cut it off.
    this.element = h(
      "div",
      { class: "rank-grid" },
      this.summary,
      h("div", { class: "rank-box" }, this.plot, this.tip),
      this.legend,
    );
    this.unwatch = onColorsChanged(() => this.draw());
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.plot);
  }

  /** Show the ranks as they are now. `replaced`: those that got another process, as `replacements` returns them. */
  show(ranks, replaced = new Map()) {
    this.ranks = ranks;
    this.replaced = replaced;
    this.usual = usualOf(ranks);
    setText(this.summary, summaryOf(ranks, replaced));
    this.draw();
  }

  colorBy(name) {
    this.coloring = name;
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width || this.ranks.length === 0) {
      this.plot.style.height = "0";
      setVisible(this.legend, false);
      return;
    }
    this.place(width);
    this.plot.style.height = `${this.height}px`;
    const pen = new CanvasPen(this.canvas, width, this.height);
    this.colors = this.colorsNow();
    for (const { x, y, name, align = "left" } of this.labels)
      pen.text(x, y, name, { color: color("dim"), size: 10, align });
    this.ranks.forEach((rank, at) => this.drawRank(pen, rank, this.boxes[at]));
    this.plot.setAttribute("aria-label", summaryOf(this.ranks, this.replaced));
    this.showLegend();
  }

  /** Where every rank is drawn, as large as fits, and the names of the axes. */
  place(width) {
    const count = (name) => 1 + this.ranks.reduce((most, rank) => Math.max(most, rank[name]), 0);
    const [tensor, stages, replicas, contexts] = ["tensor", "pipeline", "data", "context"].map(count);
    const [rows, gap] = [tensor * contexts, 10];
    let side = Math.min(
      LARGEST,
      Math.max(SMALLEST, Math.floor(Math.sqrt((width * (this.compact ? 200 : 420)) / (this.ranks.length * 1.4)))),
    );
    const labelled = side >= LEAST_LABELLED && replicas <= 64;
    const [left, top] = labelled ? [MARGIN + (contexts > 1 ? CONTEXT_MARGIN : 0), 30] : [0, 0];
    side = Math.max(SMALLEST, Math.min(side, Math.floor((width - gap - left) / stages)));
    const block = Math.max(stages * side + gap, labelled ? LEAST_BLOCK : 0);
    const across = Math.max(1, Math.min(replicas, Math.floor((width + gap - left) / block)));
    const tall = rows * side + gap + top;
    this.side = side;
    this.height = Math.ceil(replicas / across) * tall + 2;
    const corner = (replica) => [left + (replica % across) * block, Math.floor(replica / across) * tall + top];
    this.labels = labelled
      ? [...Array(replicas).keys()].flatMap((replica) => axisLabels(replica, ...corner(replica)))
      : [];
    this.boxes = this.ranks.map((rank) => {
      const [x, y] = corner(rank.data);
      return { x: x + rank.pipeline * side, y: y + (rank.context * tensor + rank.tensor) * side };
    });

    function axisLabels(replica, x, y) {
      const names = [{ x, y: y - 23, name: `replica ${replica}` }];
      for (let stage = 0; stage < stages; stage += 1)
        names.push({
          x: x + (stage + 0.5) * side - 1,
          y: y - 8,
          name: `${side >= 40 ? "stage " : ""}${stage}`,
          align: "center",
        });
      for (let row = 0; row < rows && replica % across === 0; row += 1) {
        const context = contexts > 1 ? `context ${Math.floor(row / tensor)}, ` : "";
        names.push({ x: x - 6, y: y + (row + 0.5) * side, name: `${context}tensor ${row % tensor}`, align: "right" });
      }
      return names;
    }
  }

  drawRank(pen, rank, { x, y }) {
    const [shade, alpha] = this.colorOf(rank);
    const inner = this.side - (this.side > 9 ? 2 : 1);
    pen.rectangle(x, y, inner, inner, { color: shade, alpha });
    const replaced = this.replaced.get(rank.rank);
    if (rank.straggler || replaced || this.chosen === rank.rank)
      pen.outline(x + 1, y + 1, inner - 2, inner - 2, {
        color: color(this.chosen === rank.rank ? "ink" : rank.straggler ? "bad" : "busy"),
        thickness: this.side > 9 ? 3 : 1.5,
      });
    if (this.side < 22) return;
    const ink = inkOn(shade, alpha);
    pen.text(x + inner / 2, y + inner / 2, String(rank.rank), {
      color: ink,
      size: this.side >= 40 ? 13 : 10,
      align: "center",
    });
    if (replaced && this.side >= 34)
      pen.text(x + inner - 5, y + 11, `↻${replaced.count}`, { color: ink, size: 10, align: "right" });
  }

  /** What the color of a rank depends on beside itself. */
  colorsNow() {
    const { value } = COLORINGS[this.coloring];
    return {
      value,
      range: value ? this.range(value) : null,
      exited: color(this.ranks.some((each) => each.state === "running") ? "bad" : "idle"),
    };
  }

  colorOf(rank) {
    if (rank.state === "exited") return [this.colors.exited, 0.85];
    if (rank.state !== "running") return [color("busy"), 0.6];
    const { value, range } = this.colors;
    if (!value) return rank.straggler ? [color("warn"), 0.8] : [color("good"), 0.55];
    const [low, high] = range;
    const share = (value(rank) - low) / (high - low);
    if (!Number.isFinite(share)) return [color("track"), 1];
    return this.shadeOf(share);
  }

  /** For a number that is `share` of the way from the least to the most. */
  shadeOf(share) {
    return [color(share > 0.66 && this.coloring !== "memory" ? "warn" : "active"), 0.15 + 0.8 * share];
  }

  range(value) {
    const known = this.ranks.map(value).filter(Number.isFinite);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    return high > low * 1.05 ? [low, high] : [low * 0.5, high * 1.5];
  }

  rankAt(event) {
    const box = this.plot.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const at = (this.boxes ?? []).findIndex(
      (each) => x >= each.x && x < each.x + this.side && y >= each.y && y < each.y + this.side,
    );
    return at < 0 ? null : this.ranks[at];
  }

  /** What the colors and marks mean that are to be seen now. */
  showLegend() {
    const [{ label, format }, { value, range }] = [COLORINGS[this.coloring], this.colors];
    const some = (test) => this.ranks.some(test);
    const running = some((rank) => rank.state === "running");
    const entries = [];
    if (!value && running) entries.push(["running", color("good"), 0.55]);
    if (value && running)
      for (const share of [0, 0.33, 0.66, 1]) {
        const [shade, alpha] = this.shadeOf(share);
        entries.push([
          `${share === 0 ? `${label}: ` : ""}${format(range[0] + share * (range[1] - range[0]))}`,
          shade,
          alpha,
        ]);
      }
    if (some((rank) => rank.state === "exited")) entries.push([running ? "dead" : "exited", this.colors.exited, 0.85]);
    if (some((rank) => !["running", "exited"].includes(rank.state))) entries.push(["starting", color("busy"), 0.6]);
    if (!value && some((rank) => rank.straggler)) entries.push(["slow", color("warn"), 0.8]);
    const outlined = this.replaced.size ? [["replaced (↻ how often)", "busy"]] : [];
    setVisible(this.legend, !this.compact || entries.length + outlined.length > 1);
    fill(
      this.legend,
      entries.map(([text, background, opacity]) =>
        h("span", { class: "legend-entry" }, h("i", { class: "swatch", style: { background, opacity } }), text),
      ),
      outlined.map(([text, shade]) =>
        h(
          "span",
          { class: "legend-entry" },
          h("i", { class: "swatch", style: { border: `2px solid ${color(shade)}` } }),
          text,
        ),
      ),
    );
  }

  hover(event) {
    const rank = this.rankAt(event);
    setVisible(this.tip, rank !== null);
    if (rank === null) return;
    const replaced = this.replaced.get(rank.rank);
    setText(this.tip, [...describe(rank, this.usual), replaced ? saidOf(replaced) : ""].filter(Boolean).join("\n"));
    const { x, y } = this.boxes[this.ranks.indexOf(rank)];
    const ends = Math.max(...this.boxes.map((box) => box.x)) + this.side + 14;
    const beside = this.plot.clientWidth - ends > TIP_WIDTH; // so that no other rank is covered
    Object.assign(this.tip.style, {
      left: beside ? `${ends}px` : `${Math.max(0, Math.min(x, this.plot.clientWidth - TIP_WIDTH))}px`,
      top: beside ? `${y}px` : `${this.height + 4}px`,
    });
  }

  pick(rank) {
    if (!this.onPick || rank === null) return;
    this.chosen = rank.rank;
    this.onPick(rank);
    this.draw();
  }

  key(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (!this.onPick || !(event.key in moves)) return;
    event.preventDefault();
    const now = this.ranks.findIndex((rank) => rank.rank === this.chosen);
    const at = Math.max(0, Math.min(this.ranks.length - 1, now + moves[event.key]));
    this.pick(this.ranks[at]);
  }

  close() {
    this.unwatch();
    this.observer.disconnect();
  }
}

/** Median own time of each stage's ranks. */
export function usualOf(ranks) {
  const stages = new Map();
  for (const rank of ranks) {
    if (!stages.has(rank.pipeline)) stages.set(rank.pipeline, []);
    if (Number.isFinite(rank.own_seconds)) stages.get(rank.pipeline).push(rank.own_seconds);
  }
  return new Map([...stages].map(([stage, seconds]) => [stage, median(seconds)]));
}

function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : NaN;
}

/** Lines about a rank. */
export function describe(rank, usual) {
  const place = `stage ${rank.pipeline}, tensor ${rank.tensor}, replica ${rank.data}${rank.context ? `, context ${rank.context}` : ""}${Number.isInteger(rank.expert) ? `, experts ${rank.expert}` : ""}`;
  return [
    `rank ${rank.rank}: ${rank.state}`,
    place,
    `node ${nodeName(rank.node)}, ${rank.device ?? "–"}, pid ${rank.pid ?? "–"}, generation ${rank.generation}`,
    slownessOf(rank, usual?.get(rank.pipeline)),
    rank.straggler ? `straggler: ${rank.straggler.sentence}` : "",
  ].filter(Boolean);
}

/** By rank, how often a job's recoveries gave it another process, when they last did, and why. */
export function replacements(recoveries) {
  const found = new Map();
  for (const { forked, time, cause } of recoveries)
    for (const rank of forked) found.set(rank, { count: (found.get(rank)?.count ?? 0) + 1, time, cause });
  return found;
}

function saidOf({ count, time, cause }) {
  return `replaced ${count === 1 ? "once" : `${count} times`}, last at ${clock(time)}: ${cause}`;
}

function summaryOf(ranks, replaced) {
  if (ranks.length === 0) return NOBODY;
  const states = new Map();
  for (const rank of ranks) states.set(rank.state, (states.get(rank.state) ?? 0) + 1);
  const counts = [...states].map(([state, count]) => `${count} ${state}`).join(", ");
  const nodes = new Set(ranks.map((rank) => rank.node).filter(Boolean)).size;
  const some = (numbers) => {
    const sorted = [...numbers].sort((one, other) => one - other);
    return `${sorted.slice(0, MOST_NAMED).join(", ")}${sorted.length > MOST_NAMED ? " ..." : ""}`;
  };
  const slow = some(ranks.filter((rank) => rank.straggler).map((rank) => rank.rank));
  const fresh = some(replaced.keys());
  return `${counted(ranks.length, "rank")} on ${counted(nodes, "node")}: ${counts}${slow ? `; slow: ${slow}` : ""}${fresh ? `; replaced by recoveries: ${fresh}` : ""}. Columns are pipeline stages, rows are tensor ranks${ranks.some((rank) => rank.context) ? " of each context rank" : ""}.`;
}
