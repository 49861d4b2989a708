/** The JobSpec as it is in force, with what differs from the defaults of the job before in mind: as YAML and as JSON. */

import { download } from "../../core/download.js";
import { h, panel, setText } from "../../core/dom.js";
import { link } from "../../core/router.js";
import { toYaml } from "../../core/yaml.js";

/** The tab. */
export function create({ id }) {
  const { element, body } = panel("Spec", {
    note: "with all defaults",
    controls: [
      h("a", { class: "button", href: link("/submit", { from: id }) }, "Submit another like it"),
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
  const text = h("pre", { class: "document", tabindex: "0" });
  body.append(text);
  let [spec, name] = [{}, "job"];
  return {
    element: h("div", {}, element),
    async refresh(_signal, job) {
      [spec, name] = [job.spec, job.name];
      setText(text, toYaml(spec));
    },
  };
}
