/**
 * Elements, made and brought up to date without a framework. What is shown already is not touched, so that a page that
 * follows a job keeps its selection, focus and scroll position.
 */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. In `props`, `class`, `data-*`, `aria-*` and other attributes are set as they are, `on<event>` adds a
 * listener, `style` is an object of CSS properties; null, undefined and false leave an attribute out. Children are nodes,
 * texts or arrays of them; null, undefined and false are left out.
 */
export function h(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

/** An element of SVG, made as `h` makes those of HTML. */
export function s(tag, props = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

function filled(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else setAttribute(element, name, value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

/** Set or remove an attribute, unless it is so already. */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

/** Let an element read `text`. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Show or hide an element. */
export function setVisible(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

/** Let an element have these children and no others. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/**
 * Rows of a container, each known by a key: new ones are made by `make(item)`, which returns `{element, show(item)}`,
 * those that stay are shown anew, and those that are gone are removed. Elements are moved only where the order differs.
 */
export class KeyedRows {
  constructor(container, keyOf, make) {
    this.container = container;
    this.keyOf = keyOf;
    this.make = make;
    this.rows = new Map();
  }

  show(items) {
    const keys = new Set(items.map(this.keyOf));
    for (const [key, row] of this.rows) {
      if (!keys.has(key)) {
        row.element.remove();
        this.rows.delete(key);
      }
    }
    let place = this.container.firstElementChild;
    for (const item of items) {
      const key = this.keyOf(item);
      let row = this.rows.get(key);
      if (row === undefined) {
        row = this.make(item);
        this.rows.set(key, row);
      }
      row.show(item);
      if (row.element === place) place = place.nextElementSibling;
      else this.container.insertBefore(row.element, place);
    }
  }
}

/** A titled box; `{element, body, head}`. `note` stands beside the title. */
export function panel(title, { note = "", classes = "", controls = [] } = {}) {
  const noteElement = h("span", { class: "note" }, note);
  const head = h(
    "div",
    { class: "panel-head" },
    h("h2", {}, title),
    noteElement,
    h("span", { class: "gap" }),
    controls,
  );
  const body = h("div", { class: "panel-body" });
  return {
    element: h("section", { class: `panel ${classes}`, "aria-label": title }, head, body),
    head,
    body,
    note: noteElement,
  };
}

/** Nodes of a text of the service, in which `backticks` mark code. */
export function marked(text) {
  return text.split(/(`[^`]+`)/).map((part) => (/^`[^`]+`$/.test(part) ? h("code", {}, part.slice(1, -1)) : part));
}

/** What a panel says that has nothing to show. */
export function emptyNote(text) {
  return h("p", { class: "empty-note" }, text);
}

/**
 * A table with headings; `{element, body}`. Headings are texts or nodes; a column of buttons has "". `columns`: classes of the columns, without their
 * `c-`.
 */
export function table(headings, { classes = "", label = "", columns = [] } = {}) {
  const body = h("tbody");
  const classOf = (place) => (columns[place] ? `c-${columns[place]}` : null);
  const cells = headings.map((heading, place) =>
    heading === "" ? h("td", { class: classOf(place) }) : h("th", { scope: "col", class: classOf(place) }, heading),
  );
  const grid = h(
    "table",
    { class: `grid ${classes}`, "aria-label": label || null },
    h("thead", {}, h("tr", {}, cells)),
    body,
  );
  return {
    element: h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": label || "table" }, grid),
    body,
  };
}

/** A state as colored text; `{element, show(text, tone)}`. */
export function badge() {
  const element = h("span", { class: "badge" });
  return {
    element,
    show(text, tone) {
      setText(element, text);
      setAttribute(element, "class", `badge tone-${tone}`);
    },
  };
}

/** A progress bar; `{element, show(share, tone)}` with `share` from 0 to 1. */
export function bar(label) {
  const inner = h("div", { class: "fill" });
  const element = h(
    "div",
    { class: "bar", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": label },
    inner,
  );
  return {
    element,
    show(share, tone) {
      const width = (100 * share).toFixed(1);
      setAttribute(element, "aria-valuenow", width);
      if (inner.style.width !== `${width}%`) inner.style.width = `${width}%`;
      setAttribute(inner, "class", `fill tone-${tone}`);
    },
  };
}
