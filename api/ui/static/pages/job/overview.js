/** A job at a glance: its curves, what deserves attention, its ranks, where its time went, what happened last. */

import { all, get, optional } from "../../core/api.js";
import { fill, h, marked, panel, setText, setVisible } from "../../core/dom.js";
import { link } from "../../core/router.js";
import { attention } from "../../parts/attention.js";
import { JobEvents, eventTable } from "../../parts/events.js";
import { JobCharts, marksOf, smoothingControl } from "../../parts/job_charts.js";
import { ledgerBar } from "../../parts/ledger_bar.js";
import { RankGrid, replacements } from "../../parts/rank_grid.js";
import { costSentence, recoveryTable } from "../../parts/recovery_table.js";

const EVENTS = 12;
const LOG_LINES = 20;
const RECOVERIES = 5;

/** The tab. */
export function create({ id, job, query }) {
  const charts = new JobCharts(id, job.spec, ["loss", "throughput"], query);
  const events = new JobEvents(id);
  const [grid, ledger, recoveries, happened] = [
    new RankGrid({ compact: true }),
    ledgerBar(),
    recoveryTable(),
    eventTable(),
  ];
  const more = (tab, text) => h("a", { href: link(`/jobs/${id}/${tab}`) }, text);
  const notes = h("ul", { class: "attention" });
  const log = lastLines(more("logs", "the whole log"));
  const ranks = panel("Ranks", { controls: [more("ranks", "all about the ranks")] });
  const time = panel("Time", { controls: [more("history", "history")] });
  const failures = panel("Recoveries", { controls: [more("history", "all recoveries")] });
  const last = panel("Events", { controls: [more("history", "all events")] });
  ranks.body.append(grid.element);
  time.note.replaceWith(ledger.note);
  time.body.append(ledger.element);
  failures.body.append(recoveries.element);
  last.body.append(happened.element);
  const curves = h(
    "div",
    {},
    h("div", { class: "chart-head" }, smoothingControl(charts.group)),
    h("div", { class: "chart-grid two" }, charts.elements),
  );
  const element = h(
    "div",
    {},
    notes,
    log.element,
    curves,
    h("div", { class: "columns reserved" }, ranks.element, time.element),
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
    ledger.show(spent);
    setText(failures.note, costSentence(failed));
    recoveries.show(failed.slice(-RECOVERIES));
    fill(
      notes,
      attention(now, places.items, events.items).map(({ text, tone, tab }) =>
        h("li", { class: `tone-${tone}` }, marked(text), " ", tab ? more(tab, "details") : null),
      ),
    );
  }

  return {
    element,
    async refresh(signal, now, moved) {
      const failed = now.state === "FAILED";
      setVisible(curves, !(failed && now.step === 0));
      setVisible(log.element, failed);
      if (failed && moved) log.show(await optional(get(`/v1/jobs/${id}/logs`, { tail: LOG_LINES }, { signal })));
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

/** The last lines of a job's log; `{element, show(answer)}`. */
function lastLines(link) {
  const { element, body } = panel("End of the log", { controls: [link] });
  const lines = h("div", { class: "log short", tabindex: "0", role: "log", "aria-label": "End of the log" });
  body.append(lines);
  let shown = "";
  return {
    element,
    show(answer) {
      const texts = (answer?.items ?? [])
        .filter(({ text }) => text.trim())
        .map(({ rank, text }) => `[${rank}] ${text}`);
      setVisible(element, texts.length > 0);
      if (texts.join("\n") === shown) return;
      shown = texts.join("\n");
      fill(
        lines,
        texts.map((text) => h("div", { class: "log-line" }, text)),
      );
      lines.scrollTop = lines.scrollHeight;
    },
  };
}
