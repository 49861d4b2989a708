/** What happened to a job: read once, then what is new. */

import { get } from "../core/api.js";
import { KeyedRows, emptyNote, h, marked, setVisible, table } from "../core/dom.js";
import { UNKNOWN, clock, eventTone, utc, words } from "../core/format.js";
import { generationHeading } from "./recovery_table.js";

const PAGE = 1000;
const MOST_PAGES = 20;

/** A job's events, oldest first. */
export class JobEvents {
  constructor(id) {
    this.id = id;
    this.items = [];
    this.cursor = null;
  }

  /** Read what is new; whether there was anything. Throws like `get`. */
  async poll(signal) {
    let more = false;
    for (let page = 0; page < MOST_PAGES; page += 1) {
      const answer = await get(`/v1/jobs/${this.id}/events`, { limit: PAGE, cursor: this.cursor }, { signal });
      this.cursor = answer.resume_cursor;
      this.items.push(...answer.items);
      more ||= answer.items.length > 0;
      if (answer.next_cursor === null) break;
    }
    return more;
  }
}

/** A table of events, newest first; `{element, show(events)}`. */
export function eventTable(label = "Events") {
  const { element, body } = table(["Time", "Event", "Message", "Rank", "Step", generationHeading()], {
    classes: "events",
    label,
    columns: ["time", "event", "message", "rank", "step", "generation"],
  });
  const none = emptyNote("No event yet.");
  const rows = new KeyedRows(body, (event) => event.id, eventRow);
  return {
    element: h("div", { class: "tall" }, none, element),
    show(events) {
      setVisible(none, events.length === 0);
      setVisible(element, events.length > 0);
      rows.show([...events].reverse());
    },
  };
}

/** What an event says, with the rank that says it. */
function messageOf({ message, rank }) {
  return rank === null || /\branks? /.test(message) ? message : `rank ${rank}: ${message}`;
}

function eventRow(event) {
  const text = (value) => (value === null ? UNKNOWN : value.toLocaleString("en-US"));
  const element = h(
    "tr",
    {},
    h("td", { class: "mono moment", title: utc(event.time) }, clock(event.time)),
    h("td", { class: `kind tone-${eventTone(event)}` }, words(event.type)),
    h("td", { class: "message" }, marked(messageOf(event))),
    h("td", { class: "number c-rank" }, text(event.rank)),
    h("td", { class: "number c-step" }, text(event.step)),
    h("td", { class: "number c-generation" }, text(event.generation)),
  );
  return { element, show() {} };
}
