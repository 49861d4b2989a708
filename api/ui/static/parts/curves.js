/** A job's metrics over its steps, brought up to date by what is new, and in more detail where somebody looks closer. */

import { get } from "../core/api.js";
import { numberOf } from "../core/format.js";

const POINTS = 1500;
const OVERLAP = 8; // steps asked for again, since a step's validation loss may come after its other metrics
const MOST_SELDOM = 2000;

/** The names of a job's validation sets and of the metrics with their losses: `[[label, metric], ...]`. */
export function validationsOf(spec) {
  const sets = Array.isArray(spec?.data?.validation) ? spec.data.validation : [];
  return [
    ["validation", "validation_loss"],
    ...sets.filter((each) => each?.name).map((each) => [`validation ${each.name}`, `validation_loss_${each.name}`]),
  ];
}

/** Columns by name, `step` among them, that can grow. */
export class Columns {
  constructor(names) {
    this.names = names;
    this.columns = Object.fromEntries(["step", ...names].map((name) => [name, []]));
    this.lost = {};
  }

  get length() {
    return this.columns.step.length;
  }

  /** Add what REST answered; steps that are there are replaced. Returns whether anything is different now. */
  merge({ steps, series }) {
    const known = this.columns.step;
    const first = steps.length ? lowerBound(known, steps[0]) : known.length;
    const old = Object.fromEntries(Object.entries(this.columns).map(([name, column]) => [name, column.splice(first)]));
    let [kept, different] = [0, false];
    steps.forEach((step, place) => {
      while (kept < old.step.length && old.step[kept] < step) this.push(old, kept++);
      const before = old.step[kept] === step ? kept++ : -1;
      for (const name of this.names) {
        const value = numberOf(series[name]?.[place]);
        this.note(name, step, series[name]?.[place]);
        const earlier = before < 0 ? NaN : old[name][before];
        const merged = Number.isNaN(value) && series[name]?.[place] !== "nan" ? earlier : value;
        different ||= before < 0 || !Object.is(merged, earlier);
        this.columns[name].push(merged);
      }
      known.push(step);
    });
    while (kept < old.step.length) this.push(old, kept++);
    return different;
  }

  /** Keep since when a metric is no number, `lost[name]`: `{step, word}`; undefined where its newest value is one. */
  note(name, step, given) {
    if (typeof given === "string") this.lost[name] ??= { step, word: given };
    else if (given !== null && given !== undefined) delete this.lost[name];
  }

  push(from, place) {
    for (const name of Object.keys(this.columns)) this.columns[name].push(from[name][place]);
  }

  /** Column of x by one of X_AXES' columns; null means steps. */
  x(column) {
    return this.columns[column ?? "step"] ?? [];
  }

  /** The step at which a column has reached `value`, between two steps of its own; the value itself where it is null. */
  stepAt(column, value) {
    if (column === null) return value;
    const xs = this.columns[column];
    const place = lowerBound(xs, value);
    return this.columns.step[Math.min(place, xs.length - 1)] ?? 0;
  }

  /** The value of a column at a step; NaN where nothing is near. */
  at(column, step) {
    if (column === null) return step;
    const place = Math.min(lowerBound(this.columns.step, step), this.length - 1);
    return place < 0 ? NaN : this.columns[column][place];
  }
}

/** The curves of one job. */
export class JobCurves {
  /** `names`: of the metrics that most steps have. `seldom`: of those that multiples of `every` steps have, and the
   * job's last step, `end`. */
  constructor(id, names, seldom = [], every = 0, end = 0) {
    this.id = id;
    this.names = [...new Set(names)];
    this.seldomNames = every > 0 ? seldom : [];
    this.every = every;
    this.end = end;
    this.all = new Columns(this.names);
    this.seldom = null;
    this.detail = null;
    this.wanted = null;
  }

  /** Read what is new; whether anything is. Throws like `get`. */
  async poll(signal) {
    if (this.all.length > 2 * POINTS) this.all = new Columns(this.names);
    const steps = this.all.columns.step;
    const first = steps.length === 0;
    const after = first ? 0 : Math.max(0, steps[steps.length - 1] - OVERLAP);
    const answer = await this.read(this.names, after, null, POINTS, signal);
    const different = this.all.merge(answer);
    await this.pollSeldom(signal);
    return different || first;
  }

  async pollSeldom(signal) {
    const newest = this.all.columns.step.at(-1) ?? 0;
    const next = Math.min(this.every, this.end || this.every);
    if (this.seldomNames.length === 0 || newest < next) return;
    const last = this.seldom?.columns.step.at(-1) ?? 0;
    const complete = this.seldom && this.seldomNames.some((name) => Number.isFinite(this.seldom.columns[name].at(-1)));
    if (complete && newest < last + this.every && (newest !== this.end || last === newest)) return;
    this.seldom ??= new Columns([...new Set([...this.seldomNames, "tokens", "time"])]);
    const query = {
      names: this.seldom.names.join(","),
      after_step: Math.max(0, last - 1),
      max_points: MOST_SELDOM,
      every: this.every,
    };
    this.seldom.merge(await get(`/v1/jobs/${this.id}/metrics`, query, { signal }));
  }

  /** Read the steps `[from, to]` in as much detail as is drawn; null: all are looked at. Whether that is what is still wanted. */
  async look(range) {
    this.wanted = range;
    if (range === null) {
      this.detail = null;
      return true;
    }
    const answer = await this.read(this.names, Math.max(0, Math.floor(range[0]) - 2), Math.ceil(range[1]) + 1, POINTS);
    if (this.wanted !== range) return false;
    this.detail = new Columns(this.names);
    this.detail.merge(answer);
    return true;
  }

  /** What is to be drawn. */
  get shown() {
    return this.detail ?? this.all;
  }

  read(names, after, until, points, signal) {
    const query = { names: names.join(","), after_step: after, until_step: until, max_points: points };
    return get(`/v1/jobs/${this.id}/metrics`, query, { signal });
  }
}

function lowerBound(values, wanted) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** What is said of lines that end because their values are no numbers any more: `named` is `[[name, lost], ...]`. */
export function lostInWords(named) {
  return named
    .filter(([, lost]) => lost)
    .map(([name, { step, word }]) => `${name} is ${word} from step ${step} on`)
    .join("; ");
}

/** The columns `names`, and `step`, of answers that came one after the other, and which of them are `lost`. */
export function merged(names, answers) {
  const columns = new Columns(names);
  for (const answer of answers) columns.merge(answer);
  return { columns: columns.columns, lost: columns.lost };
}

/**
 * Which of `columns` have equal losses, to the last bit, at all steps that are known of both: `[{places, steps}]`, where
 * `places` are theirs in `columns` and `steps` the fewest that two of them have in common, at least 2.
 */
export function identical(columns) {
  const groups = [];
  columns.forEach((each, place) => {
    for (const group of groups) {
      const steps = stepsAlike(columns[group.places[0]], each);
      if (steps < 2) continue;
      group.places.push(place);
      group.steps = Math.min(group.steps, steps);
      return;
    }
    groups.push({ places: [place], steps: Infinity });
  });
  return groups.filter(({ places }) => places.length > 1);
}

/** How many steps two have in common; 0 where a loss differs. */
function stepsAlike({ columns: one }, { columns: other }) {
  const losses = new Map(one.step.map((step, place) => [step, one.loss[place]]));
  const common = other.step.filter((step) => losses.has(step));
  const alike = other.step.every((step, place) => !losses.has(step) || Object.is(losses.get(step), other.loss[place]));
  return alike ? common.length : 0;
}
