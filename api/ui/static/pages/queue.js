/** Who waits, for what, behind whom; and who has the places. */

import { all, get, optional } from "../core/api.js";
import { KeyedRows, emptyNote, fill, h, panel, setText, setVisible, table } from "../core/dom.js";
import { age, counted, duration, layout, number } from "../core/format.js";
import { Live } from "../core/live.js";
import { link } from "../core/router.js";
import { clusterText } from "../parts/cluster_text.js";

const SECONDS = 3;
const HOLDING = ["STARTING", "RUNNING", "RECOVERING", "RESIZING", "PAUSING", "CANCELLING"];

/** Build it. */
export async function open(root, { shell }) {
  shell.title("Queue", "/queue");
  const cluster = h("span", { class: "cluster" });
  const waiting = panel("Waiting", { note: "in starting order" });
  const running = panel("Holding places");
  const queue = jobTable("Waiting", "The queue is empty.", [
    ["Place", "number", (job) => number(job.queue.position)],
    ["Job", "", null],
    ["Ranks", "number", (job) => layout(job.parallel)],
    ["Priority", "number", (job) => number(job.spec.priority)],
    ["Why it waits", "message", (job) => job.message ?? "its turn has not come"],
    ["Age", "number", (job) => age(job.created_at)],
  ]);
  const holders = jobTable("Holding places", "No jobs are running.", [
    ["Job", "", null],
    ["State", "", (job) => job.state],
    ["Ranks", "number", (job) => layout(job.parallel)],
    ["Places", "number", (job) => number(job.parallel.world_size)],
    ["Remaining", "number", (job) => duration(job.eta_seconds)],
  ]);
  waiting.body.append(queue.element);
  running.body.append(holders.element);
  fill(root, h("div", { class: "title-row" }, h("h1", {}, "Queue"), cluster), waiting.element, running.element);

  async function refresh(signal) {
    const [queued, nodes, holding] = await Promise.all([
      all("/v1/jobs", { state: "QUEUED" }, 2000, { signal }),
      optional(get("/v1/cluster", {}, { signal })),
      all("/v1/jobs", { state: HOLDING, spec: false }, 2000, { signal }),
    ]);
    if (nodes) setText(cluster, clusterText(nodes));
    queue.show(inTurn(queued));
    setText(
      running.note,
      counted(
        holding.reduce((sum, job) => sum + (job.parallel.world_size ?? 0), 0),
        "place",
      ),
    );
    holders.show(holding);
    return false;
  }

  const live = new Live(refresh, SECONDS);
  await live.start();
  return { close: () => live.stop() };
}

/** Jobs in starting order; those whose place is not known yet come last. */
export function inTurn(queued) {
  const place = (job) => job.queue.position ?? Number.MAX_SAFE_INTEGER;
  return [...queued].sort((one, other) => place(one) - place(other));
}

/** A table of jobs; `columns` are `[heading, class, text(job)]`, and null for the job's name. `{element, show(jobs)}`. */
function jobTable(label, nobody, columns) {
  const { element, body } = table(
    columns.map(([heading]) => heading),
    { label },
  );
  const none = emptyNote(nobody);
  const row = (first) => {
    const cells = columns.map(([, classes, text]) => (text ? h("td", { class: classes }) : nameOf(first)));
    return {
      element: h("tr", {}, cells),
      show: (job) => columns.forEach(([, , text], place) => text && setText(cells[place], text(job))),
    };
  };
  const rows = new KeyedRows(body, (job) => job.id, row);
  return {
    element: h("div", {}, none, element),
    show(jobs) {
      setVisible(none, jobs.length === 0);
      setVisible(element, jobs.length > 0);
      rows.show(jobs);
    },
  };
}

function nameOf(job) {
  return h(
    "td",
    {},
    h("a", { class: "job-link", href: link(`/jobs/${job.id}`) }, job.name),
    h("div", { class: "job-id" }, job.id),
  );
}
