/** A job file written in the browser: checked while one types, with its layout, plan and memory beside it. */

import { Problem, Unreachable, get, optional, send } from "../core/api.js";
import { fill, h, marked, panel } from "../core/dom.js";
import { counted, duration, layout, number, percent, sentence } from "../core/format.js";
import { notify } from "../core/notices.js";
import { link } from "../core/router.js";
import { may } from "../core/shell.js";
import { toYaml } from "../core/yaml.js";
import { documentOf } from "../parts/spec_document.js";
import { problemList } from "../parts/problems.js";
import { memoryBars } from "../parts/memory_bars.js";

const TYPED_MILLISECONDS = 500;
const EXAMPLES = {
  "A small GPT on 8 ranks": `name: quickstart
model: {family: gpt, layers: 4, hidden_size: 128, heads: 4, sequence_length: 128}
data: {source: python-stdlib}
train: {steps: 200, global_batch_size: 16, micro_batch_size: 2}
parallel: {tensor: 2, pipeline: 2, data: 2}
`,
  "A small Llama on one rank": `name: llama
model: {family: llama, layers: 4, hidden_size: 128, heads: 4, kv_heads: 2, sequence_length: 128}
data: {source: python-stdlib}
train:
  steps: 100
  global_batch_size: 16
  micro_batch_size: 4
  validate_every: 50
  optimizer: {learning_rate: 2.0e-3, min_learning_rate: 2.0e-4, warmup_steps: 10}
`,
  "Text files, layout chosen automatically": `name: from-text
model: {family: llama, layers: 8, hidden_size: 512, heads: 8, sequence_length: 512}
data: {source: text, paths: [/data/books], tokenizer: bpe, tokenizer_vocabulary: 8192}
train: {steps: 1000, global_batch_size: 64, validate_every: 100}
parallel: auto
checkpoint: {every_steps: 200, keep: 3}
`,
  "Fine-tune weights on chats": `name: chat
model: {from: /data/base, sequence_length: 2048}
data: {source: chat, paths: [/data/chats.jsonl], tokenizer: /data/base, validation_fraction: 0.05}
train:
  steps: 500
  global_batch_size: 32
  validate_every: 50
  optimizer: {learning_rate: 1.0e-5, warmup_steps: 20}
parallel: auto
`,
};

/** Build it. */
export async function open(root, context) {
  context.shell.title("Submit", "/submit");
  const page = new SubmitPage(root, context);
  await page.begin(context.query.get("from"));
  return { close: () => clearTimeout(page.typing) };
}

class SubmitPage {
  constructor(root, { router, viewer }) {
    this.router = router;
    this.text = h("textarea", {
      class: "code",
      spellcheck: "false",
      "aria-label": "Job file, in YAML or JSON",
      oninput: () => this.typed(),
      onkeydown: indent,
    });
    this.submit = h("button", { class: "button primary", disabled: true, onclick: () => this.send() }, "Submit");
    this.says = h("div", { role: "status" });
    this.bars = memoryBars();
    this.examples = h(
      "select",
      { "aria-label": "Examples", onchange: () => this.show(EXAMPLES[this.examples.value]) },
      Object.keys(EXAMPLES).map((name) => h("option", { value: name }, name)),
    );
    const editor = panel("Job file", {
      note: "YAML or JSON; paths are read on the server",
      controls: [this.examples, this.submit],
    });
    editor.body.append(this.text, h("p", { class: "note" }, "Tab indents; Escape, then Tab, leaves the field."));
    const check = panel("Check");
    check.body.append(this.says, this.bars.element);
    fill(
      root,
      h("div", { class: "title-row" }, h("h1", {}, "Submit a job")),
      h("div", { class: "columns" }, editor.element, check.element),
    );
    this.viewer = viewer;
  }

  async begin(from) {
    const job = from ? await optional(get(`/v1/jobs/${from}/spec`)) : null;
    if (job) this.examples.prepend(h("option", { value: "", selected: true }, `Copy of ${job.spec.name}`));
    // As its user wrote it: what the service decided for that job is decided anew for this one.
    this.text.value = job ? toYaml(job.written ?? job.spec) : Object.values(EXAMPLES)[0];
    await this.check();
  }

  /** Replace what is written by an example. */
  show(text) {
    if (text === undefined) return;
    this.text.value = text;
    this.typed();
  }

  typed() {
    clearTimeout(this.typing);
    this.submit.disabled = true;
    this.once = null;
    this.typing = setTimeout(() => this.check(), TYPED_MILLISECONDS);
  }

  async check() {
    const text = this.text.value;
    try {
      const document = await documentOf(text);
      const dry = await send("POST", "/v1/jobs", document, { dry_run: true });
      this.may = may(await this.viewer, "submit");
      if (text !== this.text.value) return;
      this.document = document;
      this.submit.disabled = !this.may;
      await this.showPlan(dry, text);
    } catch (error) {
      if (text !== this.text.value) return;
      this.bars.show([], 0);
      fill(this.bars.element);
      fill(this.says, problemList(error, text));
    }
  }

  async showPlan(dry, text) {
    const { spec, layout: found } = dry;
    const lines = [
      `${counted(found.world_size, "rank")}: ${layout(found.parallel)}, ${counted(found.micro_batches, "micro-batch", "micro-batches")} per step and replica.`,
      this.may ? "" : "Your key may not submit jobs.",
    ];
    fill(
      this.says,
      lines.filter(Boolean).map((line) => h("p", {}, line)),
      dry.notes.map((note) => h("p", { class: "note" }, marked(note))),
      dry.data_problem
        ? h("p", { class: "tone-bad kind" }, marked(sentence(`The job would fail: ${dry.data_problem}`)))
        : "",
      h("p", { class: "note" }, "Planning ..."),
    );
    const plan = dry.plan && (await this.explained(spec, found.parallel));
    if (text !== this.text.value) return;
    const best = plan?.plans?.[0];
    this.says.lastElementChild.remove();
    if (!best) {
      const why = dry.plan ? "The planner cannot predict the step time on this cluster." : dry.plan_note;
      this.says.append(h("p", { class: "note" }, marked(sentence(why))));
      fill(this.bars.element);
      return;
    }
    const time = best.hours >= 1 ? `${number(best.hours, 1)} hours` : duration(3600 * best.hours);
    this.says.append(
      h(
        "p",
        {},
        `Planned: ${duration(best.step_seconds)} a step, ${number(best.tokens_per_second)} tokens/s, MFU ${percent(best.mfu_full)}, bubble ${percent(best.bubble_ratio)}; ${time} in all.`,
      ),
      h(
        "ul",
        {},
        (plan.explanation?.sentences ?? []).map((each) => h("li", {}, marked(each))),
      ),
      plan.note ? h("p", { class: "note" }, marked(sentence(plan.note))) : "",
    );
    this.bars.show(
      (plan.explanation?.memory_by_stage ?? []).map((memory, stage) => [
        `stage ${stage}`,
        memory,
        plan.explanation.usable_by_stage[stage],
      ]),
      plan.explanation?.usable_bytes,
    );
  }

  /** What its layout takes on this cluster, and why; null where nobody can say. */
  async explained({ model, train, resources }, { world_size: _world, ...parallel }) {
    const asked = { model, train, resources, parallel, cluster: { current: true }, explain: true };
    return optional(send("POST", "/v1/plans", asked)).catch(() => null);
  }

  async send() {
    this.submit.disabled = true;
    this.once ??= [...crypto.getRandomValues(new Uint32Array(4))].join("-"); // where the answer is lost it is no other job
    try {
      const job = await send("POST", "/v1/jobs", this.document, {}, { headers: { "Idempotency-Key": this.once } });
      await this.router.go(link(`/jobs/${job.id}`));
    } catch (error) {
      if (!(error instanceof Problem || error instanceof Unreachable)) throw error;
      const sentence = "The service cannot be reached. You can submit again: only one job will be created.";
      notify(error instanceof Problem ? error.message : sentence, "bad");
      this.submit.disabled = false;
    }
  }
}

/** Tab indents by two spaces; after Escape it leaves the field, as everywhere. */
function indent(event) {
  const field = event.target;
  if (event.key === "Escape") field.dataset.leaves = "yes";
  else if (event.key !== "Tab") delete field.dataset.leaves;
  if (event.key !== "Tab" || event.shiftKey || field.dataset.leaves) return;
  event.preventDefault();
  field.setRangeText("  ", field.selectionStart, field.selectionEnd, "end");
  field.dispatchEvent(new Event("input"));
}
