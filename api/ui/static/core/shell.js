/** The frame around all pages: where one can go, who looks, what cannot be reached. */

import { Problem, send } from "./api.js";
import { connection } from "./connection.js";
import { fill, h, setAttribute } from "./dom.js";
import { noticeArea, notify } from "./notices.js";
import { link } from "./router.js";

const PLACES = [
  ["Jobs", "/"],
  ["Compare", "/compare"],
  ["Queue", "/queue"],
  ["Cluster", "/cluster"],
  ["Plan", "/plan"],
  ["Submit", "/submit"],
  ["Access", "/access"],
];

/** Build it; `{main, showViewer(me), title(text)}`. */
export function buildShell(body, facts) {
  const links = PLACES.map(([name, path]) => h("a", { href: link(path), class: "place", "data-path": path }, name));
  const viewer = h("span", { class: "viewer" });
  const signOut = h("button", { class: "plain sign-out", hidden: true, onclick: endSession }, "Sign out");
  const main = h("main", { class: "page", id: "main" });
  fill(
    body,
    h("a", { class: "skip", href: "#main" }, "Skip to the content"),
    h(
      "header",
      { class: "top" },
      h(
        "div",
        { class: "top-inner" },
        h("a", { class: "brand", href: link("/"), title: `Manta ${facts.version}` }, "Manta"),
        h("nav", { class: "places", "aria-label": "Dashboard" }, links),
        h("span", { class: "gap" }),
        viewer,
        signOut,
      ),
    ),
    h("div", { class: "banner-place" }, connection.element),
    main,
    noticeArea(),
  );
  return {
    main,
    showViewer(me) {
      fill(viewer, me === null ? "" : me.user || me.key_name);
      signOut.hidden = !me?.browser;
    },
    title(text, place) {
      document.title = text ? `${text} – Manta` : "Manta";
      for (const each of links) setAttribute(each, "aria-current", each.dataset.path === place ? "page" : null);
    },
  };
}

/** Whether `me` may do what needs `scope`. Where the service did not say who looks, it will say what is allowed. */
export function may(me, scope) {
  const scopes = ["read", "submit", "admin"];
  return me === null || scopes.indexOf(me.scope) >= scopes.indexOf(scope);
}

async function endSession() {
  try {
    await send("DELETE", "/v1/session");
  } catch (error) {
    if (!(error instanceof Problem && error.status === 401)) {
      notify(error.message);
      return;
    }
  }
  location.assign(link("/"));
}
