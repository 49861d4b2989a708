/** The page of an address that is none. */

import { fill, h } from "../core/dom.js";
import { link } from "../core/router.js";

/** Say so. */
export function open(root, { shell }) {
  shell.title("Nothing here");
  nothingHere(root, "There is no such page.");
}

/** Fill `root` with `text` and a way back. */
export function nothingHere(root, text, what = "") {
  fill(
    root,
    h(
      "section",
      { class: "panel welcome" },
      h("h1", {}, text),
      what ? h("p", { class: "mono" }, what) : null,
      h("a", { href: link("/") }, "Back to the jobs"),
    ),
  );
}
