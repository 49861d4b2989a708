/** Who waits, for what, behind whom, and until when; and who has the slots. */

import { all, get, optional } from "../core/api.js";
import { KeyedRows, emptyNote, fill, h, marked, panel, setText, setVisible, table } from "../core/dom.js";
import { ago, counted, layout, number, remaining, startsIn } from "../core/format.js";
import { Live } from "../core/live.js";
import { link } from "../core/router.js";
import { clusterText } from "../parts/cluster_text.js";

const SECONDS = 3;
const LAYOUT = "Layout (t × p × d)";
const HOLDING = ["STARTING", "RUNNING", "RECOVERING", "RESIZING", "PAUSING", "CANCELLING"];

/** Build it. */
export async function open(root, { shell }) {
  shell.title("Queue", "/queue");
  const cluster = h("span", { class: "cluster" });
  const waiting = panel("Queued jobs", { note: "in starting order" });
  const running = panel("Running jobs");
  const queue = jobTable("Queued jobs", "No queued jobs.", [
    ["Position", "number c-seldom", (job) => number(job.queue.position)],
    ["Job", "", null],
    [LAYOUT, "number c-seldom", (job) => layout(job.parallel)],
    ["Priority", "number c-seldom", (job) => number(job.spec.priority)],
    ["Why it waits", "message", (job) => job.message ?? "waits for the jobs ahead of it"],
    ["Expected start", "number", (job) => startsIn(job.queue.expected_start_seconds) || "unknown"],
    ["Submitted", "number c-seldom", (job) => ago(job.created_at)],
  ]);
  const holders = jobTable("Running jobs", "No running jobs.", [
    ["Job", "", null],
    ["State", "c-seldom", (job) => job.state],
    [LAYOUT, "number c-seldom", (job) => layout(job.parallel)],
    ["Slots or GPUs", "number", (job) => number(job.parallel.world_size)],
    ["Remaining", "number", (job) => remaining(job.eta_seconds)],
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
    setText(running.note, firstToEnd(holding));
    holders.show(holding);
    return false;
  }

  const live = new Live(refresh, SECONDS);
  await live.start();
  return { close: () => live.stop() };
}

/** Which of these jobs ends first, as a sentence; empty where nobody knows. */
export function firstToEnd(running) {
  const known = running.filter((job) => job.eta_seconds !== null);
  if (known.length === 0) return "";
  const first = known.reduce((one, other) => (other.eta_seconds < one.eta_seconds ? other : one));
  const ranks = counted(first.parallel.world_size, "slot");
  return `First to end: ${first.name}, ${startsIn(first.eta_seconds)}; it releases ${ranks}.`;
}

/** Jobs in starting order; those whose position is not known yet come last. */
export function inTurn(queued) {
  const position = (job) => job.queue.position ?? Number.MAX_SAFE_INTEGER;
  return [...queued].sort((one, other) => position(one) - position(other));
}

/**
 * A table of jobs; `columns` are `[heading, class, text(job)]`, and null for the job's name; those of class `c-seldom`
 * are left out on a phone. `{element, show(jobs)}`.
 */
function jobTable(label, nobody, columns) {
  const { element, body } = table(
    columns.map(([heading]) => heading),
    { label, columns: columns.map(([, classes]) => (classes.includes("c-seldom") ? "seldom" : null)) },
  );
  const none = emptyNote(nobody);
  const row = (first) => {
    const cells = columns.map(([, classes, text]) => (text ? h("td", { class: classes }) : nameOf(first)));
    return {
      element: h("tr", {}, cells),
      show: (job) =>
        columns.forEach(([, , text], at) => {
          const now = text?.(job);
          if (text && now.replaceAll("`", "") !== cells[at].textContent) fill(cells[at], marked(now));
        }),
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
