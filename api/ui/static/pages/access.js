/** Who may do what: the viewer's own rights, projects, keys, and the audit of what was changed. */

import { Problem, Unreachable, all, get, optional, send } from "../core/api.js";
import { fill, h, panel, setText, setVisible, table } from "../core/dom.js";
import { UNKNOWN, clock, utc, words } from "../core/format.js";
import { confirmed, notify } from "../core/notices.js";
import { may } from "../core/shell.js";

const AUDIT = 100;

/** Build it. */
export async function open(root, { shell, viewer }) {
  shell.title("Access", "/access");
  const me = await viewer;
  const admin = me !== null && may(me, "admin");
  const [mine, projects, keys, audit] = [
    panel("You"),
    panel("Projects"),
    panel("Keys"),
    panel("Audit", { note: `the last ${AUDIT} requests that changed something or tried to` }),
  ];
  setText(mine.note, "");
  mine.body.append(
    h(
      "p",
      {},
      me
        ? `Key ${me.key_name}${me.user ? ` of ${me.user}` : ""}: scope ${me.scope} in ${me.installation ? "all projects" : `project ${me.project}`}${atMost(me)}. Jobs that you submit belong to project ${me.project}.`
        : "The service did not identify you.",
    ),
  );
  fill(
    root,
    h("div", { class: "title-row" }, h("h1", {}, "Access")),
    h("div", { class: "columns" }, mine.element, projects.element),
    keys.element,
    audit.element,
  );
  setVisible(keys.element, admin);
  setVisible(audit.element, admin);
  const newProject = h(
    "button",
    { class: "button", hidden: !me?.installation || !admin, onclick: () => attempt(makeProject, show) },
    "New project",
  );
  const newKey = h("button", { class: "button", onclick: () => attempt(() => makeKey(me), show) }, "New key");
  projects.head.append(newProject);
  keys.head.append(newKey);

  async function show() {
    const [known, all_keys, entries] = await Promise.all([
      optional(all("/v1/projects"), []),
      admin ? optional(all("/v1/keys"), []) : [],
      admin ? optional(get("/v1/audit", { limit: AUDIT })) : null,
    ]);
    fill(
      projects.body,
      tableOf(
        "Projects",
        ["Project", "Created"],
        known.map((project) => [project.name, when(project.created_at)]),
      ),
    );
    fill(
      keys.body,
      h(
        "div",
        { class: "tall" },
        tableOf(
          "Keys",
          ["Key", "User", "Scope", "Projects", "Created", "Expires", "State", ""],
          all_keys.map((key) => keyRow(key, show)),
        ),
      ),
    );
    fill(
      audit.body,
      h(
        "div",
        { class: "tall" },
        tableOf(
          "Audit",
          ["Time", "User", "Request", "Target", "From", "Result"],
          (entries?.items ?? []).map((each) => [
            when(each.time),
            each.user ?? each.key_name,
            words(each.operation),
            each.target ?? UNKNOWN,
            each.address ?? UNKNOWN,
            `${each.status}${each.code ? ` ${each.code}` : ""}`,
          ]),
        ),
      ),
    );
  }

  await show();
  return { close() {} };
}

function tableOf(label, headings, rows) {
  const { element, body } = table(headings, { label });
  fill(
    body,
    rows.map((row) =>
      h(
        "tr",
        {},
        row.map((cell) => h("td", {}, cell)),
      ),
    ),
  );
  return rows.length ? element : h("p", { class: "empty-note" }, `No ${label.toLowerCase()}.`);
}

function when(moment) {
  return moment ? h("span", { class: "mono moment", title: utc(moment) }, clock(moment)) : UNKNOWN;
}

/** The highest priority that a key gives, behind what else it allows; nothing where it gives any. */
function atMost(key) {
  return key.highest_priority === null ? "" : `, priorities up to ${key.highest_priority}`;
}

/** Whether a key is valid, and why not. */
export function stateOf(key) {
  if (key.revoked_at) return "revoked";
  return key.expires_at && Date.parse(key.expires_at) < Date.now() ? "expired" : "valid";
}

function keyRow(key, changed) {
  const state = stateOf(key);
  const revoke = h(
    "button",
    { class: "plain", hidden: state !== "valid", onclick: () => attempt(() => revokeKey(key), changed) },
    "revoke",
  );
  return [
    h("b", {}, key.name),
    key.user ?? UNKNOWN,
    `${key.scope}${atMost(key)}`,
    key.installation ? "all" : key.project,
    when(key.created_at),
    when(key.expires_at),
    state,
    revoke,
  ];
}

async function attempt(act, changed) {
  try {
    await act();
  } catch (error) {
    if (!(error instanceof Problem || error instanceof Unreachable)) throw error;
    notify(error.message, "bad");
  }
  await changed();
}

async function makeProject() {
  const name = h("input", { "aria-label": "Name", autofocus: true, required: true });
  const wanted = await confirmed(
    "New project",
    [h("label", { class: "field" }, "Name (lower-case letters, digits, hyphens)", name)],
    { yes: "Create project", read: () => name.value },
  );
  if (wanted) await send("POST", "/v1/projects", { name: wanted });
}

async function makeKey(me) {
  const name = h("input", { "aria-label": "Name", autofocus: true, required: true });
  const user = h("input", { "aria-label": "User" });
  const project = h("input", { value: me.project, "aria-label": "Project" });
  const scope = h(
    "select",
    { "aria-label": "Scope" },
    ["read", "submit", "admin"].map((each) => h("option", {}, each)),
  );
  const days = h("input", { type: "number", min: 1, "aria-label": "Days", placeholder: "never" });
  const highest = h("input", {
    ...{ type: "number", min: -1000, max: me.highest_priority ?? 1000, "aria-label": "Highest priority" },
    placeholder: me.highest_priority ?? "any",
  });
  const wanted = await confirmed(
    "New key",
    [
      h("label", { class: "field" }, "Purpose", name),
      h("label", { class: "field" }, "User", user),
      h("label", { class: "field" }, "Project", project),
      h("label", { class: "field" }, "Scope", scope),
      h("label", { class: "field" }, "Highest priority of its jobs", highest),
      h("label", { class: "field" }, "Expires after days", days),
    ],
    {
      yes: "Create key",
      read: () => ({
        name: name.value,
        scope: scope.value,
        project: project.value || null,
        user: user.value || null,
        expires_in_days: days.value ? days.valueAsNumber : null,
        highest_priority: highest.value ? highest.valueAsNumber : null,
      }),
    },
  );
  if (!wanted) return;
  const made = await send("POST", "/v1/keys", wanted);
  await confirmed(
    "Key created",
    [h("p", {}, "Copy it now: it is shown only once."), h("pre", { class: "stack" }, made.key)],
    { yes: "I have copied it", no: null },
  );
}

async function revokeKey(key) {
  const yes = await confirmed(
    "Revoke this key?",
    [
      h(
        "p",
        {},
        `${key.name} stops working at once: browsers that use it are signed out, and its streams end. Jobs submitted with it continue.`,
      ),
    ],
    { yes: "Revoke", danger: true },
  );
  if (yes) await send("DELETE", `/v1/keys/${key.id}`);
}
