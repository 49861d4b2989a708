/** Addresses and the pages behind them. Links inside of the dashboard do not load the document again. */

import { Unreachable } from "./api.js";
import { connection } from "./connection.js";
import { setAttribute } from "./dom.js";
import { notify } from "./notices.js";

const AGAIN_MILLISECONDS = 2000;
const ROOT = `${document.documentElement.dataset.base ?? ""}/ui`;

/** Address of a page of the dashboard, with a query. */
export function link(path, query = {}) {
  const text = new URLSearchParams(
    Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""),
  ).toString();
  return `${ROOT}${path}${text ? `?${text}` : ""}`;
}

/**
 * Finds the page of an address and has it opened. `routes` are `[pattern, load]`: a pattern such as `/jobs/:id`, and a
 * function that loads the module whose `open(root, context)` builds the page and returns `{close()}`.
 */
export class Router {
  constructor(root, routes, context) {
    this.root = root;
    this.routes = routes;
    this.context = context;
    this.page = null;
    this.opened = 0;
    addEventListener("popstate", () => this.open());
    document.addEventListener("click", (event) => this.follow(event));
  }

  follow(event) {
    if (
      event.defaultPrevented ||
      event.button !== 0 ||
      event.metaKey ||
      event.ctrlKey ||
      event.shiftKey ||
      event.altKey
    )
      return;
    const anchor = event.target.closest?.("a[href]");
    if (
      !anchor ||
      anchor.target ||
      anchor.download ||
      anchor.origin !== location.origin ||
      !anchor.pathname.startsWith(`${ROOT}/`)
    )
      return;
    event.preventDefault();
    this.go(anchor.href);
  }

  /** Go to an address as if its link were followed. */
  go(href) {
    history.pushState(null, "", href);
    return this.open();
  }

  /** Change the query of the page that is open, without a new entry in the history and without opening it again. */
  static query(changes) {
    const url = new URL(location.href);
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") url.searchParams.delete(name);
      else url.searchParams.set(name, value);
    }
    history.replaceState(null, "", url);
  }

  async open() {
    const turn = ++this.opened;
    setAttribute(this.root, "aria-busy", "true"); // shown by the style sheet
    this.page?.close();
    this.page = null;
    const path = location.pathname.slice(ROOT.length) || "/";
    const [load, parameters] = this.matching(path);
    const module = await load().catch(() => null);
    if (turn !== this.opened) return;
    if (module === null) {
      notify("The service cannot be reached. The page opens as soon as it answers.");
      return this.loadAnew();
    }
    this.root.replaceChildren();
    scrollTo(0, 0);
    const query = new URLSearchParams(location.search);
    const page = await module.open(this.root, { ...this.context, parameters, query, router: this });
    if (turn !== this.opened) return page?.close();
    this.page = page ?? { close() {} };
    setAttribute(this.root, "aria-busy", null);
    return undefined;
  }

  /** A page's file is not there: the service has another release, or does not answer, or the network has changed. */
  async loadAnew() {
    connection.fails(new Unreachable());
    const answers = await fetch(location.href).catch(() => null);
    if (answers) location.reload();
    else setTimeout(() => this.loadAnew(), AGAIN_MILLISECONDS);
  }

  matching(path) {
    for (const [pattern, load] of this.routes) {
      const parameters = match(pattern, path);
      if (parameters) return [load, parameters];
    }
    return [() => import("../pages/nothing.js"), {}];
  }
}

/** Parameters of `path` by a pattern such as /jobs/:id; null where it does not match. */
export function match(pattern, path) {
  const wanted = pattern.split("/");
  const given = path.replace(/\/$/, "").split("/");
  if (pattern === "/") return path === "/" || path === "" ? {} : null;
  if (wanted.length !== given.length) return null;
  const parameters = {};
  for (const [place, part] of wanted.entries()) {
    if (part.startsWith(":")) parameters[part.slice(1)] = decoded(given[place]);
    else if (part !== given[place]) return null;
  }
  return parameters;
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // no address of ours
  }
}
