/** The planner as a page: a model, a batch and a cluster in, layouts and the reasons out. */

import { Lanes } from "../charts/lanes.js";
import { send } from "../core/api.js";
import { emptyNote, fill, h, marked, panel, setText, setVisible, table } from "../core/dom.js";
import { bytes, counted, duration, layout, number, percent, sentence, signed, words } from "../core/format.js";
import { budgetTable } from "../parts/budget_table.js";
import { memoryBars } from "../parts/memory_bars.js";
import { problemList } from "../parts/problems.js";
import { documentOf } from "../parts/spec_document.js";
import { lanesOf, rangeOf, traceLegend } from "../parts/trace_lanes.js";

const PRESETS = {
  "This cluster, quickstart":
    "model: {layers: 4, hidden_size: 128, heads: 4, sequence_length: 128}\ntrain: {global_batch_size: 16}\ncluster: {current: true}\nparallel: auto\n",
  "Llama 8B on 8 H100":
    "model: {family: llama, layers: 32, hidden_size: 4096, heads: 32, kv_heads: 8, ffn_hidden_size: 14336, sequence_length: 8192, vocabulary_size: 128256}\ntrain: {global_batch_size: 128, precision: bf16, steps: 10000}\ncluster: {accelerator: h100-80gb, nodes: 1}\nparallel: auto\n",
  "GPT 22B on 8 A100 (arXiv:2205.05198)":
    "model: {layers: 48, hidden_size: 6144, heads: 64, sequence_length: 2048, vocabulary_size: 51200}\ntrain: {global_batch_size: 4, precision: bf16}\ncluster: {accelerator: a100-80gb, nodes: 1}\nparallel: auto\n",
  "GPT 175B on 1,024 A100 (arXiv:2104.04473)":
    "model: {layers: 96, hidden_size: 12288, heads: 96, sequence_length: 2048, vocabulary_size: 51200}\ntrain: {global_batch_size: 1536, precision: bf16, steps: 95367}\ncluster: {accelerator: a100-80gb, nodes: 128}\nparallel: auto\n",
  "GPT 530B on 2,240 A100 (arXiv:2201.11990)":
    "model: {layers: 105, hidden_size: 20480, heads: 128, sequence_length: 2048, vocabulary_size: 51200}\ntrain: {global_batch_size: 1920, precision: bf16}\ncluster: {accelerator: a100-80gb, nodes: 280}\nparallel: auto\n",
  "GPT 1T on 3,072 A100 (arXiv:2104.04473)":
    "model: {layers: 128, hidden_size: 25600, heads: 160, sequence_length: 2048, vocabulary_size: 51200}\ntrain: {global_batch_size: 3072, precision: bf16, steps: 71526}\ncluster: {accelerator: a100-80gb, nodes: 384}\nparallel: auto\n",
};

const LEAST_HOURS = 0.05; // less reads 0.0 h
/** What the hours are called that a long training loses. */
const LOST = {
  redone: "repeated steps",
  recovering: "recoveries",
  waiting: "waiting for nodes",
  slower: "fewer replicas",
  beside_steps: "validation and snapshots",
};

/** Build it. */
export async function open(root, { shell, router }) {
  shell.title("Plan", "/plan");
  const page = new PlanPage(root, router);
  return { close: () => page.lanes.close() };
}

class PlanPage {
  constructor(root) {
    this.text = h("textarea", {
      class: "code short",
      spellcheck: "false",
      "aria-label": "What to plan, in YAML or JSON",
    });
    this.text.value = Object.values(PRESETS)[0];
    const presets = h(
      "select",
      { "aria-label": "Examples", onchange: (event) => (this.text.value = PRESETS[event.target.value]) },
      Object.keys(PRESETS).map((name) => h("option", { value: name }, name)),
    );
    this.go = h("button", { class: "button primary", onclick: () => this.plan() }, "Plan");
    this.says = h(
      "div",
      { role: "status" },
      emptyNote("No plan yet: choose an example or describe a model, and press Plan."),
    );
    const question = panel("What to plan", { controls: [presets, this.go] });
    question.body.append(this.text);
    this.plans = panel("Layouts, best first");
    this.plans.body.append(this.says);
    [this.why, this.change, this.memory, this.line, this.run] = [
      panel("Where a step goes"),
      panel("Effect of single changes"),
      panel("Memory by stage"),
      panel("Timeline of one step"),
      panel("The whole training, with failures"),
    ];
    [this.budget, this.bars] = [budgetTable(), memoryBars()];
    this.lanes = new Lanes("The planned step", { format: duration });
    this.sentences = h("ul");
    this.why.body.append(this.sentences, this.budget.element);
    this.memory.body.append(this.bars.element);
    this.legend = h("div", { class: "legend" });
    this.line.body.append(this.legend, h("div", { class: "scroll lane-scroll" }, this.lanes.element));
    this.answers = [this.why, this.change, this.memory, this.line, this.run];
    fill(
      root,
      h("div", { class: "title-row" }, h("h1", {}, "Plan")),
      question.element,
      this.plans.element,
      h(
        "div",
        { class: "columns" },
        h("div", {}, this.why.element, this.memory.element, this.run.element),
        this.change.element,
      ),
      this.line.element,
    );
    this.showExplanation(null);
  }

  async plan() {
    this.go.disabled = true;
    fill(this.says, h("p", { class: "note" }, "Searching for layouts ..."));
    try {
      const document = await documentOf(this.text.value);
      this.show(await send("POST", "/v1/plans", { cluster: { current: true }, ...document, explain: true }));
    } catch (error) {
      this.showExplanation(null);
      fill(this.says, problemList(error, this.text.value));
    }
    this.go.disabled = false;
  }

  show({ plans, rejected, note, explanation }) {
    const { element, body } = table(
      ["Layout (t × p × d)", "Micro-batch", "Schedule", "Step time", "Tokens/s", "MFU", "Bubble", "Memory", "Whole run"],
      { label: "Plans" },
    );
    fill(
      body,
      plans.map((plan) =>
        h(
          "tr",
          {},
          [
            layout(plan.parallel),
            number(plan.micro_batch_size),
            scheduleOf(plan.parallel),
            duration(plan.step_seconds),
            number(plan.tokens_per_second),
            percent(plan.mfu_full),
            percent(plan.bubble_ratio),
            bytes(plan.memory_bytes.total),
            duration(3600 * plan.hours),
          ].map((text) => h("td", { class: "number" }, text)),
        ),
      ),
    );
    const lost = h(
      "details",
      {},
      h("summary", {}, `${counted(rejected.length, "layout")} rejected`),
      h(
        "ul",
        {},
        rejected.map((each) => h("li", {}, marked(sentence(`${layout(each.parallel)}: ${each.reason}`)))),
      ),
    );
    fill(
      this.says,
      plans.length ? element : h("p", { class: "kind tone-bad" }, "No layout fits."),
      note ? h("p", { class: "note" }, marked(sentence(note))) : "",
      rejected.length ? lost : "",
    );
    this.showExplanation(explanation, plans[0]);
  }

  showExplanation(explanation, plan) {
    for (const { element } of this.answers) setVisible(element, explanation !== null);
    if (!explanation) return;
    fill(
      this.sentences,
      explanation.sentences.map((each) => h("li", {}, marked(each))),
    );
    this.budget.show({ step_seconds: plan.step_seconds, parts: explanation.shares });
    const { element, body } = table(["Change", "Step time", "Memory", "Fits"], { label: "Changes" });
    fill(
      body,
      explanation.changes.map((each) =>
        h(
          "tr",
          {},
          h("td", {}, each.change),
          h(
            "td",
            { class: "number" },
            `${duration(each.step_seconds)} (${signed(each.step_seconds / plan.step_seconds - 1)})`,
          ),
          h("td", { class: "number" }, bytes(each.memory_bytes)),
          h("td", { class: each.fits ? "" : "kind tone-bad" }, each.fits ? "yes" : "no"),
        ),
      ),
    );
    fill(this.change.body, element);
    this.bars.show(
      explanation.memory_by_stage.map((memory, stage) => [
        `stage ${stage}`,
        memory,
        explanation.usable_by_stage[stage],
      ]),
      explanation.usable_bytes,
    );
    this.showTimeline(explanation.timeline);
    this.showRun(explanation.run);
  }

  showTimeline(timeline) {
    setVisible(this.line.element, Boolean(timeline?.length));
    if (!timeline?.length) return;
    const ranks = new Map();
    for (const pass of timeline) {
      if (!ranks.has(pass.rank)) ranks.set(pass.rank, { rank: pass.rank, slices: [] });
      ranks.get(pass.rank).slices.push({ ...pass, start: pass.begin, name: pass.kind });
    }
    const lanes = lanesOf(
      { ranks: [...ranks.values()].sort((one, other) => one.rank - other.rank) },
      { prefix: "stage" },
    );
    fill(this.legend, traceLegend({ ranks: [...ranks.values()] }));
    this.lanes.show(lanes, rangeOf(lanes));
  }

  showRun(run) {
    setVisible(this.run.element, Boolean(run));
    if (!run) return;
    const lost = Object.entries(run.lost_hours)
      .filter(([, hours]) => hours >= LEAST_HOURS)
      .map(([name, hours]) => `${LOST[name] ?? words(name)} ${number(hours, 1)} h`)
      .join(", ");
    fill(
      this.run.body,
      [
        `${duration(3600 * run.hours)}, ${number(run.gpu_hours)} GPU hours, goodput ${percent(run.goodput)}, ${counted(run.failures, "failure")}.`,
        `Best with ${counted(run.spare_nodes, "spare node")} and a checkpoint every ${duration(run.checkpoint_seconds)}.${lost ? ` Time lost: ${lost}.` : ""}`,
        `If every failure restarted all ranks: goodput ${percent(run.goodput_with_restarts)}, ${number(run.gpu_hours_with_restarts)} GPU hours.`,
      ].map((text) => h("p", {}, text)),
    );
    setText(this.run.note, "");
  }
}

function scheduleOf(parallel) {
  const stages = parallel.virtual_stages > 1 ? ` × ${parallel.virtual_stages}` : "";
  const on = parallel.stage_accelerators ? ` on ${parallel.stage_accelerators.join(" ")}` : "";
  const lists = parallel.stage_layers ? `, layers ${parallel.stage_layers.join(" ")}${on}` : on;
  return `${parallel.schedule ?? "–"}${stages}${lists}${parallel.recompute && parallel.recompute !== "none" ? `, ${parallel.recompute}` : ""}`;
}
