/** Bytes of a device as bars, a color for each part. */

import { seriesColor } from "../charts/colors.js";
import { fill, h } from "../core/dom.js";
import { bytes, percent } from "../core/format.js";

const PARTS = ["parameters", "gradients", "optimizer", "activations", "buffers"];

/** `{element, show(rows, usable)}`; rows are `[name, memory, own]`, `usable` the bytes that a device has for them, `own`
 * those of its own device where devices differ. */
export function memoryBars() {
  const element = h("div", { class: "memory-bars" });
  return {
    element,
    show(rows, usable) {
      const largest = Math.max(0, ...rows.map(([, memory]) => memory.total));
      const most = usable && usable < 4 * largest ? Math.max(usable, largest) : largest; // a small job would be a hairline
      const key = PARTS.map((name, place) => h("span", { class: "key" }, mark(place), `${name} `));
      fill(
        element,
        h("p", { class: "note" }, key),
        usable ? h("p", { class: "note" }, deviceText(usable, most)) : null,
        rows.map(([name, memory, own]) => line(name, memory, most, own ?? usable)),
      );
    },
  };
}

function deviceText(usable, most) {
  const scale = most < usable ? " The bars are relative to the largest one." : "";
  return `A device has ${bytes(usable)} for them.${scale}`;
}

function mark(place) {
  const element = h("span", { class: "key-mark" });
  element.style.background = seriesColor(place);
  return element;
}

function line(name, memory, most, usable) {
  const text = PARTS.map((part) => `${part} ${bytes(memory[part])}`).join(", ");
  const parts = PARTS.filter((part) => memory[part] > 0).map((part) =>
    h("div", { style: { background: seriesColor(PARTS.indexOf(part)), width: `${(100 * memory[part]) / most}%` } }),
  );
  const share = usable ? `${bytes(memory.total)}, ${percent(memory.total / usable)}` : bytes(memory.total);
  return h(
    "div",
    { class: "memory-row", title: text },
    h("span", {}, name),
    h("div", { class: "memory-bar", role: "img", "aria-label": `${name}: ${text}` }, parts),
    h("span", { class: "number" }, share),
  );
}
