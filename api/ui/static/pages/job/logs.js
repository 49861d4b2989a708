/** What the ranks print: live, from the end, by rank, stream and text. */

import { get } from "../../core/api.js";
import { fill, h, panel, setText } from "../../core/dom.js";
import { clock, counted, utc } from "../../core/format.js";
import { Router } from "../../core/router.js";

const [PAGE, MOST_PAGES, SHOWN] = [1000, 5, 2000];
const NOISE = /\[c10d\]|socket\.cpp|ProcessGroup.*Warning/;

/** The tab. */
export function create({ id, query, refreshNow }) {
  return new LogsTab(id, query, refreshNow);
}

class LogsTab {
  constructor(id, query, refreshNow) {
    Object.assign(this, { id, refreshNow, lines: [], cursor: null, tailed: false, settled: false });
    this.filters = { rank: query.get("rank") ?? "", stream: query.get("stream") ?? "", text: query.get("text") ?? "" };
    this.rank = h("select", { "aria-label": "Rank of the log", onchange: (event) => this.choose("rank", event.target.value) }, h("option", { value: "" }, "All ranks"));
    this.stream = h("select", { "aria-label": "Stream", onchange: (event) => this.choose("stream", event.target.value) }, ["", "stdout", "stderr"].map((name) => h("option", { value: name, selected: name === this.filters.stream }, name || "Both streams")));
    this.text = h("input", { type: "search", placeholder: "text, or /regular expression/", value: this.filters.text, "aria-label": "Only lines with", oninput: (event) => this.choose("text", event.target.value) });
    this.quiet = h("input", { type: "checkbox", checked: true, onchange: () => this.draw() });
    this.follow = h("input", { type: "checkbox", checked: true });
    this.problem = h("span", { class: "note tone-bad", role: "status" });
    this.box = h("div", { class: "log", tabindex: "0", role: "log", "aria-label": "Log", onscroll: () => this.scrolled() });
    const { element, body, note } = panel("Log");
    this.note = note;
    body.append(h("div", { class: "toolbar" }, this.rank, this.stream, this.text, h("label", { class: "inline" }, this.quiet, "hide notices of torch's sockets"), h("label", { class: "inline" }, this.follow, "follow"), this.problem), this.box);
    this.element = h("div", {}, element);
  }

  choose(name, value) {
    this.filters[name] = value;
    Router.query(this.filters);
    if (name === "rank") {
      Object.assign(this, { lines: [], cursor: null, tailed: false });
      this.refreshNow();
    }
    this.draw();
  }

  scrolled() {
    const atEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 30;
    if (!atEnd) this.follow.checked = false;
  }

  async refresh(signal, job, moved) {
    if (moved) await this.offerRanks(signal);
    const before = this.lines.length ? this.lines.at(-1) : null;
    for (let page = 0; page < MOST_PAGES; page += 1) {
      const tail = this.cursor === null ? { tail: SHOWN } : {};
      const answer = await get(`/v1/jobs/${this.id}/logs`, { rank: this.filters.rank, cursor: this.cursor, limit: PAGE, ...tail }, { signal });
      this.cursor = answer.resume_cursor;
      this.lines.push(...answer.items);
      this.settled = answer.next_cursor === null;
      if (this.settled) break;
    }
    if (this.lines.length > 2 * SHOWN) this.lines = this.lines.slice(-SHOWN);
    if (this.lines.at(-1) !== before || !this.drawn) this.draw();
  }

  async offerRanks(signal) {
    const { items } = await get(`/v1/jobs/${this.id}/ranks`, {}, { signal });
    if (items.length + 1 === this.rank.options.length) return;
    fill(this.rank, h("option", { value: "" }, "All ranks"), items.map((each) => h("option", { value: each.rank, selected: String(each.rank) === this.filters.rank }, `Rank ${each.rank}`)));
  }

  wanted() {
    const { stream, text } = this.filters;
    let matches = (line) => line.toLowerCase().includes(text.toLowerCase());
    setText(this.problem, "");
    const expression = text.match(/^\/(.+)\/([i]?)$/);
    if (expression) {
      try {
        const compiled = new RegExp(expression[1], expression[2]);
        matches = (line) => compiled.test(line.slice(0, 2000));
      } catch (error) {
        setText(this.problem, error.message);
      }
    }
    return this.lines.filter((line) => (!stream || line.stream === stream) && (!this.quiet.checked || !NOISE.test(line.text)) && (!text || matches(line.text)));
  }

  draw() {
    this.drawn = true;
    const lines = this.wanted().slice(-SHOWN);
    setText(this.note, lines.length < this.lines.length ? `${counted(lines.length, "line")} of the last ${this.lines.length.toLocaleString("en-US")}` : counted(lines.length, "line"));
    const line = (each) => h("div", { class: `log-line ${each.stream}`, title: `${utc(each.time)}, generation ${each.generation}` }, h("span", { class: "who" }, `${clock(each.time, false)} [${each.rank}] `), each.text);
    fill(this.box, lines.length ? lines.map(line) : h("p", { class: "empty-note" }, this.lines.length ? "No line matches." : "Nothing was printed yet."));
    if (this.follow.checked) this.box.scrollTop = this.box.scrollHeight;
  }
}
