/** What a viewer can do with a job, each after a question that says what it costs. */

import { Problem, Unreachable, all, optional, send } from "../core/api.js";
import { h } from "../core/dom.js";
import { counted, number } from "../core/format.js";
import { confirmed, notify } from "../core/notices.js";
import { link } from "../core/router.js";

/** By action: `name` on the button, `scope` that it needs, `offered(job, facts)`, `ask(job)` and `call(job, answer)`. */
export const ACTIONS = {
  pause: {
    name: "Pause",
    scope: "submit",
    offered: changes("pause"),
    ask: askPause,
    call: (job) => post(job, "pause"),
  },
  resume: {
    name: "Resume",
    scope: "submit",
    offered: changes("resume"),
    ask: null,
    call: (job) => post(job, "resume"),
  },
  retry: { name: "Retry", scope: "submit", offered: changes("retry"), ask: null, call: (job) => post(job, "retry") },
  resize: {
    name: "Resize",
    scope: "submit",
    offered: canResize,
    ask: askResize,
    call: (job, data) => post(job, "resize", { data }),
  },
  edit: { name: "Edit", scope: "submit", offered: () => true, ask: askEdit, call: edit },
  cancel: {
    name: "Cancel job",
    scope: "submit",
    danger: true,
    offered: changes("cancel"),
    ask: askCancel,
    call: (job) => post(job, "cancel"),
  },
  delete: { name: "Delete", scope: "submit", danger: true, offered: isFinal, ask: askDelete, call: remove },
};

/** Ask, and do it; whether it was done. What is refused is said in a notice. */
export async function run(action, job, context) {
  const { ask, call, name } = ACTIONS[action];
  try {
    const answer = ask ? await ask(job) : true;
    if (answer === null) return false;
    await call(job, answer, context);
    return true;
  } catch (error) {
    if (!(error instanceof Problem || error instanceof Unreachable)) throw error;
    notify(`${name}: ${error.message}`, "bad");
    return false;
  }
}

function changes(action) {
  return (job, facts) => {
    const target = facts.actions[action][job.state];
    return target !== undefined && target !== job.state;
  };
}

function isFinal(job, facts) {
  return facts.final_states.includes(job.state);
}

function boundsOf(job) {
  const elastic = job.spec.elastic ?? {};
  const data = job.spec.parallel?.data ?? 1;
  return [elastic.min_data ?? data, elastic.max_data ?? data];
}

function canResize(job, facts) {
  const [least, most] = boundsOf(job);
  return most > least && facts.actions.resize[job.state] !== undefined;
}

function post(job, action, body) {
  return send("POST", `/v1/jobs/${job.id}/${action}`, body);
}

/** The complete checkpoint that was made last, from which the job would continue; null if there is none. */
export function newestCheckpoint(checkpoints) {
  const complete = checkpoints.filter((each) => each.state === "complete");
  // Of a job that went back to an earlier state, those of higher steps may be older.
  return complete.sort((one, other) => other.generation - one.generation || other.step - one.step)[0] ?? null;
}

async function lastCheckpoint(job) {
  return newestCheckpoint(await optional(all(`/v1/jobs/${job.id}/checkpoints`), []))?.step ?? 0;
}

function askPause(job) {
  const slots = counted(job.parallel.world_size ?? 0, "slot");
  return confirmed(
    "Pause this job?",
    [
      h(
        "p",
        {},
        job.state === "QUEUED"
          ? "It leaves the queue and loses its position until it is resumed."
          : `It saves its state after the current step and releases its ${slots}. No step is lost; when it is resumed, it waits in the queue for as many slots.`,
      ),
    ],
    { yes: "Pause" },
  );
}

async function askCancel(job) {
  const cost = costOfCancelling(job.step, await lastCheckpoint(job));
  return confirmed(
    "Cancel this job?",
    [h("p", {}, "It is stopped permanently: a cancelled job cannot be resumed."), h("p", {}, cost)],
    { yes: "Cancel the job", no: "Keep running", danger: true },
  );
}

/** What of `step` steps is lost where the newest complete checkpoint is of step `saved`; 0: there is none. */
export function costOfCancelling(step, saved) {
  if (step === 0) return "It has not completed a step yet.";
  const lost = Math.max(0, step - saved);
  const [steps, are] = [counted(lost, "step"), lost === 1 ? "is" : "are"];
  if (saved === 0) return `It has no complete checkpoint: ${steps} ${are} lost.`;
  const since = lost === 0 ? "no step is lost" : `the ${steps} since then ${are} lost`;
  return `Its newest complete checkpoint is of step ${number(saved)} and stays on disk; ${since}.`;
}

function askResize(job) {
  const [least, most] = boundsOf(job);
  const input = h("input", {
    type: "number",
    min: least,
    max: most,
    value: job.parallel.data,
    "aria-label": "Replicas",
    autofocus: true,
  });
  const each = (job.parallel.world_size ?? 0) / (job.parallel.data || 1);
  return confirmed(
    "Resize this job?",
    [
      h(
        "p",
        {},
        `It has ${counted(job.parallel.data, "replica")} of ${counted(each, "rank")} and may have ${least} to ${most}. It changes after the current step, as soon as there is room, and continues with the same batch and the same numbers.`,
      ),
      h("label", { class: "field" }, "Replicas", input),
    ],
    { yes: "Resize", read: () => input.valueAsNumber },
  );
}

function askEdit(job) {
  const name = h("input", { value: job.name, "aria-label": "Name", autofocus: true });
  const priority = h("input", { type: "number", step: 1, value: job.spec.priority ?? 0, "aria-label": "Priority" });
  const labels = h("input", {
    value: Object.entries(job.labels ?? {})
      .map(([key, value]) => `${key}=${value}`)
      .join(" "),
    "aria-label": "Labels",
  });
  return confirmed(
    "Edit this job",
    [
      h("label", { class: "field" }, "Name", name),
      h("label", { class: "field" }, "Priority (higher starts first)", priority),
      job.labels ? h("label", { class: "field" }, "Labels, as key=value", labels) : null,
    ],
    {
      yes: "Save",
      read: () => ({ name: name.value, priority: priority.valueAsNumber, labels: labels.value }),
    },
  );
}

/** What PATCH is told so that a job has the labels in `text`, `key=value` each: null takes one of `before` away. */
export function labelChanges(before, text) {
  const gone = Object.keys(before).map((key) => [key, null]);
  const wanted = text
    .split(/\s+/)
    .filter(Boolean)
    .map((each) => each.split(/=(.*)/s).slice(0, 2))
    .map(([key, value]) => [key, value ?? ""]);
  return Object.fromEntries([...gone, ...wanted]);
}

function edit(job, wanted) {
  const body = { name: wanted.name, priority: wanted.priority };
  if (job.labels) body.labels = labelChanges(job.labels, wanted.labels);
  return send("PATCH", `/v1/jobs/${job.id}`, body);
}

function askDelete(job) {
  return confirmed(
    "Delete this job?",
    [
      h("p", {}, "This permanently deletes its checkpoints, snapshots, logs, metrics and events."),
      h("p", { class: "mono" }, `${job.name} ${job.id}`),
    ],
    { yes: "Delete permanently", danger: true },
  );
}

async function remove(job, _answer, { router }) {
  const gone = await send("DELETE", `/v1/jobs/${job.id}`);
  notify(`${job.name} is deleted: ${counted(gone.checkpoints, "checkpoint")}, ${counted(gone.logs, "log")}.`, "good");
  await router.go(link("/"));
}
