/** The durable checkpoints of a job: those that exist, and folded away those that are gone. */

import { Problem, Unreachable, all, get, optional, send } from "../../core/api.js";
import { KeyedRows, badge, emptyNote, h, panel, setText, setVisible, table } from "../../core/dom.js";
import { UNKNOWN, age, bytes, clock, counted, number, numberOf, utc } from "../../core/format.js";
import { confirmed, notify } from "../../core/notices.js";
import { may } from "../../core/shell.js";
import { newestCheckpoint } from "../../parts/actions.js";

const TONES = { complete: "good", saving: "busy", failed: "bad", deleted: "idle" };

/** The tab. */
export function create({ id, viewer, refreshNow }) {
  const there = panel("Checkpoints");
  const none = emptyNote("No checkpoint yet.");
  const headings = ["Step", "State", "Loss", "Validation", "Size", "Started", "Where"];
  const actions = h("span", { class: "unseen" }, "Actions");
  const columns = [...headings, "actions"].map((name) => name.toLowerCase());
  const main = table([...headings, actions], { classes: "checkpoints", label: "Checkpoints", columns });
  const exporting = h("p", { class: "note", role: "status" });
  there.body.append(none, exporting, main.element);
  const gone = table([...headings, actions.cloneNode(true)], {
    classes: "checkpoints",
    label: "Deleted checkpoints",
    columns,
  });
  const summary = h("summary", {});
  const folded = h("details", { class: "panel" }, summary, h("div", { class: "tall" }, gone.element));
  const rows = [
    new KeyedRows(
      main.body,
      (each) => each.id,
      (each) => row(each),
    ),
    new KeyedRows(
      gone.body,
      (each) => each.id,
      (each) => row(each),
    ),
  ];
  let [me, job, last, best, closed] = [null, null, null, null, false];
  viewer.then((known) => (me = known));

  function row(first) {
    let checkpoint = first;
    const state = badge();
    const cells = headings.map((_, place) => h("td", { class: `number c-${columns[place]}` }));
    const [path, reason] = [h("div", { class: "mono message" }), h("div", { class: "note" })];
    cells[1].append(state.element, reason);
    cells[6].append(path);
    cells[6].className = "c-where";
    const buttons = h(
      "div",
      { class: "actions" },
      h("button", { class: "plain", onclick: () => copy(checkpoint) }, "Copy path"),
      h("button", { class: "plain", hidden: true, onclick: () => exportOf(checkpoint) }, "Export"),
      h("button", { class: "plain", hidden: true, onclick: () => remove(checkpoint) }, "Delete"),
    );
    return {
      element: h("tr", {}, cells, h("td", { class: "c-actions" }, buttons)),
      show(now) {
        checkpoint = now;
        setText(cells[0], number(now.step));
        state.show(now.state, TONES[now.state] ?? "idle");
        setText(cells[2], number(now.loss, 4));
        setText(cells[3], number(now.validation_loss, 4));
        setText(cells[4], bytes(now.bytes));
        setText(
          cells[5],
          `${clock(now.created_at)}, ${age(now.created_at)}${/\d/.test(age(now.created_at)) ? " ago" : ""}`,
        );
        cells[5].title = utc(now.created_at);
        setText(path, now.path || UNKNOWN);
        const isGone = now.exists === false && now.state === "complete";
        const why = isGone ? "its files are gone" : now.kept_because;
        setText(reason, [now.id === best?.id ? `best: lowest ${best.measure}` : "", why].filter(Boolean).join(" / "));
        for (const button of [...buttons.children].slice(1))
          setVisible(button, now.state === "complete" && may(me, "submit"));
      },
    };
  }

  async function copy(checkpoint) {
    try {
      await navigator.clipboard.writeText(checkpoint.path); // which browsers have over TLS and on loopback alone
      notify("Path copied. manta export PATH --to FOLDER --format hf exports its weights.", "good");
    } catch {
      notify("This browser does not allow pages to copy: select the path and copy it yourself.");
    }
  }

  async function exportOf(checkpoint) {
    const name = `${job.name.replaceAll(" ", "-")}-step-${checkpoint.step}`;
    const to = h("input", { value: name, "aria-label": "Folder", autofocus: true });
    const format = h(
      "select",
      { "aria-label": "Format" },
      [
        ["hf", "Hugging Face"],
        ["safetensors", "safetensors only"],
        ...(job.spec.train?.lora ? [["adapter", "adapter only (PEFT)"]] : []),
      ].map(([value, text]) => h("option", { value }, text)),
    );
    const wanted = await confirmed(
      `Export the weights of step ${number(checkpoint.step)}`,
      [
        h(
          "p",
          {},
          "The service writes the weights to a new folder on its machine. The folder appears only when the export is complete. A plain name is created in the service's export folder.",
        ),
        h("label", { class: "field" }, "Folder", to),
        h("label", { class: "field" }, "Format", format),
      ],
      { yes: "Export", no: "Cancel", read: () => ({ to: to.value, format: format.value }) },
    );
    if (!wanted) return;
    try {
      const begun = await send("POST", `/v1/jobs/${id}/checkpoints/${checkpoint.id}/export`, wanted);
      await followExport(begun);
    } catch (error) {
      if (!(error instanceof Problem || error instanceof Unreachable)) throw error;
      notify(error.message, "bad");
    }
  }

  async function followExport(begun) {
    let now = begun;
    while (now.state === "running" && !closed) {
      setText(
        exporting,
        `Exporting to ${now.to}: ${bytes(now.done_bytes)}${now.total_bytes ? ` of ${bytes(now.total_bytes)}` : ""}`,
      );
      await new Promise((done) => setTimeout(done, 1000));
      now = await get(`/v1/jobs/${id}/exports/${begun.id}`);
    }
    setText(exporting, "");
    if (now.state === "done") notify(`The weights are in ${now.to}.`, "good");
    if (now.state === "failed") notify(`The export failed: ${now.message}`, "bad");
  }

  async function remove(checkpoint) {
    const newest = checkpoint.id === last?.id;
    const yes = await confirmed(
      "Delete this checkpoint?",
      [
        newest
          ? h("p", { class: "kind tone-bad" }, "It is the newest: without a snapshot, the job's later work is lost.")
          : null,
        h(
          "p",
          {},
          `Step ${number(checkpoint.step)}, ${bytes(checkpoint.bytes)}. It can no longer be resumed from or exported.`,
        ),
        h("p", { class: "mono" }, checkpoint.path),
      ],
      { yes: "Delete checkpoint", danger: true },
    );
    if (!yes) return;
    try {
      await send("DELETE", `/v1/jobs/${id}/checkpoints/${checkpoint.id}`, undefined, newest ? { force: true } : {});
    } catch (error) {
      if (!(error instanceof Problem || error instanceof Unreachable)) throw error;
      notify(error.message, "bad");
    }
    await refreshNow();
  }

  return {
    element: h("div", {}, there.element, folded),
    close: () => (closed = true),
    async refresh(signal, now, moved) {
      job = now;
      if (!moved) return;
      const items = (await optional(all(`/v1/jobs/${id}/checkpoints`, {}, 10_000, { signal }), [])).sort(
        (one, other) => other.step - one.step,
      );
      const kept = items.filter((each) => each.state !== "deleted");
      last = newestCheckpoint(kept);
      best = bestOf(kept);
      const deleted = items.filter((each) => each.state === "deleted");
      const total = kept.reduce((sum, each) => sum + (each.bytes ?? 0), 0);
      setText(
        there.note,
        kept.length
          ? `${counted(kept.length, "checkpoint")}, ${bytes(total)}; every ${number(job.spec.checkpoint?.every_steps)} steps, ${number(job.spec.checkpoint?.keep)} are kept`
          : "",
      );
      setVisible(none, kept.length === 0);
      setVisible(main.element, kept.length > 0);
      setVisible(folded, deleted.length > 0);
      setText(summary, `${counted(deleted.length, "deleted checkpoint")}`);
      rows[0].show(kept);
      rows[1].show(deleted);
    },
  };
}

/** The complete checkpoint with the lowest loss, and the `measure` of it: of validation where all have one. Null: none. */
export function bestOf(checkpoints) {
  const complete = checkpoints.filter((each) => each.state === "complete");
  for (const [measure, value] of [
    ["validation loss", (each) => numberOf(each.validation_loss)],
    ["training loss", (each) => numberOf(each.loss)],
  ]) {
    if (complete.length > 1 && complete.every((each) => Number.isFinite(value(each))))
      return { ...complete.reduce((best, each) => (value(each) < value(best) ? each : best)), measure };
  }
  return null;
}
