/** The list of jobs: filtered, sorted, live; the ones that are ticked can be compared. */

import { get, optional } from "../core/api.js";
import { KeyedRows, badge, bar, fill, h, setAttribute, setText, setVisible, table } from "../core/dom.js";
import {
  UNKNOWN,
  age,
  clock,
  counted,
  duration,
  layout,
  number,
  numberOf,
  percent,
  remaining,
  stateTone,
  utc,
  validationLoss,
  why,
} from "../core/format.js";
import { Live } from "../core/live.js";
import { Router, link } from "../core/router.js";
import { remember, remembered } from "../core/preferences.js";
import { sparkline } from "../charts/sparkline.js";
import { bulkActions } from "../parts/bulk_actions.js";
import { clusterText } from "../parts/cluster_text.js";

const PAGE = 100;
const SECONDS = 2;
const SPARKLINES_EVERY = 5; // refreshes
const TYPED_MILLISECONDS = 250;
/** Each `[class, heading, sort, text(job)]`; those with a text can be left out. */
const COLUMNS = [
  ["tick", h("span", { class: "unseen" }, "Choose"), null],
  ["name", "Name", "name"],
  ["state", "State", "state"],
  ["progress", "Progress", "step"],
  ["loss", "Loss", "loss"],
  ["validation", "Validation", null, (job) => number(validationLoss(job.metrics.latest), 4)],
  ["tokens-s", "Tokens/s", null, (job) => number(job.metrics.mean.tokens_per_second)],
  ["mfu", "MFU", null, (job) => percent(job.metrics.mean.mfu_full)],
  ["goodput", "Goodput", null, (job) => percent(job.goodput)],
  ["layout", "Layout", null, (job) => layout(job.parallel)],
  ["duration", "Duration", null, (job) => duration(job.running_seconds)],
  ["owner", "Owner, labels", null, ownerText],
  ["age", "Age", "created", (job) => age(job.created_at)],
];
const CHOSEN = COLUMNS.filter(([, , , text]) => text);
const LEFT_OUT = ["mfu", "goodput"];
const FILTERS = ["state", "search", "label", "sort", "order"];

/** Build it. */
export async function open(root, context) {
  const page = new JobsPage(root, context);
  await page.live.start();
  return page;
}

class JobsPage {
  constructor(root, context) {
    const { facts, shell, query, router, viewer } = context;
    shell.title("Jobs", "/");
    Object.assign(this, { context, router, jobs: new Map(), me: null });
    viewer.then((me) => (this.me = me));
    this.filters = Object.fromEntries(FILTERS.map((name) => [name, query.get(name) ?? ""]));
    this.pages = 1;
    this.turn = 0;
    this.lines = new Map();
    this.ticked = new Set();
    this.build(root, facts);
    this.live = new Live((signal) => this.refresh(signal), SECONDS);
  }

  build(root, facts) {
    this.cluster = h("span", { class: "cluster" });
    const search = h("input", {
      type: "search",
      placeholder: "name or id",
      value: this.filters.search,
      "aria-label": "Search by name or id",
      oninput: (event) => this.typed("search", event.target.value),
    });
    const label = h("input", {
      type: "search",
      placeholder: "label, as key=value",
      value: this.filters.label,
      "aria-label": "Filter by label",
      oninput: (event) => this.typed("label", event.target.value),
    });
    const option = (name) => h("option", { value: name, selected: name === this.filters.state }, name || "All states");
    this.states = h(
      "select",
      { "aria-label": "Filter by state", onchange: (event) => this.filter("state", event.target.value) },
      ["", ...facts.states].map(option),
    );
    this.compare = h(
      "button",
      {
        class: "button",
        disabled: true,
        onclick: () => this.router.go(link("/compare", { jobs: [...this.ticked].join(",") })),
      },
      "Compare",
    );
    this.bulk = bulkActions(this.context, () => this.live.now());
    this.counts = h("span", { class: "note counts" });
    const headings = COLUMNS.map(([, name, sort]) => (sort ? this.sorter(name, sort) : name));
    const columns = COLUMNS.map(([name]) => name);
    const { element, body } = table(headings, { classes: "jobs", label: "Jobs", columns });
    const chooser = columnChooser(element.querySelector("table"));
    this.table = h("section", { class: "panel flush" }, element);
    this.rows = new KeyedRows(
      body,
      (job) => job.id,
      (job) => new JobLine(job, this.lines, this.ticked.has(job.id), (id, on) => this.tick(id, on)),
    );
    this.more = h("button", { class: "button", hidden: true, onclick: () => this.showMore() }, "Show more");
    this.none = h(
      "p",
      { class: "empty-note", hidden: true },
      "No job matches. ",
      h("button", { class: "button", onclick: () => this.clear() }, "Clear filters"),
    );
    this.skeleton = h("div", { class: "skeleton" });
    this.welcome = welcome();
    fill(
      root,
      h("div", { class: "title-row" }, h("h1", {}, "Jobs"), this.cluster, h("span", { class: "gap" }), this.counts),
      h(
        "div",
        { class: "toolbar" },
        (this.inputs = [search, this.states, label]),
        h("span", { class: "gap" }),
        this.bulk.elements,
        this.compare,
        chooser,
      ),
      this.skeleton,
      this.table,
      this.more,
      this.none,
      this.welcome,
    );
    setVisible(this.table, false);
    setVisible(this.welcome, false);
  }

  sorter(name, sort) {
    return h("button", { class: "plain sort", "data-sort": sort, onclick: () => this.sortBy(sort) }, name);
  }

  sortBy(sort) {
    this.filters.order = orderAfter(this.filters, sort);
    this.filter("sort", sort);
  }

  typed(name, value) {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.filter(name, value.trim()), TYPED_MILLISECONDS);
  }

  filter(name, value) {
    this.filters[name] = value;
    this.pages = 1;
    Router.query(this.filters);
    this.live.now();
  }

  clear() {
    for (const input of this.inputs) input.value = "";
    Object.assign(this.filters, { state: "", search: "", label: "" });
    this.filter("state", "");
  }

  showMore() {
    this.pages += 1;
    this.live.now();
  }

  tick(id, on) {
    if (on) this.ticked.add(id);
    else this.ticked.delete(id);
    setAttribute(this.compare, "disabled", this.ticked.size < 2);
    setText(this.compare, this.ticked.size ? `Compare ${this.ticked.size}` : "Compare");
    this.showBulk();
  }

  /** What can be done with the ticked jobs that are listed. */
  showBulk() {
    this.bulk.show([...this.ticked].map((id) => this.jobs.get(id)).filter(Boolean), this.me);
  }

  async refresh(signal) {
    const query = { ...this.filters, limit: PAGE, spec: false };
    const jobs = [];
    let cursor = null;
    for (let page = 0; page < this.pages; page += 1) {
      const answer = await get("/v1/jobs", { ...query, cursor }, { signal });
      jobs.push(...answer.items);
      cursor = answer.next_cursor;
      if (cursor === null) break;
    }
    this.show(jobs, cursor !== null);
    if (this.turn++ % SPARKLINES_EVERY === 0) await this.refreshSlowly(jobs, signal);
    return false;
  }

  async refreshSlowly(jobs, signal) {
    const { sort: _sort, order: _order, ...filters } = this.filters;
    const ids = jobs
      .filter((job) => job.step > 0)
      .slice(0, 200)
      .map((job) => job.id);
    const [cluster, counts, lines] = await Promise.all([
      optional(get("/v1/cluster", {}, { signal })),
      optional(get("/v1/jobs/counts", filters, { signal })),
      ids.length ? optional(get("/v1/jobs/sparklines", { jobs: ids.join(",") }, { signal })) : null,
    ]);
    if (cluster) setText(this.cluster, clusterText(cluster));
    if (counts) this.showCounts(counts);
    for (const { job, loss } of lines?.items ?? []) {
      this.lines.set(job, loss.map(numberOf));
      this.rows.rows.get(job)?.showLine();
    }
  }

  showCounts({ total, by_state: byState }) {
    const choose = (state) => {
      this.states.value = state;
      this.filter("state", state);
    };
    const chip = ([state, count]) =>
      h(
        "button",
        { class: `plain kind tone-${stateTone(state)}`, onclick: () => choose(state) },
        `${number(count)} ${state}`,
      );
    fill(
      this.counts,
      counted(total, "job"),
      Object.entries(byState)
        .filter(([, count]) => count > 0)
        .map(chip),
    );
  }

  show(jobs, more) {
    this.rows.show(jobs);
    this.jobs = new Map(jobs.map((job) => [job.id, job]));
    this.showBulk();
    setVisible(this.skeleton, false);
    const filtered = this.filters.state || this.filters.search || this.filters.label;
    setVisible(this.table, jobs.length > 0);
    setVisible(this.more, more);
    setVisible(this.none, jobs.length === 0 && Boolean(filtered));
    setVisible(this.welcome, jobs.length === 0 && !filtered);
    for (const button of this.table.querySelectorAll("[data-sort]")) {
      const isOn = button.dataset.sort === (this.filters.sort || "created");
      setAttribute(
        button.closest("th"),
        "aria-sort",
        isOn ? (this.filters.order === "asc" ? "ascending" : "descending") : null,
      );
    }
  }

  close() {
    clearTimeout(this.typing);
    this.live.stop();
  }
}

/** The order of a list that is sorted by `sort` from now on: another one with each click, largest first at the first. */
export function orderAfter(filters, sort) {
  const isOn = (filters.sort || "created") === sort;
  return isOn && (filters.order || "desc") === "desc" ? "asc" : "desc";
}

class JobLine {
  constructor(job, lines, ticked, tick) {
    this.id = job.id;
    this.lines = lines;
    this.box = h("input", {
      type: "checkbox",
      checked: ticked,
      "aria-label": `Compare ${job.name}`,
      onchange: (event) => tick(job.id, event.target.checked),
    });
    this.name = h("a", { class: "job-link", href: link(`/jobs/${job.id}`) });
    this.badge = badge();
    this.restarts = h("span", { class: "restarts kind tone-warn" });
    this.why = h("div", { class: "why-short" });
    this.step = h("span", { class: "step" });
    this.left = h("span", { class: "note" });
    this.bar = bar(`Progress of ${job.name}`);
    this.line = sparkline(`Loss of ${job.name}`);
    this.loss = h("span", { class: "number" });
    this.cells = CHOSEN.map(([name]) => h("td", { class: `number c-${name}` }));
    this.element = h(
      "tr",
      {},
      h("td", { class: "c-tick" }, this.box),
      h("td", { class: "c-name" }, this.name, h("div", { class: "job-id" }, job.id)),
      h("td", { class: "c-state" }, this.badge.element, this.restarts, this.why),
      h("td", { class: "c-progress" }, h("div", { class: "steps" }, this.step, this.left), this.bar.element),
      h("td", { class: "c-loss" }, this.line.element, this.loss),
      this.cells,
    );
    this.showLine();
  }

  show(job) {
    const latest = job.metrics.latest;
    setText(this.name, job.name);
    setAttribute(this.name, "title", job.name);
    this.badge.show(job.state, stateTone(job.state));
    setText(this.restarts, job.restarts ? counted(job.restarts, "restart") : "");
    const reason = why(job);
    setText(this.why, shortReason(reason));
    setAttribute(this.why, "title", reason || null);
    setText(this.step, `${number(job.step)} / ${number(job.steps)}`);
    setText(this.left, job.eta_seconds === null ? "" : `${remaining(job.eta_seconds)} left`);
    this.bar.show(job.steps > 0 ? Math.min(1, job.step / job.steps) : 0, stateTone(job.state));
    setText(this.loss, number(latest.loss, 4));
    CHOSEN.forEach(([name, , , text], place) => {
      const cell = this.cells[place];
      setText(cell, text(job));
      if (name === "owner") setAttribute(cell, "title", text(job));
      if (name === "age") setAttribute(cell, "title", `${clock(job.created_at)} (${utc(job.created_at)})`);
    });
  }

  showLine() {
    this.line.show(this.lines.get(this.id) ?? []);
  }
}

function ownerText(job) {
  const labels = Object.entries(job.labels ?? {}).map(([key, value]) => `${key}=${value}`);
  return [job.owner, ...labels].filter(Boolean).join(" ") || UNKNOWN;
}

/** A reason that fits on a few lines: of paths, their last part. */
export function shortReason(text) {
  return text.split("\n")[0].replace(/(^|[\s(])\/[^\s,:]*\/([^\s\/,:]+)/g, "$1$2");
}

/** A menu of the columns that can be left out of a table; this browser remembers them. */
function columnChooser(grid) {
  const left = new Set((remembered("columns-left-out") ?? LEFT_OUT.join(",")).split(",").filter(Boolean));
  const box = ([name, heading]) => {
    const choose = (isOn) => {
      if (isOn) left.delete(name);
      else left.add(name);
      grid.classList.toggle(`without-${name}`, !isOn);
      remember("columns-left-out", [...left].join(","));
    };
    grid.classList.toggle(`without-${name}`, left.has(name));
    const checkbox = h("input", {
      type: "checkbox",
      checked: !left.has(name),
      onchange: (event) => choose(event.target.checked),
    });
    return h("label", { class: "inline" }, checkbox, heading);
  };
  return h(
    "details",
    { class: "chooser" },
    h("summary", { class: "button" }, "Columns"),
    h("div", { class: "panel" }, CHOSEN.map(box)),
  );
}

function welcome() {
  return h(
    "section",
    { class: "panel welcome" },
    h("h2", {}, "No jobs yet"),
    h(
      "p",
      {},
      "Submit one from a terminal, or ",
      h("a", { href: link("/submit") }, "here"),
      "; it will show up at once.",
    ),
    h("pre", {}, "manta submit examples/quickstart.yaml"),
    h("p", { class: "note" }, `On another machine, set MANTA_URL=${location.origin} and MANTA_API_KEY first.`),
  );
}
