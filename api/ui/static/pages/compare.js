/** Jobs on the same axes, and what is different about them. The address says which, and can be shared. */

import { X_AXES } from "../charts/group.js";
import { LineChart } from "../charts/line_chart.js";
import { seriesColor } from "../charts/colors.js";
import { get, optional } from "../core/api.js";
import { fill, h, panel, setText, setVisible, table } from "../core/dom.js";
import { duration, layout, number, numberOf, percent, validationLoss } from "../core/format.js";
import { Live } from "../core/live.js";
import { fillMenu, menu } from "../core/menu.js";
import { notify } from "../core/notices.js";
import { link } from "../core/router.js";
import { differences } from "../parts/differences.js";
import { CHARTS, chartControls, groupOf } from "../parts/job_charts.js";
import { JobCurves, identical, lostInWords } from "../parts/curves.js";

const MOST = 10;
const MOST_BESIDE = 2; // jobs whose two tables have room beside each other
const SECONDS = 3;
const SHARED = ["tokens", "time"];

/** Build it. */
export async function open(root, context) {
  context.shell.title("Compare", "/compare");
  const asked = [...new Set((context.query.get("jobs") ?? "").split(",").filter(Boolean))];
  const page = new ComparePage(root, context, asked.slice(0, MOST));
  if (asked.length > MOST) notify(`The first ${MOST} of ${asked.length} jobs are compared.`);
  await page.live.start();
  return page;
}

class ComparePage {
  constructor(root, { router, query, facts }, ids) {
    Object.assign(this, { ids, router, facts, turn: 0, jobs: new Map(), curves: new Map(), missing: new Set() });
    this.group = groupOf(query, (view) => this.looked(view));
    this.charts = Object.values(CHARTS).map(({ title, axis, lines, raw }) => ({
      lines,
      raw,
      chart: new LineChart(this.group, title, axis),
    }));
    this.chips = h("div", { class: "chips" });
    this.add = menu("Add a job", { title: "add a job ...", act: (id) => this.go([...this.ids, id]) });
    this.gone = h("p", { class: "why tone-warn", role: "status", hidden: true });
    this.same = h("p", { class: "note", role: "status" });
    this.figures = h("div");
    this.different = h("div");
    const figures = panel("Figures", { note: "the best of a row is bold" });
    figures.body.append(this.figures);
    const different = panel("What is different", { note: "fields of the specs that differ" });
    different.body.append(this.different);
    this.none = h("p", { class: "empty-note" }, "Choose jobs above, or tick them in the list of jobs.");
    this.some = h(
      "div",
      {},
      this.same,
      (this.tables = h("div", { class: "columns" }, figures.element, different.element)),
      h("div", { class: "toolbar" }, chartControls(this.group)),
      h(
        "div",
        { class: "chart-grid" },
        this.charts.map(({ chart }) => chart.element),
      ),
    );
    setVisible(this.some, ids.length > 0);
    fill(
      root,
      h("div", { class: "title-row" }, h("h1", {}, "Compare"), this.chips, this.add),
      this.gone,
      this.none,
      this.some,
    );
    this.live = new Live((signal) => this.refresh(signal), SECONDS);
  }

  go(ids) {
    const { axis, smoothing } = this.group;
    const jobs = [...new Set(ids)].filter(Boolean).join(",");
    this.router.go(link("/compare", { jobs, x: axis, smoothing: smoothing || "" }));
  }

  async refresh(signal) {
    await Promise.all(this.ids.map((id) => this.read(id, signal)));
    if (this.turn++ % 10 === 0) await this.offer(signal);
    this.show();
    return this.ids.length > 0 && [...this.jobs.values()].every((job) => this.facts.final_states.includes(job.state));
  }

  async read(id, signal) {
    const job = await optional(get(`/v1/jobs/${id}`, {}, { signal }));
    if (job === null) {
      this.jobs.delete(id);
      this.missing.add(id);
      return;
    }
    this.missing.delete(id);
    const before = this.jobs.get(id);
    this.jobs.set(id, job);
    const metrics = [...this.charts.flatMap(({ lines }) => lines.map(([, metric]) => metric)), ...SHARED];
    if (!this.curves.has(id)) this.curves.set(id, new JobCurves(id, metrics));
    if (before?.step !== job.step || before?.generation !== job.generation) await this.curves.get(id).poll(signal);
    if (!before && this.group.view) await this.looked(this.group.view);
  }

  /** Jobs that can be added. Not while somebody chooses among them: the list would be another one. */
  async offer(signal) {
    if (document.activeElement === this.add) return;
    const { items } = await get("/v1/jobs", { limit: 100, spec: false }, { signal });
    const full = this.ids.length >= MOST;
    const others = items.filter((job) => !full && !this.ids.includes(job.id) && job.step > 0);
    fillMenu(
      this.add,
      full ? `at most ${MOST} jobs` : "add a job ...",
      others.map((job) => [job.id, `${job.name} (${job.id})`]),
    );
  }

  async looked(view) {
    const column = X_AXES[this.group.axis].column;
    const all = [...this.curves.values()];
    const done = await Promise.all(
      all.map((curves) => curves.look(view && view.map((x) => curves.all.stepAt(column, x))).catch(() => false)),
    );
    if (done.some(Boolean)) this.show();
  }

  show() {
    const jobs = this.ids.map((id) => this.jobs.get(id)).filter(Boolean);
    const names = namesOf(jobs);
    const chip = (job, place) => {
      const mark = h("span", { class: "key-mark" });
      mark.style.background = seriesColor(this.ids.indexOf(job.id));
      return h(
        "span",
        { class: "chip" },
        mark,
        h("a", { href: link(`/jobs/${job.id}`) }, names[place]),
        h(
          "button",
          {
            class: "plain",
            "aria-label": `Hide ${names[place]}`,
            onclick: () => this.go(this.ids.filter((id) => id !== job.id)),
          },
          "×",
        ),
      );
    };
    fill(this.chips, jobs.map(chip));
    const missing = this.ids.filter((id) => this.missing.has(id));
    setText(this.gone, `There is no such job: ${missing.join(", ")}.`);
    setVisible(this.gone, missing.length > 0);
    setVisible(this.none, jobs.length === 0);
    setVisible(this.some, jobs.length > 0);
    this.tables.classList.toggle("columns", jobs.length <= MOST_BESIDE);
    this.showCharts(jobs, names);
    this.showFigures(jobs, names);
    this.showDifferences(jobs, names);
  }

  /** Those charts of which some job has values. */
  showCharts(jobs, names) {
    const column = X_AXES[this.group.axis].column;
    for (const { chart, lines, raw } of this.charts) {
      const [, metric] = lines[0];
      const line = (job, place) => {
        const columns = this.curves.get(job.id).shown;
        const color = seriesColor(this.ids.indexOf(job.id));
        return { name: names[place], raw, color, x: columns.x(column), y: columns.columns[metric] };
      };
      const shown = jobs.map(line).filter(({ y }) => y.some(Number.isFinite));
      const says = lostInWords(jobs.map((job, place) => [names[place], this.curves.get(job.id).all.lost[metric]]));
      setVisible(chart.element, shown.length > 0 || says !== "");
      chart.show(shown, [], says);
    }
  }

  showFigures(jobs, names) {
    const { element, body } = table(["Figure", ...names], { label: "Figures" });
    fill(
      body,
      FIGURES.map(([name, text, value, sign]) => {
        const values = jobs.map((job) => (value ? sign * numberOf(value(job)) : NaN));
        const best = bestOf(values);
        return h(
          "tr",
          {},
          h("td", {}, name),
          jobs.map((job, place) => h("td", { class: `number ${values[place] === best ? "strong" : ""}` }, text(job))),
        );
      }),
    );
    fill(this.figures, element);
    const same = identical(jobs.map((job) => this.curves.get(job.id).all));
    setText(
      this.same,
      same
        .map(({ places, steps }) =>
          identicalText(
            places.map((at) => names[at]),
            steps,
          ),
        )
        .join(" "),
    );
    setVisible(this.same, same.length > 0);
  }

  showDifferences(jobs, names) {
    if (jobs.length < 2) {
      fill(this.different, h("p", { class: "empty-note" }, "Choose a second job."));
      return;
    }
    const { element, body } = table(["Field", ...names], { label: "Differences" });
    const rows = differences(jobs.map((job) => ({ ...job.spec, name: undefined, labels: undefined })));
    fill(
      body,
      rows.map(([path, ...values]) =>
        h(
          "tr",
          {},
          h("td", { class: "mono" }, path),
          values.map((value) => h("td", { class: "message" }, value)),
        ),
      ),
    );
    fill(this.different, rows.length ? element : h("p", { class: "empty-note" }, "Nothing: their specs are the same."));
  }

  close() {
    this.live.stop();
    for (const { chart } of this.charts) chart.close();
  }
}

/** Each `[name, text, value, sign]`: `sign` 1 where more is better, -1 where less is. */
const FIGURES = [
  ["State", (job) => job.state],
  ["Step", (job) => `${number(job.step)} of ${number(job.steps)}`],
  ["Train loss", (job) => number(job.metrics.latest.loss, 4), (job) => job.metrics.latest.loss, -1],
  [
    "Validation loss",
    (job) => number(validationLoss(job.metrics.latest), 4),
    (job) => validationLoss(job.metrics.latest),
    -1,
  ],
  ["Tokens/s", (job) => number(job.metrics.mean.tokens_per_second), (job) => job.metrics.mean.tokens_per_second, 1],
  ["Step time", (job) => duration(job.metrics.mean.step_seconds), (job) => job.metrics.mean.step_seconds, -1],
  ["MFU", (job) => percent(job.metrics.mean.mfu_full), (job) => job.metrics.mean.mfu_full, 1],
  ["Goodput", (job) => percent(job.goodput), (job) => job.goodput, 1],
  ["Running time", (job) => duration(job.running_seconds)],
  ["Layout", (job) => layout(job.parallel)],
  ["Restarts", (job) => number(job.restarts)],
];

/** The largest of values that are known and not all alike; NaN where there is none. */
function bestOf(values) {
  const known = values.filter(Number.isFinite);
  return new Set(known).size > 1 ? Math.max(...known) : NaN;
}

function identicalText(names, steps) {
  return `${names.slice(0, -1).join(", ")} and ${names.at(-1)} have identical losses at all ${number(steps)} steps compared.`;
}

/** What jobs are called on the page: with the end of their ids where two have one name. */
export function namesOf(jobs) {
  return jobs.map((job) =>
    jobs.filter((other) => other.name === job.name).length > 1 ? `${job.name} ${job.id.slice(-5)}` : job.name,
  );
}
