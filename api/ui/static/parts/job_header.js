/** The head of a job's page: name, state, what can be done, progress and the figures that matter. */

import { badge, bar, h, setAttribute, setText, setVisible } from "../core/dom.js";
import { UNKNOWN, duration, layout, number, percent, remaining, stateTone, validationLoss, why } from "../core/format.js";
import { may } from "../core/shell.js";
import { ACTIONS, run } from "./actions.js";

const OVER = ["SUCCEEDED", "FAILED", "CANCELLED"];
const MEAN = "Over the last 20 steps, or the whole run of a job that is over, without the first step after each start.";
const FIGURES = [
  ["Train loss", (job) => number(job.metrics.latest.loss, 4)],
  ["Validation loss", (job) => validationText(job), "Of the newest step at which it was measured; of the first validation set if no part of the corpus is held out."],
  ["Tokens/s", (job) => number(job.metrics.mean.tokens_per_second), `Mean. ${MEAN}`],
  [
    "MFU",
    (job) => percent(job.metrics.mean.mfu_full),
    `Model FLOPs utilization: mean share of the peak rate of the job's devices, attention counted in full. On CPUs, MFU is relative to the matmul rate measured on these cores at job start. ${MEAN}`,
  ],
  ["Step time", (job) => duration(job.metrics.mean.step_seconds), `Mean. ${MEAN}`],
  [
    "Goodput",
    (job) => percent(job.goodput),
    "Time in which new steps were computed, of all time but queue and pauses.",
  ],
  ["Restarts", (job) => number(job.restarts)],
  [
    "Layout",
    (job) =>
      job.parallel.context > 1 || job.parallel.expert > 1
        ? layout(job.parallel)
            .replace(/, context | × /g, "×")
            .replace(", expert ", " e")
        : layout(job.parallel),
    "Ranks: tensor × pipeline × data parallel, and × context parallel where sequences are split; e: over how many of them experts are spread.",
  ],
  ["Running time", (job) => duration(job.running_seconds), "Without queue and pauses."],
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
    this.figures = FIGURES.map(([label, , hint], place) =>
      h("div", { class: "figure", title: hint ?? null }, h("dt", {}, label), this.values[place]),
    );
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
      h("dl", { class: "figures" }, this.figures),
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
    const isOver = OVER.includes(job.state);
    const stays = isOver || job.state === "PAUSED"; // what passes by has no place of its own, which would move the page
    this.showWhy(stays ? why(job) : "", tone);
    this.bar.show(job.steps > 0 ? Math.min(1, job.step / job.steps) : 0, tone);
    const reason = stays ? "" : why(job).split("\n")[0];
    setText(this.progress, [progressText(job), reason].filter(Boolean).join(" · "));
    setAttribute(this.progress, "title", reason || null);
    FIGURES.forEach(([, text], place) => {
      const value = text(job);
      setText(this.values[place], value);
      setVisible(this.figures[place], !(isOver && value === UNKNOWN));
    });
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
  return job.eta_seconds === null ? text : `${text}, about ${remaining(job.eta_seconds)} to go`;
}

/** The newest validation loss, and its step where that is not the newest one. */
export function validationText(job) {
  const text = number(validationLoss(job.metrics.latest), 4);
  const every = job.spec.train?.validate_every;
  if (text === UNKNOWN || !every || job.step % every === 0 || job.step === job.steps) return text;
  return `${text} at ${number(job.step - (job.step % every))}`;
}
