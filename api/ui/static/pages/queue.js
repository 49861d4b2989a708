/** Who waits, for what, behind whom; and who has the places. */

import { all } from "../core/api.js";
import { fill, h, panel, setText, table } from "../core/dom.js";
import { UNKNOWN, age, counted, duration, layout, number } from "../core/format.js";
import { Live } from "../core/live.js";
import { link } from "../core/router.js";
import { get, optional } from "../core/api.js";
import { clusterText } from "../parts/cluster_text.js";

const SECONDS = 3;
const HOLDING = ["STARTING", "RUNNING", "RECOVERING", "RESIZING", "PAUSING", "CANCELLING"];

/** Build it. */
export async function open(root, { shell }) {
  shell.title("Queue", "/queue");
  const cluster = h("span", { class: "cluster" });
  const waiting = panel("Waiting", { note: "in the order in which they start" });
  const running = panel("Holding places");
  fill(root, h("div", { class: "title-row" }, h("h1", {}, "Queue"), cluster), waiting.element, running.element);

  async function refresh(signal) {
    const [queued, nodes, ...held] = await Promise.all([
      all("/v1/jobs", { state: "QUEUED" }, 2000, { signal }),
      optional(get("/v1/cluster", {}, { signal })),
      ...HOLDING.map((state) => all("/v1/jobs", { state, spec: false }, 1000, { signal })),
    ]);
    if (nodes) setText(cluster, clusterText(nodes));
    queued.sort((one, other) => (one.queue.position ?? Infinity) - (other.queue.position ?? Infinity));
    fill(
      waiting.body,
      queued.length
        ? tableOf(
            ["Place", "Job", "Ranks", "Priority", "Why it waits", "Waiting for"],
            queued.map(waitingRow),
            "Waiting",
          )
        : h("p", { class: "empty-note" }, "Nobody waits."),
    );
    const holding = held.flat();
    setText(
      running.note,
      counted(
        holding.reduce((sum, job) => sum + (job.parallel.world_size ?? 0), 0),
        "place",
      ),
    );
    fill(
      running.body,
      holding.length
        ? tableOf(["Job", "State", "Ranks", "Places", "To go"], holding.map(runningRow), "Holding places")
        : h("p", { class: "empty-note" }, "Nobody holds a place."),
    );
    return false;
  }

  const live = new Live(refresh, SECONDS);
  await live.start();
  return { close: () => live.stop() };
}

function tableOf(headings, rows, label) {
  const { element, body } = table(headings, { label });
  fill(body, rows);
  return element;
}

function nameOf(job) {
  return h(
    "td",
    {},
    h("a", { class: "job-link", href: link(`/jobs/${job.id}`) }, job.name),
    h("div", { class: "job-id" }, job.id),
  );
}

function waitingRow(job) {
  const lacks = job.queue.waiting_for;
  const text = lacks
    ? `needs ${number(lacks.needed)} ${lacks.unit === "GPU" ? "GPUs" : "places"}, ${number(lacks.available)} free`
    : UNKNOWN;
  return h(
    "tr",
    {},
    h("td", { class: "number" }, number(job.queue.position)),
    nameOf(job),
    h("td", { class: "number" }, layout(job.parallel)),
    h("td", { class: "number" }, number(job.spec.priority)),
    h("td", { class: "message" }, job.message ?? "its turn has not come"),
    h("td", {}, text, h("div", { class: "note" }, `for ${age(job.created_at)}`)),
  );
}

function runningRow(job) {
  return h(
    "tr",
    {},
    nameOf(job),
    h("td", {}, job.state),
    h("td", { class: "number" }, layout(job.parallel)),
    h("td", { class: "number" }, number(job.parallel.world_size)),
    h("td", { class: "number" }, duration(job.eta_seconds)),
  );
}
