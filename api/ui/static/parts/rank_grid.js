/**
 * All ranks of a job on one canvas: a block for each replica, in it a column for each pipeline stage and a line for each
 * tensor (and context) rank. Coloured by state, or by how a number compares with the same stage's.
 */

import { color, onColorsChanged } from "../charts/colors.js";
import { CanvasPen } from "../charts/pen.js";
import { h, setText, setVisible } from "../core/dom.js";
import { bytes, counted, duration, nodeName } from "../core/format.js";
import { slownessOf } from "./attention.js";

/** What ranks are coloured by: `value(rank)` in `format`; state has none. */
export const COLOURINGS = {
  state: { label: "state" },
  own: { label: "own step time", value: (rank) => rank.own_seconds, format: duration },
  wait: { label: "wait", value: (rank) => rank.wait_seconds, format: duration },
  memory: { label: "memory", value: (rank) => rank.memory_bytes, format: bytes },
};
const [SMALLEST, LARGEST] = [5, 48];

/** The grid; `element` goes into the page. `onPick(rank)` is called when one is chosen. */
export class RankGrid {
  constructor({ compact = false, onPick = null } = {}) {
    this.compact = compact;
    this.onPick = onPick;
    this.colouring = "state";
    this.ranks = [];
    this.replaced = new Map();
    this.chosen = null;
    this.canvas = h("canvas", { class: "rank-canvas" });
    this.tip = h("div", { class: "chart-tip", hidden: true });
    this.summary = h("p", { class: "rank-summary" }, "No ranks have been placed yet.");
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
      this.tip,
    );
    this.element = h("div", {}, this.summary, this.plot);
    this.unwatch = onColorsChanged(() => this.draw());
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.plot);
  }

  /** Show the ranks as they are now. `replaced`: by rank, why it got a new process a moment ago. */
  show(ranks, replaced = new Map()) {
    this.ranks = ranks;
    this.replaced = replaced;
    this.usual = usualOf(ranks);
    setText(this.summary, summaryOf(ranks, replaced));
    this.draw();
  }

  colourBy(name) {
    this.colouring = name;
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width || this.ranks.length === 0) {
      this.plot.style.height = "0";
      return;
    }
    this.place(width);
    this.plot.style.height = `${this.height}px`;
    const pen = new CanvasPen(this.canvas, width, this.height);
    this.colours = this.coloursNow();
    this.blocks.forEach(({ x, y, name }) => pen.text(x, y - 8, name, { color: color("dim"), size: 10 }));
    this.ranks.forEach((rank, at) => this.drawRank(pen, rank, this.boxes[at]));
    this.plot.setAttribute("aria-label", summaryOf(this.ranks, this.replaced));
  }

  /** Where every rank is drawn: as large as fits. */
  place(width) {
    const count = (name) => 1 + this.ranks.reduce((most, rank) => Math.max(most, rank[name]), 0);
    const [tensor, stages, replicas, contexts] = ["tensor", "pipeline", "data", "context"].map(count);
    const lines = tensor * contexts;
    const labels = replicas > 1 && replicas <= 64 ? 16 : 0;
    const gap = 10;
    let side = Math.min(
      LARGEST,
      Math.max(SMALLEST, Math.floor(Math.sqrt((width * (this.compact ? 200 : 420)) / (this.ranks.length * 1.4)))),
    );
    side = Math.max(SMALLEST, Math.min(side, Math.floor((width - gap) / stages)));
    const block = stages * side + gap;
    const across = Math.max(1, Math.min(replicas, Math.floor((width + gap) / block)));
    const tall = lines * side + gap + labels;
    this.side = side;
    this.height = Math.ceil(replicas / across) * tall + 2;
    const corner = (replica) => [(replica % across) * block, Math.floor(replica / across) * tall + labels];
    this.blocks = labels
      ? [...Array(replicas).keys()].map((replica) => ({
          x: corner(replica)[0],
          y: corner(replica)[1],
          name: `replica ${replica}`,
        }))
      : [];
    this.boxes = this.ranks.map((rank) => {
      const [x, y] = corner(rank.data);
      return { x: x + rank.pipeline * side, y: y + (rank.context * tensor + rank.tensor) * side };
    });
  }

  drawRank(pen, rank, { x, y }) {
    const [fill, alpha] = this.colourOf(rank);
    const inner = this.side - (this.side > 9 ? 2 : 1);
    pen.rectangle(x, y, inner, inner, { color: fill, alpha });
    if (rank.straggler || this.chosen === rank.rank)
      pen.outline(x + 0.5, y + 0.5, inner - 1, inner - 1, {
        color: color(this.chosen === rank.rank ? "ink" : "bad"),
        thickness: 2,
      });
    if (this.side >= 22)
      pen.text(x + inner / 2, y + inner / 2, String(rank.rank), {
        color: color("ink"),
        size: this.side >= 40 ? 13 : 10,
        align: "center",
      });
  }

  /** What the colour of a rank depends on beside itself. */
  coloursNow() {
    const { value } = COLOURINGS[this.colouring];
    return {
      value,
      range: value ? this.range(value) : null,
      exited: color(this.ranks.some((each) => each.state === "running") ? "bad" : "idle"),
    };
  }

  colourOf(rank) {
    if (this.replaced.has(rank.rank)) return [color("bad"), 0.85];
    if (rank.state === "exited") return [this.colours.exited, 0.85];
    if (rank.state !== "running") return [color("busy"), 0.6];
    const { value, range } = this.colours;
    if (!value) return rank.straggler ? [color("warn"), 0.8] : [color("good"), 0.55];
    const [low, high] = range;
    const share = (value(rank) - low) / (high - low);
    if (!Number.isFinite(share)) return [color("track"), 1];
    return [share > 0.66 && this.colouring !== "memory" ? color("warn") : color("active"), 0.15 + 0.8 * share];
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

  hover(event) {
    const rank = this.rankAt(event);
    setVisible(this.tip, rank !== null);
    if (rank === null) return;
    const cause = this.replaced.get(rank.rank);
    setText(
      this.tip,
      [...describe(rank, this.usual), cause ? `just replaced: ${cause}` : ""].filter(Boolean).join("\n"),
    );
    const box = this.plot.getBoundingClientRect();
    const left = event.clientX - box.left;
    const onRight = left < box.width / 2;
    Object.assign(this.tip.style, {
      top: `${event.clientY - box.top + 12}px`,
      left: onRight ? `${left + 12}px` : "auto",
      right: onRight ? "auto" : `${box.width - left + 12}px`,
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
  const place = `stage ${rank.pipeline}, tensor ${rank.tensor}, replica ${rank.data}${rank.context ? `, context ${rank.context}` : ""}`;
  return [
    `rank ${rank.rank}: ${rank.state}`,
    place,
    `node ${nodeName(rank.node)}, ${rank.device ?? "–"}, pid ${rank.pid ?? "–"}, generation ${rank.generation}`,
    slownessOf(rank, usual?.get(rank.pipeline)),
    rank.straggler ? `straggler: ${rank.straggler.sentence}` : "",
  ].filter(Boolean);
}

function summaryOf(ranks, replaced) {
  if (ranks.length === 0) return "No ranks have been placed yet.";
  const states = new Map();
  for (const rank of ranks) states.set(rank.state, (states.get(rank.state) ?? 0) + 1);
  const counts = [...states].map(([state, count]) => `${count} ${state}`).join(", ");
  const nodes = new Set(ranks.map((rank) => rank.node).filter(Boolean)).size;
  const slow = ranks.filter((rank) => rank.straggler).map((rank) => rank.rank);
  const fresh = [...replaced.keys()].sort((one, other) => one - other).join(", ");
  return `${counted(ranks.length, "rank")} on ${counted(nodes, "node")}: ${counts}${slow.length ? `; slow: ${slow.join(", ")}` : ""}${fresh ? `; just replaced: ${fresh}` : ""}. Columns are pipeline stages, lines tensor ranks.`;
}
