/** The page of one job: what it is and does at the top, one subject a tab below. */

import { get, Problem } from "../core/api.js";
import { fill, h, setAttribute } from "../core/dom.js";
import { Live } from "../core/live.js";
import { link } from "../core/router.js";
import { JobHeader } from "../parts/job_header.js";
import { nothingHere } from "./nothing.js";

const TABS = [
  ["", "Overview", () => import("./job/overview.js")],
  ["charts", "Charts", () => import("./job/charts.js")],
  ["ranks", "Ranks", () => import("./job/ranks.js")],
  ["step", "Step", () => import("./job/step.js")],
  ["memory", "Memory", () => import("./job/memory.js")],
  ["history", "History", () => import("./job/history.js")],
  ["data", "Data", () => import("./job/data.js")],
  ["checkpoints", "Checkpoints", () => import("./job/checkpoints.js")],
  ["logs", "Logs", () => import("./job/logs.js")],
  ["spec", "Spec", () => import("./job/spec.js")],
];
const SLOW_TURN = 3;
const SECONDS_WHEN_OVER = 5;

/** Build it. A tab is `{element, refresh(signal, job, moved), close()}`; `moved` says that more than the step is new. */
export async function open(root, context) {
  const { id, tab: name = "" } = context.parameters;
  const entry = TABS.find(([path]) => path === name);
  context.shell.title("Job", "/");
  if (!entry) return nothingHere(root, "There is no such page.");
  const page = new JobPage(root, context, id, entry);
  await page.live.start();
  return { close: () => page.close() };
}

class JobPage {
  constructor(root, context, id, [path, , load]) {
    this.root = root;
    this.context = context;
    this.id = id;
    this.load = load;
    this.turn = 0;
    this.tab = null;
    this.header = new JobHeader(context, id, () => this.live.now());
    const tabs = TABS.map(([each, name]) =>
      h(
        "a",
        {
          href: link(`/jobs/${id}${each ? `/${each}` : ""}`),
          class: "tab",
          "aria-current": each === path ? "page" : null,
        },
        name,
      ),
    );
    this.place = h("div", { class: "tab-place" });
    fill(root, this.header.element, h("nav", { class: "tabs", "aria-label": "Job" }, tabs), this.place);
    tabs[TABS.findIndex(([each]) => each === path)].scrollIntoView({ block: "nearest", inline: "center" });
    this.live = new Live((signal) => this.refresh(signal));
  }

  async refresh(signal) {
    const [job, module] = await Promise.all([this.readJob(signal), this.load().catch(() => null)]);
    if (job === null) return true;
    if (module === null) {
      this.context.router.loadAnew();
      return true;
    }
    const moved =
      this.known?.state !== job.state || this.known?.generation !== job.generation || this.turn % SLOW_TURN === 0;
    this.known = job;
    this.turn += 1;
    this.context.shell.title(job.name, "/");
    this.header.show(job, await this.context.viewer);
    if (this.tab === null) {
      this.tab = module.create({ ...this.context, id: this.id, job, refreshNow: () => this.live.now() });
      setAttribute(this.tab.element, "class", `tab-body ${this.tab.element.className}`);
      fill(this.place, this.tab.element);
    }
    await this.tab.refresh(signal, job, moved);
    const over = this.context.facts.final_states.includes(job.state);
    const again = this.context.facts.actions.retry[job.state] !== undefined; // somebody may have it go on
    this.live.seconds = over && again ? SECONDS_WHEN_OVER : 1;
    return over && !again && this.tab.settled !== false;
  }

  async readJob(signal) {
    try {
      return await get(`/v1/jobs/${this.id}`, {}, { signal });
    } catch (error) {
      if (!(error instanceof Problem) || error.status !== 404) throw error;
      this.context.shell.title("No such job", "/");
      nothingHere(this.root, "There is no such job.", this.id);
      return null;
    }
  }

  close() {
    this.live.stop();
    this.tab?.close?.();
  }
}
