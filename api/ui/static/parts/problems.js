/** What is wrong with a document, once: each entry with its field and a value that works, or else the sentence. */

import { h } from "../core/dom.js";

/** For an error that a request has thrown. */
export function problemList(error) {
  const errors = error.errors ?? [];
  if (errors.length === 0) return h("p", { class: "tone-bad kind" }, error.message);
  const item = ({ path, rule, suggestion }) =>
    h("li", {}, path ? h("code", {}, path) : "", ` ${rule}`, suggestion ? ` (${suggestion} would do)` : "");
  return h("ul", { class: "problems" }, errors.map(item));
}
