/** The head of a job's page: name, state, what can be done, progress and the figures that matter. */

import { badge, bar, h, setAttribute, setText, setVisible } from "../core/dom.js";
import { UNKNOWN, duration, layout, number, percent, stateTone, why } from "../core/format.js";
import { may } from "../core/shell.js";
import { ACTIONS, run } from "./actions.js";

const FIGURES = [
  ["Train loss", (job) => number(job.metrics.latest.loss, 4)],
  ["Validation loss", (job) => number(job.metrics.latest.validation_loss, 4)],
  ["Tokens/s", (job) => number(job.metrics.latest.tokens_per_second)],
  [
    "MFU (full)",
    (job) => percent(job.metrics.latest.mfu_full),
    "Of the peak rate of the job's devices, attention counted in full. On CPUs the peak is what this many cores reach in products of matrices.",
  ],
  ["Step", (job) => duration(job.metrics.latest.step_seconds)],
  [
    "Goodput",
    (job) => percent(job.goodput),
    "Time in which new steps were computed, of all time but queue and pauses.",
  ],
  ["Restarts", (job) => number(job.restarts)],
  ["Ranks (t × p × d)", (job) => layout(job.parallel)],
  ["Running for", (job) => runningFor(job)],
];

export class JobHeader {
  /** `changed` is called after an action. */
  constructor(context, id, changed) {
    this.context = context;
    this.changed = changed;
    this.name = h("span", { class: "job-name" }, id);
    this.badge = badge();
    this.id = h("span", { class: "job-id" }, id);
    this.labels = h("span", { class: "labels" });
    this.buttons = Object.entries(ACTIONS).map(([action, { name }]) => this.button(action, name));
    this.why = h("p", { class: "why", hidden: true });
    const named = { role: "region", "aria-label": "What was printed" };
    this.printed = h("pre", { class: "stack why-printed", hidden: true, tabindex: "0", ...named });
    this.bar = bar("Progress");
    this.progress = h("span", { class: "progress-text" });
    this.values = FIGURES.map(() => h("dd", { class: "value" }, UNKNOWN));
    const figure = ([label, , hint], place) =>
      h("div", { class: "figure", title: hint ?? null }, h("dt", {}, label), this.values[place]);
    this.element = h(
      "div",
      { class: "job-head" },
      h(
        "div",
        { class: "title-row" },
        h("h1", {}, this.name),
        this.badge.element,
        this.id,
        this.labels,
        h("span", { class: "gap" }),
        h(
          "div",
          { class: "actions" },
          this.buttons.map(({ element }) => element),
        ),
      ),
      this.why,
      this.printed,
      h("div", { class: "progress-row" }, this.bar.element, this.progress),
      h("dl", { class: "figures" }, FIGURES.map(figure)),
    );
  }

  button(action, name) {
    const act = async () => {
      await run(action, this.job, this.context);
      await this.changed();
    };
    return {
      action,
      element: h(
        "button",
        { class: `button ${ACTIONS[action].danger ? "danger-outline" : ""}`, hidden: true, onclick: act },
        name,
      ),
    };
  }

  /** Show `job` as it is now to `me`. */
  show(job, me) {
    this.job = job;
    const tone = stateTone(job.state);
    setText(this.name, job.name);
    this.badge.show(job.state, tone);
    const labels = Object.entries(job.labels ?? {}).map(([key, value]) => (value ? `${key}=${value}` : key));
    if (job.owner) labels.unshift(`by ${job.owner}`);
    setText(this.labels, labels.join("  "));
    this.showWhy(why(job), tone);
    this.bar.show(job.steps > 0 ? Math.min(1, job.step / job.steps) : 0, tone);
    setText(this.progress, progressText(job));
    FIGURES.forEach(([, text], place) => setText(this.values[place], text(job)));
    for (const { action, element } of this.buttons)
      setVisible(element, may(me, ACTIONS[action].scope) && ACTIONS[action].offered(job, this.context.facts));
  }

  showWhy(reason, tone) {
    const [sentence, printed] = sentenceAndPrinted(reason);
    setText(this.why, sentence);
    setAttribute(this.why, "class", `why tone-${tone}`);
    setVisible(this.why, sentence !== "");
    setVisible(this.printed, printed !== "");
    if (this.printed.textContent === printed) return;
    setText(this.printed, printed);
    this.printed.scrollTop = this.printed.scrollHeight; // of a traceback the last line is what counts
  }
}

/** The sentence of a reason, and what stands below it: a traceback, or the last that a process printed. */
function sentenceAndPrinted(reason) {
  const [sentence, ...lines] = reason.split("\n");
  return [sentence, lines.join("\n").trim()];
}

/** Where a job is, in one line. */
function progressText(job) {
  const text = `step ${number(job.step)} of ${number(job.steps)}`;
  return job.eta_seconds === null ? text : `${text}, about ${duration(job.eta_seconds)} to go`;
}

function runningFor(job) {
  if (!job.started_at) return UNKNOWN;
  const until = job.finished_at ? Date.parse(job.finished_at) : Date.now();
  return duration(Math.round((until - Date.parse(job.started_at)) / 1000));
}
