/** Whether the service answers, as the banner at the top of every page says it. */

import { fill, h, marked, setVisible } from "./dom.js";

class Connection {
  constructor() {
    this.element = h("div", { class: "banner", role: "status", hidden: true });
    this.lost = false;
  }

  /** A request was answered well. */
  works() {
    if (!this.lost) return;
    this.lost = false;
    setVisible(this.element, false);
  }

  /** A request was not; `error` says why. */
  fails(error) {
    this.lost = true;
    const text = error.status ? `The service returned an error, retrying: ${error.message}` : error.message;
    if (this.element.textContent !== text) fill(this.element, marked(text));
    setVisible(this.element, true);
  }
}

export const connection = new Connection();
