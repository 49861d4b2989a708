/** JSON values as YAML. Pure functions. What YAML reads is checked by the service. */

const PLAIN = /^[A-Za-z_][\w ./-]*$/;
const UNPRINTABLE = /[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]/g;
const WORDS = /^(true|false|yes|no|on|off|null|nan|inf)$/i;

/** A JSON value as YAML with two spaces a level; short lists in brackets. */
export function toYaml(value) {
  return `${block(value, 0).replace(/^\n/, "")}\n`;
}

function block(value, level) {
  if (Array.isArray(value)) return list(value, level);
  if (value !== null && typeof value === "object") return mapping(value, level);
  return scalar(value);
}

function list(value, level) {
  if (value.length === 0) return "[]";
  if (value.every((each) => each === null || typeof each !== "object")) return `[${value.map(scalar).join(", ")}]`;
  return value.map((each) => `\n${indent(level)}- ${block(each, level + 1).replace(/^\n\s*/, "")}`).join("");
}

function mapping(value, level) {
  const entries = Object.entries(value);
  if (entries.length === 0) return "{}";
  return entries
    .map(([key, each]) => {
      const text = block(each, level + 1);
      return `\n${indent(level)}${scalar(key)}:${text.startsWith("\n") ? "" : " "}${text}`;
    })
    .join("");
}

function scalar(value) {
  if (typeof value !== "string") return JSON.stringify(value);
  return PLAIN.test(value) && !WORDS.test(value) && value.trim() === value ? value : quoted(value);
}

function quoted(value) {
  const escape = (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return JSON.stringify(value).replace(UNPRINTABLE, escape);
}

function indent(level) {
  return "  ".repeat(level);
}
