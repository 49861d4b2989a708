/** From numbers to places on a chart, and which numbers are written beside it. Pure functions. */

import { STYLES, byteUnit } from "../core/format.js";

const NEAREST = 1e-12; // of numbers that have 16 digits

/** A linear or logarithmic scale from `[low, high]` to `[from, to]`; `place(value)`, `value(place)`. */
export function scale(low, high, from, to, log = false) {
  const forward = log ? Math.log10 : (value) => value;
  const back = log ? (value) => 10 ** value : (value) => value;
  const begin = forward(low);
  const factor = (to - from) / (forward(high) - begin || 1);
  return {
    low,
    high,
    log,
    place: (value) => from + (forward(value) - begin) * factor,
    value: (place) => back(begin + (place - from) / factor),
  };
}

/** At most about `most` round numbers between `low` and `high`; one where these are too near each other to be told apart. */
export function ticks(low, high, most, { log = false, whole = false } = {}) {
  if (!(high - low > NEAREST * Math.max(Math.abs(low), Math.abs(high)))) return [low];
  if (log) {
    const decades = powers(low, high, most);
    if (decades.length >= 2) return decades;
  }
  let step = roundUp((high - low) / Math.max(1, most));
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high * (1 + 1e-12); at += 1) found.push(clean(at * step, step));
  return found;
}

function powers(low, high, most) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const every = Math.max(1, Math.ceil((last - first + 1) / Math.max(2, most)));
  const multiples = last - first < 2 && most > 4 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = first - 1; power <= last; power += every) {
    for (const multiple of multiples) {
      const value = multiple * 10 ** power;
      if (value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)) found.push(value);
    }
  }
  return found;
}

function roundUp(step) {
  const power = 10 ** Math.floor(Math.log10(step));
  for (const factor of [1, 2, 5, 10]) if (factor * power >= step * (1 - 1e-9)) return factor * power;
  return 10 * power;
}

function clean(value, step) {
  return Number(value.toPrecision(Math.max(1, 2 + Math.ceil(Math.log10(Math.abs(value) / step || 1)))));
}

const TIME_STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800,
];

/** At most about `most` moments between two (Unix seconds), at full minutes, hours or days of the viewer's zone. */
export function timeTicks(low, high, most) {
  const wanted = (high - low) / Math.max(1, most);
  if (wanted < TIME_STEPS[0]) return ticks(low, high, most);
  const step = TIME_STEPS.find((each) => each >= wanted) ?? roundUp(wanted / 86_400) * 86_400;
  const shift = -60 * new Date(1000 * low).getTimezoneOffset();
  const found = [];
  for (let at = Math.ceil((low + shift) / step) * step - shift; at <= high; at += step) found.push(at);
  return found;
}

const MOST_DIGITS = 16;

/** The same for numbers of bytes, round in binary units. */
export function byteTicks(low, high, most, options) {
  const unit = byteUnit(Math.max(Math.abs(low), Math.abs(high)));
  return ticks(low / unit, high / unit, most, options).map((value) => value * unit);
}

/** How the values of an axis up to its highest tick are written, by the name of a style. */
export function styleOf(values, name = "number") {
  return STYLES[name](Math.max(0, ...values.map(Math.abs)));
}

/** Texts for tick values, with as many digits as tell them apart: of some steps beyond a million, four do not. */
export function tickTexts(values, write = styleOf(values)) {
  for (let digits = 4; ; digits += 1) {
    const texts = values.map((value) => write(value, digits));
    if (digits === MOST_DIGITS || new Set(texts).size === values.length) return texts;
  }
}

/**
 * The range that shows all finite values of `columns` whose x lies in `[from, to]`, with a little room; `[0, 1]` of none.
 * With `log` those that are not above zero count as none. `floor`: a value that is always in it.
 */
export function extent(columns, from, to, { log = false, floor = null } = {}) {
  let [low, high] = [Infinity, -Infinity];
  for (const { x, y } of columns) {
    for (let place = 0; place < x.length; place += 1) {
      const value = y[place];
      if (x[place] < from || x[place] > to || !Number.isFinite(value) || (log && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return log ? [0.1, 1] : [0, 1];
  if (floor !== null && !log) low = Math.min(low, floor);
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.05, high * 1.05];
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return [floor !== null && low === floor ? low : low - room, high + room];
}

/** The index of the finite x nearest to `value` in an ascending column; -1 in an empty one. */
export function nearest(x, value) {
  if (x.length === 0) return -1;
  let [low, high] = [0, x.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle;
    else high = middle;
  }
  return Math.abs(x[low] - value) <= Math.abs(x[high] - value) ? low : high;
}

/**
 * Values smoothed as TensorBoard does: an exponential mean with `weight` from 0 to below 1, without the pull of its
 * beginning. What is not finite stays as it is and moves nothing.
 */
export function smoothed(values, weight) {
  if (weight <= 0) return values;
  const found = new Float64Array(values.length);
  let [mean, count] = [0, 0];
  for (let place = 0; place < values.length; place += 1) {
    const value = values[place];
    if (Number.isFinite(value)) {
      mean = mean * weight + (1 - weight) * value;
      count += 1;
      found[place] = mean / (1 - weight ** count);
    } else {
      found[place] = value;
    }
  }
  return found;
}

/** Columns on top of each other: the lower edge of the first, then the upper edge of each. What is not finite counts as 0. */
export function stacked(columns) {
  const edges = [new Float64Array(columns[0]?.length ?? 0)];
  for (const column of columns)
    edges.push(edges.at(-1).map((below, place) => below + (Number.isFinite(column[place]) ? column[place] : 0)));
  return edges;
}
