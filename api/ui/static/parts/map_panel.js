/** A panel with numbers as a grid of shades, a legend, and a tip for the number under the pointer. */

import { onColorsChanged } from "../charts/colors.js";
import { fill, h, panel, setText, setVisible } from "../core/dom.js";

const [TIP_WIDTH, TIP_HEIGHT] = [260, 50]; // pixels

/** Hidden at first. A subclass has `draw()`, which sets `box` ({left, w, h}: the grid's left edge and the size of a cell,
 * in pixels), and `textAt(column, row)`, which is undefined where there is no number. */
export class MapPanel {
  constructor(title, note, label) {
    const { element, body } = panel(title, { note });
    this.canvas = h("canvas", { class: "lane-canvas" });
    this.tip = h("div", { class: "chart-tip", hidden: true });
    this.plot = h(
      "div",
      {
        class: "lane-plot",
        role: "img",
        "aria-label": label,
        onpointermove: (event) => this.hover(event),
        onpointerleave: () => setVisible(this.tip, false),
      },
      this.canvas,
      this.tip,
    );
    this.legend = h("div", { class: "legend" });
    body.append(this.plot, this.legend);
    this.element = element;
    setVisible(element, false);
    this.unwatch = onColorsChanged(() => this.draw());
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.plot);
  }

  /** `entries`: [{shade, alpha, text}]. */
  showLegend(entries) {
    const swatch = ({ shade, alpha }) => h("i", { class: "swatch", style: { background: shade, opacity: alpha } });
    fill(this.legend, entries.map((each) => h("span", { class: "legend-entry" }, swatch(each), each.text)));
  }

  hover(event) {
    if (!this.box) return;
    const bounds = this.plot.getBoundingClientRect();
    const [x, y] = [event.clientX - bounds.left, event.clientY - bounds.top];
    const text = this.textAt(Math.floor((x - this.box.left) / this.box.w), Math.floor(y / this.box.h));
    setVisible(this.tip, text !== undefined);
    if (text === undefined) return;
    setText(this.tip, text);
    Object.assign(this.tip.style, {
      left: `${Math.max(0, Math.min(x + 12, bounds.width - TIP_WIDTH))}px`,
      top: `${Math.max(0, Math.min(y + 10, bounds.height - TIP_HEIGHT))}px`,
    });
  }

  close() {
    this.unwatch();
    this.observer.disconnect();
  }
}
