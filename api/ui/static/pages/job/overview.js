/** A job at a glance: its curves, what deserves attention, its ranks, where its time went, what happened last. */

import { all, get } from "../../core/api.js";
import { fill, h, marked, panel, setText } from "../../core/dom.js";
import { link } from "../../core/router.js";
import { attention } from "../../parts/attention.js";
import { JobEvents, eventTable } from "../../parts/events.js";
import { JobCharts, marksOf } from "../../parts/job_charts.js";
import { ledgerBar } from "../../parts/ledger_bar.js";
import { RankGrid, replacements } from "../../parts/rank_grid.js";
import { costSentence, recoveryTable } from "../../parts/recovery_table.js";

const EVENTS = 12;
const CPU_NOTE =
  "On CPUs MFU is of the rate that products of matrices reach on these cores, measured when the job starts.";
const RECOVERIES = 5;

/** The tab. */
export function create({ id, job }) {
  const charts = new JobCharts(id, job.spec, ["loss", "throughput"]);
  const events = new JobEvents(id);
  const [grid, ledger, recoveries, happened] = [
    new RankGrid({ compact: true }),
    ledgerBar(),
    recoveryTable(),
    eventTable(),
  ];
  const more = (tab, text) => h("a", { href: link(`/jobs/${id}/${tab}`) }, text);
  const notes = h("ul", { class: "attention" });
  const cpu = h("p", { class: "note" });
  const ranks = panel("Ranks", { controls: [more("ranks", "all about the ranks")] });
  const time = panel("Time", { controls: [more("history", "history")] });
  const failures = panel("Recoveries", { controls: [more("history", "all recoveries")] });
  const last = panel("Events", { controls: [more("history", "all events")] });
  ranks.body.append(grid.element);
  time.note.replaceWith(ledger.note);
  time.body.append(ledger.element);
  failures.body.append(recoveries.element);
  last.body.append(happened.element);
  const element = h(
    "div",
    {},
    cpu,
    notes,
    h("div", { class: "chart-grid two" }, charts.elements),
    h("div", { class: "columns" }, ranks.element, time.element),
    failures.element,
    last.element,
  );

  async function readSlowly(signal, now) {
    const [places, spent, failed] = await Promise.all([
      get(`/v1/jobs/${id}/ranks`, {}, { signal }),
      get(`/v1/jobs/${id}/ledger`, {}, { signal }),
      all(`/v1/jobs/${id}/recoveries`, {}, Infinity, { signal }),
    ]);
    grid.show(places.items, replacements(failed));
    setText(cpu, places.items.some((rank) => rank.device === "cpu") ? CPU_NOTE : "");
    ledger.show(spent);
    setText(failures.note, costSentence(failed));
    recoveries.show(failed.slice(-RECOVERIES));
    fill(
      notes,
      attention(now, places.items, events.items).map(({ text, tone, tab }) =>
        h("li", { class: `tone-${tone}` }, marked(text), " ", tab ? more(tab, "look") : null),
      ),
    );
  }

  return {
    element,
    async refresh(signal, now, moved) {
      if (moved) {
        if (await events.poll(signal)) {
          charts.mark(marksOf(events.items));
          happened.show(events.items.slice(-EVENTS));
        }
        await readSlowly(signal, now);
      }
      await charts.refresh(signal, now);
    },
    close() {
      charts.close();
      grid.close();
    },
  };
}
