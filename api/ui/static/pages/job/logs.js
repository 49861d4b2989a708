/** What the ranks print: live, from the end, by rank, stream, level and text. The service does the searching. */

import { Problem, get } from "../../core/api.js";
import { KeyedRows, emptyNote, fill, h, panel, setText, setVisible } from "../../core/dom.js";
import { clock, counted, utc } from "../../core/format.js";
import { Router } from "../../core/router.js";

const [PAGE, MOST_PAGES, SHOWN, MOST] = [1000, 5, 1000, 10_000];
const TYPED_MILLISECONDS = 400;
const LEVELS = ["debug", "info", "warning", "error", "critical"];
const FILTERS = ["rank", "stream", "level", "text"];

/** The tab. */
export function create({ id, query, refreshNow }) {
  return new LogsTab(id, query, refreshNow);
}

class LogsTab {
  constructor(id, query, refreshNow) {
    Object.assign(this, { id, refreshNow, settled: false });
    this.filters = Object.fromEntries(FILTERS.map((name) => [name, query.get(name) ?? ""]));
    this.begin();
    this.rank = h(
      "select",
      { "aria-label": "Rank of the log", onchange: (event) => this.choose("rank", event.target.value) },
      h("option", { value: "" }, "All ranks"),
    );
    this.text = h("input", {
      type: "search",
      placeholder: "text, or /expression/",
      value: this.filters.text,
      "aria-label": "Only lines with",
      oninput: (event) => this.typed(event.target.value),
    });
    this.notices = h("input", { type: "checkbox", onchange: () => this.reread() });
    this.follow = h("input", { type: "checkbox", checked: true });
    this.problem = h("span", { class: "kind tone-bad", role: "status" });
    this.more = h("button", { class: "button", hidden: true, onclick: () => this.showMore() }, "Earlier lines");
    this.box = h("div", {
      class: "log",
      tabindex: "0",
      role: "log",
      "aria-label": "Log",
      onscroll: () => this.scrolled(),
    });
    this.none = emptyNote("");
    const lines = h("div");
    this.box.append(this.none, lines);
    this.rows = new KeyedRows(
      lines,
      (line) => line,
      (line) => ({ element: lineElement(line), show() {} }),
    );
    const { element, body, note } = panel("Log");
    this.note = note;
    body.append(
      h(
        "div",
        { class: "toolbar" },
        this.rank,
        this.choice("stream", "Stream", ["stdout", "stderr", "agent"], "All streams"),
        this.choice("level", "Level", LEVELS, "All levels"),
        this.text,
        h("label", { class: "inline" }, this.notices, "library notices"),
        h("label", { class: "inline" }, this.follow, "follow"),
        this.more,
        this.problem,
      ),
      this.box,
    );
    this.element = h("div", {}, element);
  }

  choice(name, label, values, all) {
    const options = ["", ...values].map((value) =>
      h("option", { value, selected: value === this.filters[name] }, value || all),
    );
    return h("select", { "aria-label": label, onchange: (event) => this.choose(name, event.target.value) }, options);
  }

  /** Read anew, from the end. */
  begin(tail = SHOWN) {
    Object.assign(this, { lines: [], cursor: null, tail, drawn: false, reading: (this.reading ?? 0) + 1 });
  }

  typed(value) {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.choose("text", value), TYPED_MILLISECONDS);
  }

  choose(name, value) {
    this.filters[name] = value;
    Router.query(this.filters);
    this.reread();
  }

  reread() {
    this.begin();
    this.refreshNow();
  }

  showMore() {
    this.follow.checked = false;
    this.begin(Math.min(MOST, 4 * this.tail));
    this.refreshNow();
  }

  scrolled() {
    const atEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 30;
    if (!atEnd) this.follow.checked = false;
  }

  wanted() {
    const { rank, stream, level, text } = this.filters;
    const expression = text.match(/^\/(.+)\/$/);
    const notices = this.notices.checked;
    return { rank, stream, level, notices, ...(expression ? { regex: expression[1] } : { search: text }) };
  }

  async refresh(signal, job, moved) {
    if (moved) await this.offerRanks(signal);
    const [reading, before] = [this.reading, this.lines.length];
    try {
      await this.read(signal, reading);
      setText(this.problem, "");
    } catch (error) {
      if (!(error instanceof Problem) || error.status !== 422) throw error;
      setText(this.problem, error.message);
      this.settled = true;
    }
    if (reading === this.reading && (this.lines.length !== before || !this.drawn)) this.draw();
  }

  async read(signal, reading) {
    for (let page = 0; page < MOST_PAGES; page += 1) {
      const query = this.cursor === null ? { tail: this.tail } : { cursor: this.cursor, limit: PAGE };
      const answer = await get(`/v1/jobs/${this.id}/logs`, { ...this.wanted(), ...query }, { signal });
      if (reading !== this.reading) return;
      if (this.cursor === null) setVisible(this.more, answer.earlier === true && this.tail < MOST);
      this.cursor = answer.resume_cursor;
      this.lines.push(...answer.items);
      this.settled = answer.next_cursor === null;
      if (this.settled) break;
    }
    if (this.lines.length > 2 * this.tail) this.lines = this.lines.slice(-this.tail);
  }

  async offerRanks(signal) {
    const { items } = await get(`/v1/jobs/${this.id}/ranks`, {}, { signal });
    if (items.length + 1 === this.rank.options.length) return;
    fill(
      this.rank,
      h("option", { value: "" }, "All ranks"),
      items.map((each) =>
        h("option", { value: each.rank, selected: String(each.rank) === this.filters.rank }, `Rank ${each.rank}`),
      ),
    );
  }

  draw() {
    this.drawn = true;
    const { lines } = this;
    setText(this.note, `${counted(lines.length, "line")}${this.more.hidden ? "" : ", and earlier ones"}`);
    const nothing = Object.values(this.filters).some(Boolean) ? "No line matches." : "No output yet.";
    setText(this.none, nothing);
    setVisible(this.none, lines.length === 0);
    this.rows.show(lines);
    if (this.follow.checked) this.box.scrollTop = this.box.scrollHeight;
  }
}

function lineElement(line) {
  return h(
    "div",
    {
      class: `log-line ${line.stream} level-${line.level ?? "none"}`,
      title: `${utc(line.time)}, generation ${line.generation}`,
    },
    h("span", { class: "who" }, `${clock(line.time, false)} [${line.rank}] `),
    line.text,
  );
}
