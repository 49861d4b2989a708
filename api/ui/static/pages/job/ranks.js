/** The ranks of a job: who is where, how long each works and waits, who is slow, who waits for whom. */

import { all, get } from "../../core/api.js";
import { fill, h, panel, setAttribute, setText, setVisible, table, KeyedRows } from "../../core/dom.js";
import { bytes, clock, duration, nodeName, number, numberOf, sentence, utc } from "../../core/format.js";
import { link } from "../../core/router.js";
import { slownessOf } from "../../parts/attention.js";
import { COLORINGS, RankGrid, describe, replacements, usualOf } from "../../parts/rank_grid.js";
import { RankHistory } from "../../parts/rank_history.js";

const MOST_ROWS = 256;
const MOST_ASKED = 64; // ranks of a job whose agents are asked again and again; of larger ones when somebody wants it
const STANDS_STILL_STEPS = 5;
const OWN_AND_WAIT =
  "Own time: the part of a step in which a rank works. Wait: the part in which it waits for other ranks. A rank with a longer own time than its peers makes them wait.";

/** The tab. */
export function create({ id }) {
  return new RanksTab(id);
}

class RanksTab {
  constructor(id) {
    this.id = id;
    this.grid = new RankGrid({ onPick: (rank) => this.pick(rank) });
    this.history = new RankHistory(id);
    this.replaced = new Map();
    this.verdict = h("p", { class: "verdict" });
    this.detail = h(
      "div",
      { class: "rank-detail" },
      h("p", { class: "note" }, "Click a rank for its coordinates, log and stack."),
    );
    const coloring = h(
      "select",
      { "aria-label": "Color by", onchange: (event) => this.grid.colorBy(event.target.value) },
      Object.entries(COLORINGS).map(([name, { label }]) => h("option", { value: name }, `color: ${label}`)),
    );
    const grid = panel("Grid", { controls: [coloring] });
    grid.body.append(this.verdict, this.grid.element, h("p", { class: "note" }, OWN_AND_WAIT));
    const detail = panel("Rank");
    detail.body.append(this.detail);
    this.waits = panel("Who waits for whom", {
      controls: [h("button", { class: "button", onclick: () => this.askWaits() }, "Sample now")],
    });
    this.waitsBody = h("div", {}, h("p", { class: "empty-note" }, "Not sampled yet."));
    this.waits.body.append(this.waitsBody);
    const list = panel("All ranks");
    const { element, body } = table(
      [
        "Rank",
        "Tensor",
        "Stage",
        "Replica",
        "Context",
        "Experts",
        "State",
        "Own time",
        "Wait",
        "Memory",
        "Node",
        "Device",
        "PID",
        "Replaced",
      ],
      { label: "Ranks" },
    );
    this.note = h("p", { class: "note" });
    list.body.append(h("div", { class: "tall" }, element), this.note);
    this.rows = new KeyedRows(
      body,
      (rank) => rank.rank,
      (rank) => this.row(rank),
    );
    this.element = h(
      "div",
      {},
      grid.element,
      h("div", { class: "columns" }, detail.element, this.waits.element),
      this.history.element,
      list.element,
    );
  }

  row(rank) {
    const cells = Array.from({ length: 14 }, () => h("td", { class: "number" }));
    fill(
      cells[0],
      h("button", { class: "plain", onclick: () => this.grid.pick(this.byNumber.get(rank.rank)) }, String(rank.rank)),
    );
    return {
      element: h("tr", {}, cells),
      show: (now) => {
        const texts = [
          now.tensor,
          now.pipeline,
          now.data,
          now.context,
          now.expert ?? "–",
          now.state,
          duration(now.own_seconds),
          duration(now.wait_seconds),
          bytes(now.memory_bytes),
          nodeName(now.node),
          now.device ?? "–",
          now.pid ?? "–",
          this.replaced.get(now.rank)?.count ?? 0,
        ];
        texts.forEach((text, place) => setText(cells[place + 1], String(text)));
        setAttribute(cells[10], "title", now.node);
      },
    };
  }

  async refresh(signal, job, moved) {
    this.ranks = (await get(`/v1/jobs/${this.id}/ranks`, {}, { signal })).items;
    if (moved) this.replaced = replacements(await all(`/v1/jobs/${this.id}/recoveries`, {}, 1000, { signal }));
    this.byNumber = new Map(this.ranks.map((rank) => [rank.rank, rank]));
    this.usual = usualOf(this.ranks);
    this.grid.show(this.ranks, this.replaced);
    setText(this.verdict, this.verdictText());
    this.rows.show(this.ranks.slice(0, MOST_ROWS));
    setText(
      this.note,
      this.ranks.length > MOST_ROWS
        ? `The first ${MOST_ROWS} of ${number(this.ranks.length)}; the grid has all of them.`
        : "",
    );
    if (moved && this.wantsWaits(job)) await this.askWaits(signal);
    else this.dateWaits(job);
    if (moved) await this.history.refresh(signal, this.ranks);
  }

  verdictText() {
    const slow = this.ranks.find((rank) => rank.straggler);
    if (slow)
      return sentence(
        `${slow.straggler.sentence}, on node ${nodeName(slow.node)} (${slow.device ?? "–"}, pid ${slow.pid ?? "–"})`,
      );
    const known = this.ranks.filter((rank) => Number.isFinite(rank.own_seconds));
    if (known.length === 0) return "No timing data yet.";
    const worst = known.reduce((one, other) =>
      other.own_seconds / this.usual.get(other.pipeline) > one.own_seconds / this.usual.get(one.pipeline) ? other : one,
    );
    return `No rank is persistently slower than its peers. Slowest relative to its stage: rank ${worst.rank}; ${slownessOf(worst, this.usual.get(worst.pipeline))}.`;
  }

  /** Whether the agents are asked without being told to: there are few of them, or the job seems to stand still. */
  wantsWaits(job) {
    if (job.step !== this.step) [this.step, this.since] = [job.step, Date.now()];
    const usual = 1000 * (numberOf(job.metrics.latest.step_seconds) || 60);
    return (
      job.state === "RUNNING" &&
      (this.ranks.length <= MOST_ASKED || Date.now() - this.since > STANDS_STILL_STEPS * usual)
    );
  }

  async askWaits(signal) {
    const waits = await get(`/v1/jobs/${this.id}/waits`, {}, { signal }).catch((error) => {
      if (error.name === "AbortError") throw error;
      fill(this.waitsBody, h("p", { class: "empty-note" }, error.message));
      return null;
    });
    if (waits) this.showWaits(waits);
  }

  /** Say from when the answer is, and whether the job has left the state in which it was given. */
  dateWaits(job) {
    if (!this.waitsAt) return;
    const old = job.state === "RUNNING" ? "" : `; the job is ${job.state} now`;
    setText(this.waits.note, `sampled at ${clock(this.waitsAt)}${old}`);
    setAttribute(this.waits.note, "title", utc(this.waitsAt));
  }

  showWaits(waits) {
    this.waitsAt = waits.at;
    this.dateWaits({ state: "RUNNING" });
    const line = (rank) =>
      h(
        "tr",
        {},
        h("td", { class: "number" }, String(rank.rank)),
        h("td", {}, rank.doing ?? rank.phase ?? "–"),
        h("td", { class: "number" }, duration(rank.since_seconds)),
        h(
          "td",
          {},
          rank.waits_for?.length
            ? `rank ${rank.waits_for.slice(0, 8).join(", ")}${rank.waits_for.length > 8 ? " ..." : ""}`
            : "no rank",
        ),
      );
    const { element, body } = table(["Rank", "Doing", "For", "Waits for"], { label: "Who waits for whom" });
    fill(body, waits.ranks.slice(0, 64).map(line));
    fill(
      this.waitsBody,
      h("p", { class: waits.culprits.length ? "kind tone-bad" : "" }, `${waits.sentence}.`),
      h("div", { class: "tall" }, element),
    );
  }

  pick(rank) {
    const stack = h("pre", { class: "stack", hidden: true, tabindex: "0" });
    const show = async () => {
      setVisible(stack, true);
      setText(stack, "Requesting the stack ...");
      const answer = await get(`/v1/jobs/${this.id}/ranks/${rank.rank}/stack`).catch((error) => ({
        text: error.message,
      }));
      setText(stack, answer.at ? `${clock(answer.at)}, pid ${answer.pid}\n${answer.text}` : answer.text);
    };
    fill(
      this.detail,
      describe(rank, this.usual).map((line, place) => h("p", { class: place ? "" : "strong" }, line)),
      h(
        "div",
        { class: "toolbar" },
        h("a", { class: "button", href: link(`/jobs/${this.id}/logs`, { rank: rank.rank }) }, "Log"),
        h("button", { class: "button", onclick: show }, "Current stack"),
      ),
      stack,
    );
  }

  close() {
    this.grid.close();
    this.history.close();
  }
}
