/** Begins the dashboard: the frame around all pages, who looks, and which page an address is. */

import { get } from "./core/api.js";
import { Router } from "./core/router.js";
import { buildShell } from "./core/shell.js";
import "./core/theme.js";

const ROUTES = [
  ["/", () => import("./pages/jobs.js")],
  ["/jobs/:id", () => import("./pages/job.js")],
  ["/jobs/:id/:tab", () => import("./pages/job.js")],
  ["/compare", () => import("./pages/compare.js")],
  ["/queue", () => import("./pages/queue.js")],
  ["/cluster", () => import("./pages/cluster.js")],
  ["/submit", () => import("./pages/submit.js")],
  ["/plan", () => import("./pages/plan.js")],
  ["/access", () => import("./pages/access.js")],
];

/** What the service wrote into the document: states, actions and the release. */
const facts = JSON.parse(document.getElementById("facts").textContent);

const shell = buildShell(document.body, facts);
const viewer = get("/v1/me").catch(() => null);
viewer.then((me) => shell.showViewer(me));
const context = { facts, viewer, shell };
await new Router(shell.main, ROUTES, context).open();
