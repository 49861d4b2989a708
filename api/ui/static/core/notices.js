/** Short notices at the bottom of the page, and questions that must be answered first. */

import { h, marked } from "./dom.js";

const SHOWN_MILLISECONDS = 8000;
const area = h("div", { class: "notices", role: "status", "aria-live": "polite" });

/** Where notices appear; the shell places it. */
export function noticeArea() {
  return area;
}

/** Say something for a while; `tone` is good, warn or bad. */
export function notify(text, tone = "warn") {
  const notice = h("div", { class: `notice tone-${tone}` }, h("span", {}, marked(text)));
  const close = h("button", { class: "plain", "aria-label": "Dismiss", onclick: () => notice.remove() }, "×");
  notice.append(close);
  area.append(notice);
  setTimeout(() => notice.remove(), SHOWN_MILLISECONDS);
}

/**
 * Ask before something is done. `what` are nodes or texts that say what it costs. Resolves to what `read` returns of the
 * dialog, or to null where the viewer cancels. The dialog stays open while one of its fields is invalid: what was typed
 * is not lost. Without `no` there is nothing to decide, only to read.
 */
export function confirmed(title, what, { yes = "Yes", no = "Cancel", danger = false, read = () => true } = {}) {
  return new Promise((resolve) => {
    const say = (answer) => {
      dialog.close();
      resolve(answer);
    };
    const form = h(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          say(read(dialog));
        },
      },
      h("h2", { id: "confirm-title" }, title),
      h("div", { class: "confirm-what" }, what),
      h(
        "div",
        { class: "confirm-buttons" },
        no && h("button", { class: "button", type: "button", onclick: () => say(null) }, no),
        h("button", { class: `button ${danger ? "danger" : "primary"}` }, yes),
      ),
    );
    const dialog = h(
      "dialog",
      {
        class: "confirm",
        "aria-labelledby": "confirm-title",
        oncancel: () => resolve(null),
        onclose: () => dialog.remove(),
      },
      form,
    );
    document.body.append(dialog);
    dialog.showModal();
  });
}
