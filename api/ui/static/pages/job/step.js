/** One step, deeply: where its time goes, and every action of every rank, traced on request. */

import { address, get, optional, send } from "../../core/api.js";
import { Lanes } from "../../charts/lanes.js";
import { download } from "../../core/download.js";
import { fill, h, panel, setAttribute, setText, setVisible } from "../../core/dom.js";
import { ago, clock, counted, duration, number, percent, utc, words } from "../../core/format.js";
import { notify } from "../../core/notices.js";
import { may } from "../../core/shell.js";
import { budgetTable } from "../../parts/budget_table.js";
import { PartsChart } from "../../parts/parts_chart.js";
import { planTable } from "../../parts/plan_table.js";
import { lanesOf, rangeOf, traceLegend } from "../../parts/trace_lanes.js";

const MOST_STEPS = 20;
const HINT = "Click the lanes; then the wheel or + and - zoom, drag moves, double-click shows everything.";

/** The tab. */
export function create(context) {
  return new StepTab(context);
}

class StepTab {
  constructor({ id, job, viewer, refreshNow, facts }) {
    Object.assign(this, { id, refreshNow, shownTrace: null });
    this.budget = budgetTable();
    this.source = h(
      "select",
      { "aria-label": "Measured from", onchange: () => this.refreshNow() },
      [
        ["", "newest trace, else steps timed in parts"],
        ["phases", "steps timed in parts during training"],
        ["trace", "newest trace"],
      ].map(([value, text]) => h("option", { value }, text)),
    );
    const budget = panel("Where a step goes", { controls: [this.source] });
    this.plan = planTable();
    const plan = panel("Planned and measured");
    plan.body.append(this.plan.element);
    [this.budgetNote, this.budgetPanel] = [budget.note, budget];
    this.noBudget = h("p", { class: "empty-note" }, "No parts measured yet. Trace a step to see where its time goes.");
    budget.body.append(this.noBudget, this.budget.element, whyTimesDiffer());
    const trace = panel("A traced step");
    this.steps = h("input", { type: "number", min: 1, max: MOST_STEPS, value: 1, "aria-label": "Steps to trace" });
    this.profiled = h("input", {
      placeholder: "ranks, such as 0, 3",
      size: 12,
      "aria-label": "Ranks for torch's profiler",
    });
    this.ask = h("button", { class: "button primary", onclick: () => this.request() }, "Trace the next step");
    this.choice = h("select", { "aria-label": "Trace", onchange: (event) => this.choose(event.target.value) });
    this.state = h("span", { class: "note", role: "status" });
    this.tools = h("span", { class: "toolbar-part" });
    this.facts = h("p", { class: "note" });
    [this.lanes, this.planned] = [
      new Lanes("Every action of every rank", { format: duration, onView: (view) => this.sync(view) }),
      new Lanes("The same step as planned", { format: duration }),
    ];
    this.legend = h("div", { class: "legend" });
    this.hint = h("p", { class: "note", hidden: true }, HINT);
    this.plannedHead = h("h3", { class: "lane-head", hidden: true }, "The same step as planned, on its own time scale");
    setVisible(this.lanes.element, false);
    setVisible(this.planned.element, false);
    trace.body.append(
      h(
        "div",
        { class: "toolbar" },
        h("label", { class: "inline" }, "Steps", this.steps),
        h("label", { class: "inline" }, "Torch profiler on", this.profiled),
        this.ask,
        this.choice,
        this.state,
        h("span", { class: "gap" }),
        this.tools,
      ),
      this.facts,
      this.legend,
      h("div", { class: "scroll lane-scroll" }, this.lanes.element, this.plannedHead, this.planned.element),
      this.hint,
    );
    this.parts = new PartsChart(id, facts.step_parts, job.spec.train?.time_parts_every ?? 0);
    this.element = h(
      "div",
      {},
      h("div", { class: "columns" }, budget.element, h("div", {}, plan.element, this.parts.element)),
      trace.element,
    );
    viewer.then((me) => setVisible(this.ask, may(me, "submit")));
  }

  sync(view) {
    if (!this.planned.whole) return;
    const [[from, to], [start, end]] = [this.lanes.whole, this.planned.whole];
    const across = (at) => start + ((at - from) / (to - from)) * (end - start);
    this.planned.look(view && view.map(across));
  }

  async request() {
    const profiled = this.profiled.value.split(/[ ,]+/).filter(Boolean).map(Number);
    try {
      const trace = await send("POST", `/v1/jobs/${this.id}/traces`, {
        steps: this.steps.valueAsNumber || 1,
        profiler_ranks: profiled,
      });
      this.wanted = trace.id;
      await this.refreshNow();
    } catch (error) {
      notify(`Trace: ${error.message}`, "bad");
    }
  }

  async refresh(signal, job, moved) {
    const pending = this.traces?.some((trace) => ["requested", "recording"].includes(trace.state));
    const chosen = this.asked !== this.source.value;
    this.asked = this.source.value;
    if (!moved && !pending && !this.wanted && !chosen) return;
    const source = { from: this.source.value };
    const [budget, plan, traces] = await Promise.all([
      job.step > 0 ? optional(get(`/v1/jobs/${this.id}/budget`, source, { signal })) : null,
      optional(get(`/v1/jobs/${this.id}/plan`, {}, { signal })),
      optional(get(`/v1/jobs/${this.id}/traces`, {}, { signal })),
    ]);
    this.showBudget(budget, job);
    if (plan) this.plan.show(plan);
    await this.parts.refresh(signal);
    this.traces = [...(traces?.items ?? [])].sort((one, other) => (one.requested_at < other.requested_at ? 1 : -1));
    this.showChoice();
    setAttribute(this.ask, "disabled", job.state !== "RUNNING");
    const ready = this.traces.find(
      (trace) => (this.wanted ? trace.id === this.wanted : true) && ["complete", "partial"].includes(trace.state),
    );
    if (ready && (this.shownTrace === null || this.wanted === ready.id)) {
      this.wanted = null;
      await this.choose(ready.id);
    }
    this.showState();
  }

  showBudget(budget, job) {
    const known = Boolean(budget?.parts?.length && budget.divided);
    setVisible(this.noBudget, !known);
    setVisible(this.budget.element, known);
    if (!budget?.parts?.length) return;
    const ideal = budget.parts.find((part) => part.name === "arithmetic");
    const mfu = ideal ? `, MFU ${percent(ideal.seconds / budget.step_seconds)}` : "";
    setText(this.budgetNote, `${duration(budget.step_seconds)} per step${mfu}; ${sourceOf(budget)}`);
    this.budget.show(budget);
  }

  showChoice() {
    const text = this.traces.map((trace) => `${trace.id} ${trace.state}`).join();
    if (text === this.choices) return;
    this.choices = text;
    const name = (trace) =>
      `step ${number(trace.first_step ?? 0)}${trace.steps > 1 ? ` and ${trace.steps - 1} more` : ""}, ${trace.state}, ${ago(trace.requested_at)}`;
    fill(
      this.choice,
      this.traces.map((trace) => h("option", { value: trace.id, selected: trace.id === this.shownTrace }, name(trace))),
    );
    setVisible(this.choice, this.traces.length > 0);
  }

  showState() {
    const newest = this.traces[0];
    if (!newest) setText(this.state, "No steps have been traced yet.");
    else if (newest.state === "complete") setText(this.state, "");
    else
      setText(
        this.state,
        `${newest.state}${newest.message ? `: ${newest.message}` : newest.state === "requested" ? ": waiting for the step to start" : ""}`,
      );
  }

  async choose(traceId) {
    this.chosen = traceId;
    const trace = await optional(get(`/v1/jobs/${this.id}/traces/${traceId}`));
    if (this.chosen !== traceId || !trace?.ranks?.length) return;
    this.shownTrace = traceId;
    const lanes = lanesOf(trace);
    const range = rangeOf(lanes);
    setVisible(this.lanes.element, true);
    setVisible(this.hint, true);
    this.lanes.show(lanes, range);
    const planned = trace.planned?.ranks ? lanesOf(trace.planned, { prefix: "plan, rank" }) : null;
    setVisible(this.plannedHead, Boolean(planned));
    setVisible(this.planned.element, Boolean(planned));
    if (planned) this.planned.show(planned, rangeOf(planned));
    fill(this.legend, traceLegend(trace));
    setText(this.facts, factsOf(trace));
    setAttribute(this.facts, "title", utc(trace.requested_at));
    const file = address(`/v1/jobs/${this.id}/traces/${traceId}/perfetto`);
    fill(
      this.tools,
      h("a", { class: "button", href: file, download: `${this.id}-${traceId}.pftrace` }, "Perfetto"),
      h(
        "button",
        {
          class: "button",
          onclick: () => download(`${this.id}-${traceId}.json`, JSON.stringify(trace), "application/json"),
        },
        "JSON",
      ),
      trace.profiles.map((rank) =>
        h(
          "a",
          {
            class: "button",
            href: address(`/v1/jobs/${this.id}/traces/${traceId}/profiles/${rank}`),
            download: `${this.id}-${traceId}-rank-${rank}.json.gz`,
          },
          `Profile of rank ${rank}`,
        ),
      ),
      h(
        "button",
        { class: "button", onclick: () => download(`${this.id}-${traceId}.svg`, this.lanes.svg(), "image/svg+xml") },
        "SVG",
      ),
    );
  }

  close() {
    this.lanes.close();
    this.planned.close();
    this.parts.close();
  }
}

/** Why a plan, a median and a trace have three step times. */
function whyTimesDiffer() {
  return h(
    "details",
    {},
    h("summary", {}, "Why do the step times on this page differ?"),
    h(
      "p",
      { class: "note" },
      "They are of different steps. Planned: the planner's estimate, before the job ran. Measured, in the table: the median of the first settled steps of this generation. Here and in the lanes: the traced steps, or the steps timed in parts; timing a step makes it a little slower, and single steps vary.",
    ),
  );
}

function sourceOf(budget) {
  if (!budget.divided) return "mean of the newest steps";
  return budget.measured_from === "phases" ? "from steps timed in parts" : `from ${words(budget.measured_from)}`;
}

function factsOf(trace) {
  const bubble = trace.bubble?.mean;
  return [
    `${counted(trace.ranks[0].steps.length, "step")} from step ${number(trace.first_step)}, generation ${trace.generation}, schedule ${trace.schedule}, requested ${clock(trace.requested_at)}`,
    bubble === undefined || bubble === null
      ? ""
      : `bubble ${percent(bubble)}${trace.planned ? ` (planned ${percent(trace.planned.bubble.mean)})` : ""}`,
    trace.clock.error_seconds === null
      ? ""
      : `${trace.clock.error_seconds ? `clocks agree within ${duration(trace.clock.error_seconds)}; ` : ""}timed on the ${trace.clock.device ? "devices" : "hosts"}`,
    trace.message ?? "",
  ]
    .filter(Boolean)
    .join("; ");
}
