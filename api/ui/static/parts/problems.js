/** What is wrong with a document, once: each entry with its line, its field and a value that works, or the sentence. */

import { h, marked } from "../core/dom.js";
import { sentence } from "../core/format.js";

/** For an error that a request has thrown, about a document that was written as `text`. */
export function problemList(error, text = "") {
  const errors = error.errors ?? [];
  if (errors.length === 0) return h("p", { class: "tone-bad kind" }, marked(error.message));
  const found = errors.map((each) => [lineOf(text, each.path), each]);
  found.sort(([one], [other]) => one - other);
  return h(
    "ul",
    { class: "problems" },
    found.map(([line, each]) => h("li", {}, marked(problemText(each, line)))),
  );
}

/** One problem as a sentence. */
export function problemText({ path, rule, suggestion }, line) {
  const where = line === null ? "" : `Line ${line}: `;
  if (rule === "unknown key") {
    const meant = suggestion?.includes(", ") ? ` Those here are ${suggestion}.` : ` Did you mean \`${suggestion}\`?`;
    return `${where}unknown key \`${path}\`.${suggestion ? meant : ""}`;
  }
  const what = path ? `\`${path}\` ${rule}` : rule;
  return `${where}${sentence(what)}${suggestion ? ` Try \`${suggestion}\`.` : ""}`;
}

/** The line, from 1, of `text` on which the key at `path` (model.heads) stands; null where it is not found. */
export function lineOf(text, path) {
  let at = 0;
  for (const key of path ? path.split(".") : [""]) {
    if (/^\d+$/.test(key) && at > 0) continue; // an entry of a list
    const found = new RegExp(`(^|[\\s{,"'])${key.replace(/[^\w-]/g, "\\$&")}["']?\\s*:`, "m").exec(text.slice(at));
    if (!key || !found) return null;
    at += found.index + found[0].length;
  }
  return text.slice(0, at).split("\n").length;
}
