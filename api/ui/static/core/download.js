/** Files that the browser makes itself. */

import { h } from "./dom.js";

/** Save `content`, a text or Blob, as a file called `name`. */
export function download(name, content, type = "text/plain;charset=utf-8") {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const anchor = h("a", { href: URL.createObjectURL(blob), download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10_000);
}

/** Rows as CSV. */
export function csv(headings, rows) {
  const cell = (value) => {
    const text = value === null || value === undefined || Number.isNaN(value) ? "" : String(value);
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [headings, ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}
