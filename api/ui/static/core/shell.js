/** The frame around all pages: where one can go, who looks, what cannot be reached. */

import { Problem, send } from "./api.js";
import { connection } from "./connection.js";
import { fill, h, marked, setAttribute, setVisible } from "./dom.js";
import { confirmed, noticeArea, notify } from "./notices.js";
import { link } from "./router.js";
import { THEMES, chooseTheme, theme } from "./theme.js";

const PLACES = [
  ["Jobs", "/"],
  ["Compare", "/compare"],
  ["Queue", "/queue"],
  ["Cluster", "/cluster"],
  ["Plan", "/plan"],
  ["Access", "/access"],
];
const HELP = [
  ["Documentation", "The folder `docs` of this release; begin with its `README.md`."],
  ["Command line", "`manta --help` lists all commands, `manta doctor` checks this installation."],
  [
    "Charts",
    "Drag zooms all charts of a page, double-click shows everything again. With a chart in focus: + and - zoom, the arrow keys move, 0 shows everything.",
  ],
];

/** Build it; `{main, showViewer(me), title(text)}`. */
export function buildShell(body, facts) {
  const links = PLACES.map(([name, path]) => h("a", { href: link(path), class: "place", "data-path": path }, name));
  const submit = h(
    "a",
    { class: "button primary", href: link("/submit"), "data-path": "/submit", hidden: true },
    "Submit job",
  );
  const account = accountMenu(facts);
  const main = h("main", { class: "page", id: "main" });
  const icon = document.querySelector("link[rel=icon]").href;
  fill(
    body,
    h("a", { class: "skip", href: "#main" }, "Skip to the content"),
    h(
      "header",
      { class: "top" },
      h(
        "div",
        { class: "top-inner" },
        h("a", { class: "brand", href: link("/") }, h("img", { src: icon, alt: "", width: 22, height: 22 }), "Manta"),
        h("nav", { class: "places", "aria-label": "Dashboard" }, links),
        h("span", { class: "gap" }),
        submit,
        account.element,
      ),
    ),
    h("div", { class: "banner-place" }, connection.element),
    main,
    noticeArea(),
  );
  return {
    main,
    showViewer(me) {
      account.show(me);
      setVisible(submit, may(me, "submit"));
    },
    title(text, place) {
      document.title = text ? `${text} – Manta` : "Manta";
      for (const each of [...links, submit])
        setAttribute(each, "aria-current", each.dataset.path === place ? "page" : null);
    },
  };
}

/** A button with the viewer's name, and below it their key, the theme, help and the way out; `{element, show(me)}`. */
function accountMenu(facts) {
  const name = h("summary", { class: "button account-name", "aria-label": "Account and settings" }, "…");
  const about = h("dl", { class: "account-about" });
  const themes = h(
    "select",
    { "aria-label": "Theme", onchange: () => chooseTheme(themes.value) },
    THEMES.map((each) => h("option", { value: each, selected: each === theme() }, each)),
  );
  const signOut = h("button", { class: "button sign-out", hidden: true, onclick: endSession }, "Sign out");
  const close = () => element.removeAttribute("open");
  const element = h(
    "details",
    { class: "account", onkeydown: (event) => event.key === "Escape" && (close(), name.focus()) },
    name,
    h(
      "div",
      { class: "account-menu" },
      about,
      h("label", { class: "account-row" }, "Theme", themes),
      h(
        "div",
        { class: "account-row" },
        h("button", { class: "button", onclick: () => (close(), showHelp(facts)) }, "Help"),
        signOut,
      ),
      h("p", { class: "note" }, `Manta ${facts.version}`),
    ),
  );
  document.addEventListener("click", (event) => element.contains(event.target) || close());
  return {
    element,
    show(me) {
      fill(name, me === null ? "Account" : me.user || me.key_name);
      signOut.hidden = !me?.browser;
      const rows =
        me === null
          ? []
          : [
              ["User", me.user ?? "not set"],
              ["Key", `${me.key_name} (${me.scope})`],
              ["Project", me.installation ? "all projects" : me.project],
            ];
      fill(
        about,
        rows.map(([term, text]) => [h("dt", {}, term), h("dd", {}, text)]),
      );
    },
  };
}

function showHelp(facts) {
  const rows = HELP.map(([term, text]) => [h("dt", {}, term), h("dd", {}, marked(text))]);
  const rest = h(
    "a",
    { href: `${document.documentElement.dataset.base ?? ""}/openapi.json`, target: "_blank" },
    "openapi.json",
  );
  const version = [h("dt", {}, "Version"), h("dd", {}, facts.version)];
  const what = h("dl", { class: "help" }, rows, h("dt", {}, "REST API"), h("dd", {}, rest), version);
  confirmed("Help", [what], { yes: "Close", no: null });
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
