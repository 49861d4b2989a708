/** A job's life on one axis: its states, its recoveries with their phases, where every second went, all events. */

import { Lanes } from "../../charts/lanes.js";
import { color } from "../../charts/colors.js";
import { all, get } from "../../core/api.js";
import { h, panel, setText } from "../../core/dom.js";
import { clock, duration, ledgerName, ledgerTone, phaseName, stateTone, words } from "../../core/format.js";
import { JobEvents, eventTable } from "../../parts/events.js";
import { ledgerBar } from "../../parts/ledger_bar.js";
import { costSentence, recoveryTable } from "../../parts/recovery_table.js";

/** The tab. */
export function create({ id }) {
  let longer = false; // than a day
  const events = new JobEvents(id);
  const lanes = new Lanes("States and recoveries over the job's life", {
    format: (seconds) => clock(1000 * seconds, longer),
    laneHeight: 34,
    moments: true,
  });
  const [ledger, recoveries, happened] = [ledgerBar(), recoveryTable(), eventTable()];
  const life = panel("Life", {
    note: "states, every second by class, the phases of recoveries; click, then wheel zooms",
  });
  life.body.append(lanes.element);
  const time = panel("Every second");
  time.note.replaceWith(ledger.note);
  time.body.append(ledger.element);
  const failures = panel("Recoveries");
  failures.body.append(recoveries.element);
  const filters = eventFilters(() => draw());
  const list = panel("Events", { controls: filters.elements });
  list.body.append(happened.element);

  function draw() {
    happened.show(events.items.filter(filters.wants));
  }

  return {
    element: h("div", {}, life.element, h("div", {}, time.element, failures.element), list.element),
    async refresh(signal, now, moved) {
      if (!moved) return;
      const [different, spent, failed] = await Promise.all([
        events.poll(signal),
        get(`/v1/jobs/${id}/ledger`, { intervals: true }, { signal }),
        all(`/v1/jobs/${id}/recoveries`, {}, Infinity, { signal }),
      ]);
      if (different) {
        filters.offer(events.items);
        draw();
      }
      ledger.show(spent);
      setText(failures.note, costSentence(failed));
      recoveries.show(failed);
      const until = Date.parse(spent.until) / 1000;
      longer = spent.wall_seconds > 86_400;
      lanes.show(
        [
          { name: "state", slices: statesOf(events.items, until) },
          { name: "time", slices: (spent.intervals ?? []).map(spanOf) },
          ...(failed.length ? [{ name: "recovery", slices: failed.flatMap(phasesOf) }] : []),
        ],
        [Date.parse(spent.began_at) / 1000, until],
      );
    },
    close: () => lanes.close(),
  };
}

function statesOf(events, until) {
  const entered = events
    .filter((event) => event.type === "state_changed" || event.type === "submitted")
    .map((event) => [Date.parse(event.time) / 1000, event.data.to ?? "QUEUED"]);
  return entered.map(([start, state], place) => {
    const end = Math.max(start, entered[place + 1]?.[0] ?? until);
    return {
      start,
      end,
      color: color(stateTone(state)),
      alpha: state === "RUNNING" ? 0.75 : 0.9,
      text: state,
      ink: color("panel"),
      tip: `${state} for ${duration(end - start)}\nfrom ${clock(1000 * start)}`,
    };
  });
}

/** A part of the ledger's line, coloured by what most of it was. */
function spanOf(interval) {
  const [start, end] = [Date.parse(interval.begin) / 1000, Date.parse(interval.end) / 1000];
  const parts = Object.entries(interval.seconds)
    .filter(([, seconds]) => seconds > 0)
    .sort(([, one], [, other]) => other - one);
  const [most] = parts[0] ?? ["queue"];
  const tip = parts.map(([name, seconds]) => `${ledgerName(name)} ${duration(seconds)}`).join("\n");
  return { start, end, color: color(ledgerTone(most)), alpha: 0.85, text: ledgerName(most), ink: color("panel"), tip };
}

function phasesOf(recovery) {
  let start = Date.parse(recovery.time) / 1000;
  return Object.entries(recovery.seconds)
    .filter(([, seconds]) => seconds > 0)
    .map(([name, seconds]) => {
      const slice = {
        start,
        end: start + seconds,
        color: color(ledgerTone(name) === "bad" ? "bad" : "warn"),
        text: phaseName(name),
        tip: `${phaseName(name)}: ${duration(seconds)} of ${duration(recovery.total_seconds)}\n${recovery.cause}`,
      };
      start += seconds;
      return slice;
    });
}

function eventFilters(changed) {
  const type = h(
    "select",
    { "aria-label": "Only events of a type", onchange: changed },
    h("option", { value: "" }, "All types"),
  );
  const text = h("input", {
    type: "search",
    placeholder: "text, rank 3, step 120",
    "aria-label": "Only events with this text",
    oninput: changed,
  });
  const known = new Set();
  return {
    elements: [type, text],
    offer(events) {
      for (const { type: name } of events) {
        if (known.has(name)) continue;
        known.add(name);
        type.append(h("option", { value: name }, words(name)));
      }
    },
    wants(event) {
      const haystack = `${event.message} ${event.type} rank ${event.rank} step ${event.step}`.toLowerCase();
      return (!type.value || event.type === type.value) && haystack.includes(text.value.trim().toLowerCase());
    },
  };
}
