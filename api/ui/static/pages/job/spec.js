/** The job's spec: what its user wrote, and as it is in force, with all defaults, as YAML and as JSON. */

import { get, optional } from "../../core/api.js";
import { download } from "../../core/download.js";
import { fill, h, panel, setVisible } from "../../core/dom.js";
import { link } from "../../core/router.js";
import { toYaml } from "../../core/yaml.js";

/** The tab. */
export function create({ id }) {
  const own = panel("What was submitted", {
    controls: [h("a", { class: "button", href: link("/submit", { from: id }) }, "Submit another like it")],
  });
  const whole = panel("All keys", {
    note: "defaults are grey",
    controls: [
      h(
        "button",
        { class: "button", onclick: () => download(`${name}.yaml`, toYaml(spec), "application/yaml") },
        "YAML",
      ),
      h(
        "button",
        { class: "button", onclick: () => download(`${name}.json`, JSON.stringify(spec, null, 2), "application/json") },
        "JSON",
      ),
    ],
  });
  const [written, text] = [
    h("pre", { class: "document", tabindex: "0" }),
    h("pre", { class: "document", tabindex: "0" }),
  ];
  own.body.append(written);
  whole.body.append(text);
  let [spec, name, shown] = [{}, "job", ""];
  return {
    element: h("div", { class: "columns" }, own.element, whole.element),
    async refresh(signal, job) {
      [spec, name] = [job.spec, job.name];
      if (shown === job.etag) return;
      const both = await optional(get(`/v1/jobs/${id}/spec`, {}, { signal }));
      shown = job.etag;
      setVisible(own.element, Boolean(both?.written));
      fill(written, toYaml(both?.written ?? {}));
      fill(
        text,
        linesOf(toYaml(spec), both?.written ?? spec).map(({ line, isOwn }) =>
          h("span", { class: isOwn ? null : "default" }, `${line}\n`),
        ),
      );
    },
  };
}

/** The lines of a document in YAML, each with whether it, or a part of it, is in `written`. */
export function linesOf(yaml, written) {
  const path = [];
  return yaml
    .trimEnd()
    .split("\n")
    .map((line) => {
      const [, indent, key] = /^( *)([^\s:"-][^:]*):/.exec(line) ?? [];
      if (key !== undefined) path.splice(indent.length / 2, Infinity, key);
      return { line, isOwn: holds(written, path) };
    });
}

function holds(written, path) {
  let inner = written;
  for (const key of path) {
    if (inner === null || typeof inner !== "object" || Array.isArray(inner)) return true; // a value as a whole
    if (!(key in inner)) return false;
    inner = inner[key];
  }
  return true;
}
