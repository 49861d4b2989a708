/** What a job is fed with: how far it is in its data, how long it waits for it, what it is blended of. */

import { get } from "../../core/api.js";
import { fill, h, panel, setText, setVisible, table } from "../../core/dom.js";
import { UNKNOWN, compact, duration, number, numberOf, percent } from "../../core/format.js";
import { JobEvents, eventTable } from "../../parts/events.js";

const TYPES = ["corpus", "data", "sample", "token", "rolled_back", "step_skipped", "spike"];

/** The tab. */
export function create({ id, job }) {
  const [progress, sources, happened] = [panel("Progress"), panel("Sources"), panel("What happened to the data")];
  const preview = panel("What the model reads");
  const text = h("pre", { class: "document preview", tabindex: "0" });
  preview.body.append(text);
  const figures = h("dl", { class: "figures" });
  progress.body.append(figures);
  const { element, body } = table(["Source", "Weight", "Share", "Paths"], { label: "Sources" });
  sources.body.append(element);
  const events = new JobEvents(id);
  const list = eventTable();
  happened.body.append(list.element);
  fill(
    body,
    sourcesOf(job.spec.data).map((row) =>
      h(
        "tr",
        {},
        row.map((text, place) => h("td", { class: place === 3 ? "mono message" : "number" }, text)),
      ),
    ),
  );
  setText(
    sources.note,
    `tokenizer ${job.spec.data?.tokenizer_file ?? job.spec.data?.tokenizer ?? "–"}, validation fraction ${job.spec.data?.validation_fraction ?? "–"}`,
  );
  return {
    element: h("div", {}, progress.element, sources.element, preview.element, happened.element),
    async refresh(signal, now, moved) {
      if (!moved) return;
      const [ledger] = await Promise.all([get(`/v1/jobs/${id}/ledger`, {}, { signal }), events.poll(signal)]);
      const batch = now.spec.train?.global_batch_size ?? 0;
      const tokens = numberOf(now.metrics.latest.tokens);
      const trained = (ledger.seconds.compute ?? 0) + (ledger.seconds.data_wait ?? 0);
      const prepared = events.items.findLast(isOfCorpus)?.data;
      const isBlend = Boolean(now.spec.data?.weights); // whose parts have epochs of different lengths
      const trainedOn = prepared?.epoch_tokens ?? prepared?.tokens * (1 - (now.spec.data?.validation_fraction ?? 0));
      const epoch = isBlend ? NaN : trainedOn;
      const waited = ledger.seconds.data_wait ?? 0;
      const shown = [
        ["Tokens seen", compact(tokens)],
        ["Tokens per epoch", compact(epoch)],
        ["Epochs", compact(tokens / epoch, 3)],
        ["Documents", number(prepared?.documents)],
        ["Sequences per step", number(batch)],
        ["Tokens per sequence", number(now.spec.model?.sequence_length)],
        ["Waited for data", trained > 0 ? `${duration(waited)} (${percent(waited / trained, 2)})` : duration(waited)],
      ].filter(([, value]) => value !== UNKNOWN);
      fill(
        figures,
        shown.map(([label, value]) =>
          h("div", { class: "figure" }, h("dt", {}, label), h("dd", { class: "value" }, value)),
        ),
      );
      const pieces = prepared?.preview ?? [];
      setVisible(preview.element, pieces.length > 0);
      setText(preview.note, previewNote(pieces));
      fill(
        text,
        pieces.map(([piece, learned]) => h(learned && !isAllLearned(pieces) ? "mark" : "span", {}, piece)),
      );
      const about = events.items.filter((event) => TYPES.some((part) => event.type.includes(part)));
      list.show(about);
      setVisible(happened.element, about.length > 0);
    },
  };
}

function isOfCorpus(event) {
  return event.type === "data_prepared" && !event.data.is_validation;
}

function isAllLearned(pieces) {
  return pieces.every(([, learned]) => learned);
}

function previewNote(pieces) {
  const learned = isAllLearned(pieces) ? "all of it is learned" : "what is learned is marked";
  return `the beginning of the training data, with its special tokens; ${learned}`;
}

function sourcesOf(data) {
  const blended = data?.weights && data.paths.length > 0;
  const parts = blended
    ? data.paths.map((path, place) => ({ source: data.source, paths: [path], weight: data.weights[place] }))
    : [{ source: data?.source, paths: data?.paths, weight: 1 }];
  const total = parts.reduce((sum, part) => sum + part.weight, 0);
  return parts.map((part) => [
    part.source ?? "–",
    number(part.weight, part.weight % 1 ? 2 : 0),
    percent(part.weight / total),
    (part.paths ?? []).join(", ") || "–",
  ]);
}
