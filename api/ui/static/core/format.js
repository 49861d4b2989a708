/** Numbers, times and states as short text. Pure functions. */

export const UNKNOWN = "–";

const TONES = {
  RUNNING: "active",
  STARTING: "busy",
  RESIZING: "busy",
  RECOVERING: "warn",
  PAUSING: "warn",
  CANCELLING: "warn",
  SUCCEEDED: "good",
  FAILED: "bad",
};
const SPOKEN = { nan: NaN, inf: Infinity, "-inf": -Infinity };

/** A number as REST writes it: null is unknown, and those that are not finite are words. NaN where unknown. */
export function numberOf(value) {
  if (value === null || value === undefined) return NaN;
  return typeof value === "string" ? (SPOKEN[value] ?? NaN) : value;
}

/** A number of REST with `digits` after the point and thousands apart; a dash where unknown. */
export function number(value, digits = 0) {
  if (value === null || value === undefined) return UNKNOWN;
  if (typeof value === "string") return value;
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/**
 * How numbers up to `most` are written beside each other, with the same unit and notation: each style is a function of
 * `most`, and returns one of a value and a number of digits.
 */
export const STYLES = {
  number: (most) =>
    (most > 0 && most < 1e-3) || most >= 1e15
      ? exponential
      : inUnit(most, [
          ["T", 1e12],
          ["B", 1e9],
          ["M", 1e6],
          ["k", 1e3, 1e5],
          ["", 1, 0],
        ]),
  seconds: (most) =>
    inUnit(most, [
      ["s", 1],
      ["ms", 1e-3],
      ["us", 1e-6, 0],
    ]),
  bytes: (most) => inUnit(most, BYTE_UNITS),
  share: () => (value, digits) => (Number.isFinite(value) ? `${trimmed(100 * value, digits)}%` : UNKNOWN),
};
const BYTE_UNITS = ["TiB", "GiB", "MiB", "KiB", "B"].map((unit, place) => [unit, 1024 ** (4 - place)]);

/** The size of the unit in which bytes up to `most` are written. */
export function byteUnit(most) {
  return (BYTE_UNITS.find(([, size]) => most >= size) ?? ["B", 1])[1];
}

/** `units` are `[name, size, from]`, the largest first; `from`: the least `most` for which it is used, its size unless given. */
function inUnit(most, units) {
  const [name, size] = units.find(([, size, from = size]) => most >= from) ?? units.at(-1);
  return (value, digits = 4) =>
    Number.isFinite(value) ? `${trimmed(value / size, digits)}${name && ` ${name}`}` : notFinite(value);
}

function exponential(value, digits = 4) {
  if (value === 0) return "0";
  return Number.isFinite(value) ? value.toExponential(digits - 1).replace(/\.?0*e\+?/, "e") : notFinite(value);
}

function notFinite(value) {
  return Number.isNaN(value) ? UNKNOWN : value > 0 ? "inf" : "-inf";
}

/** A number in as few characters as say it, with at most so many digits: 1.2 M, 3.4e-5. */
export function compact(value, digits = 4) {
  return STYLES.number(Math.abs(value))(value, digits);
}

/** With at most so many digits, but all of those before the point. */
function trimmed(value, digits = 4) {
  const whole = Math.abs(value) >= 10 ** digits;
  const rounded = whole ? Math.round(value) : Number(value.toPrecision(digits));
  return rounded.toLocaleString("en-US", { maximumFractionDigits: 20 });
}

/** A ratio as a percentage. */
export function percent(value, digits = 1) {
  const ratio = numberOf(value);
  return Number.isFinite(ratio) ? `${(100 * ratio).toFixed(digits)}%` : UNKNOWN;
}

/** A difference, as a ratio, as a percentage with its sign. */
export function signed(ratio) {
  return `${ratio > 0 ? "+" : ""}${percent(ratio)}`;
}

/** Bytes in binary units. */
export function bytes(value) {
  const count = numberOf(value);
  if (!Number.isFinite(count)) return UNKNOWN;
  let rest = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(rest) < 1024)
      return unit === "B" ? `${Math.round(rest)} B` : `${rest.toFixed(rest < 10 ? 2 : 1)} ${unit}`;
    rest /= 1024;
  }
  return `${rest.toFixed(2)} TiB`;
}

/** Seconds for people: 2 d 3 h, 4 min 5 s, 1.25 s, 3.1 ms. */
export function duration(value) {
  const seconds = numberOf(value);
  if (!Number.isFinite(seconds)) return UNKNOWN;
  if (seconds === 0) return "0 s";
  const size = Math.abs(seconds);
  if (size < 1e-3) return `${(seconds * 1e6).toFixed(0)} us`;
  if (size < 1) return `${(seconds * 1e3).toFixed(size < 0.01 ? 2 : 1)} ms`;
  if (size < 60) return `${seconds.toFixed(size < 10 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [
    Math.floor(whole / 86400),
    Math.floor(whole / 3600) % 24,
    Math.floor(whole / 60) % 60,
  ];
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

/** Seconds that are left, which are estimates: whole ones. */
export function remaining(value) {
  const seconds = numberOf(value);
  return seconds < 60 ? `${Math.max(1, Math.round(seconds))} s` : duration(seconds);
}

/** How long ago a moment was, coarse enough not to change every second. */
export function age(moment, now = Date.now()) {
  if (!moment) return UNKNOWN;
  const seconds = Math.max(0, (now - Date.parse(moment)) / 1000);
  for (const [unit, length] of [
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
  ]) {
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit}`;
  }
  return "just now";
}

/** A moment as the end of a sentence: 3 min ago. */
export function ago(moment) {
  const since = age(moment);
  return since === "just now" ? since : `${since} ago`;
}

/** A moment in the viewer's zone. */
export function clock(moment, withDay = true) {
  if (!moment) return UNKNOWN;
  const date = new Date(moment);
  const two = (value) => String(value).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return withDay ? `${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}` : time;
}

/** A moment with its year, in UTC, for tooltips. */
export function utc(moment) {
  return moment
    ? `${new Date(moment)
        .toISOString()
        .replace("T", " ")
        .replace(/\.\d+Z$/, "")} UTC`
    : "";
}

/** The color class of a job's state; the state itself is always written too. */
export function stateTone(state) {
  return TONES[state] ?? "idle";
}

/** The color class of a class of the ledger. */
export function ledgerTone(name) {
  if (name === "compute") return "good";
  if (["detect", "re_form", "restore", "redo", "idle_without_capacity"].includes(name)) return "bad";
  return { queue: "idle", pause: "idle", start: "busy" }[name] ?? "warn";
}

/** A code such as state_changed as words. */
export function words(code) {
  return code === "re_form" ? "re-form" : code.replaceAll("_", " ");
}

/** A class of the ledger as words: what is done again is lost work there. */
export function ledgerName(name) {
  return name === "redo" ? "lost work" : words(name);
}

/** A phase of a recovery as words: its last one is the step that comes next. */
export function phaseName(name) {
  return name === "redo" ? "next step" : words(name);
}

/** A text as a sentence: with a capital at its beginning, and an end. */
export function sentence(text) {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.?!]$/.test(text) ? "" : "."}`;
}

/** As much of a node's id as tells it from others; commands take that, too. */
export function nodeName(id) {
  return id ? id.slice(0, 12) : UNKNOWN;
}

/** The color class of an event. */
export function eventTone(event) {
  if (event.type === "state_changed") return stateTone(String(event.data.to));
  return ["fail", "died", "lost", "error", "drift"].some((word) => event.type.includes(word)) ? "bad" : "idle";
}

/** A layout in short, as tensor x pipeline x data, and the context and expert sizes if they are not 1. */
export function layout(parallel) {
  const sizes = [parallel.tensor, parallel.pipeline, parallel.data];
  const more = ["context", "expert"].filter((axis) => parallel[axis] > 1).map((axis) => `, ${axis} ${parallel[axis]}`);
  return sizes.map((size) => size ?? "?").join(" × ") + more.join("");
}

/** Why a job is not simply running well; empty when it is. */
export function why(job) {
  if (job.state === "RUNNING" || job.state === "SUCCEEDED") return "";
  if (job.queue.position === null) return job.message || words(job.reason ?? "");
  const start = startsIn(job.queue.expected_start_seconds);
  const place = `position ${job.queue.position} in the queue${start ? `, expected to start ${start}` : ""}`;
  return job.message ? `${place}: ${job.message}` : place;
}

/**
 * The newest validation loss among a job's `latest` metrics, as in REST: of the held-out part of its corpus or, where
 * nothing is held out, of its first validation set. Null where none was measured.
 */
export function validationLoss(latest) {
  const measured = Object.keys(latest).filter((name) => name.startsWith("validation_loss") && latest[name] !== null);
  return latest.validation_loss ?? latest[measured[0]] ?? null;
}

/** When a queued job starts, as the end of a sentence; empty where nobody knows. */
export function startsIn(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 60) return "within a minute";
  return `in about ${seconds < 3600 ? `${Math.round(seconds / 60)} min` : duration(seconds)}`;
}

/** `count` things, by their name in the singular. */
export function counted(count, name, plural = `${name}s`) {
  return `${number(count)} ${count === 1 ? name : plural}`;
}
