/** A list whose entries are actions: choosing one does something at once, and the list is as before. */

import { fill, h } from "./dom.js";

const CHOOSES = /^(Arrow|Page|Home|End|[^ ]$)/;

/**
 * A select that calls `act(value)` for what is chosen; its first entry, `title`, stands for nothing. A closed list would
 * choose with every arrow or letter, and so act on whatever comes first: these keys open it instead.
 */
export function menu(label, { title, entries = [], classes = null, act }) {
  const list = h("select", {
    class: classes,
    "aria-label": label,
    onchange: () => {
      const { value } = list;
      list.value = "";
      if (value) act(value);
    },
    onkeydown: (event) => {
      if (!CHOOSES.test(event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      list.showPicker?.();
    },
  });
  fillMenu(list, title, entries);
  return list;
}

/** Let a menu have these entries, each a value and its text. */
export function fillMenu(list, title, entries) {
  fill(
    list,
    h("option", { value: "" }, title),
    entries.map(([value, text]) => h("option", { value }, text)),
  );
}
