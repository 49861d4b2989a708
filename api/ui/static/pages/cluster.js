/** The machines: what each has, who is on what, how its GPUs are. */

import { get, send } from "../core/api.js";
import { KeyedRows, badge, bar, fill, h, panel, setAttribute, setText, setVisible } from "../core/dom.js";
import { UNKNOWN, bytes, counted, nodeName, number, percent } from "../core/format.js";
import { Live } from "../core/live.js";
import { confirmed, notify } from "../core/notices.js";
import { link } from "../core/router.js";
import { clusterText } from "../parts/cluster_text.js";

const SECONDS = 3;
const PORTS =
  "Check ports lets all nodes connect to each other on the ports that jobs use, and reports those that a firewall blocks. Jobs are not affected.";

/** Build it. */
export async function open(root, { shell, viewer }) {
  shell.title("Cluster", "/cluster");
  const summary = h("span", { class: "cluster" });
  const nodes = h("div", { class: "nodes" });
  const totals = totalFigures();
  const me = await viewer;
  const check = h(
    "button",
    { class: "button", hidden: !me?.installation || me.scope !== "admin", onclick: () => checkPorts(check) },
    "Check ports",
  );
  fill(
    root,
    h("div", { class: "title-row" }, h("h1", {}, "Cluster"), summary, h("span", { class: "gap" }), check),
    h("p", { class: "note", hidden: check.hidden }, PORTS),
    totals.element,
    nodes,
  );
  let names = new Map();
  const rows = new KeyedRows(
    nodes,
    (node) => node.id,
    () =>
      nodePanel(
        me,
        () => live.now(),
        (id) => names.get(id) ?? id,
      ),
  );
  let turn = 0;
  const live = new Live(async (signal) => {
    const cluster = await get("/v1/cluster", {}, { signal });
    if (turn++ % 5 === 0) {
      const { items } = await get("/v1/jobs", { limit: 200, spec: false }, { signal });
      names = new Map(items.map((job) => [job.id, job.name]));
    }
    setText(summary, clusterText(cluster));
    totals.show(cluster);
    rows.show(cluster.nodes);
    return false;
  }, SECONDS);
  await live.start();
  return { close: () => live.stop() };
}

function nodePanel(me, changed, nameOf) {
  const { element, body, head } = panel("Node");
  const [title, state] = [head.querySelector("h2"), badge()];
  const facts = h("p", { class: "note" });
  const use = bar("Slots or GPUs in use");
  const id = h("span", { class: "mono" });
  const copy = h("button", { class: "plain", onclick: () => copyId(node.id) }, "copy ID");
  const problem = h("p", { class: "why tone-bad", hidden: true });
  const who = h("div", { class: "chips" });
  const gpus = h("div");
  const drain = h("button", { class: "button", hidden: true, onclick: () => drainNode(node, changed) }, "Drain");
  const undo = h("button", { class: "button", hidden: true, onclick: () => useAgain(node, changed) }, "Use again");
  head.append(state.element, drain, undo);
  use.element.classList.add("node-use");
  body.append(problem, use.element, facts, h("p", { class: "note" }, "node ", id, " ", copy), who, gpus);
  let [node, shown] = [null, ""];
  return {
    element,
    show(now) {
      node = now;
      const text = JSON.stringify(now);
      if (text === shown) return;
      shown = text;
      setText(title, now.address);
      state.show(
        now.alive ? (now.draining ? "draining" : "alive") : "lost",
        now.alive ? (now.draining ? "warn" : "good") : "bad",
      );
      const may = now.alive && me?.installation && me.scope === "admin";
      setVisible(drain, may && !now.draining);
      setVisible(undo, may && now.draining);
      setVisible(problem, Boolean(now.problem));
      setText(problem, now.problem ?? "");
      setText(facts, factsOf(now));
      use.show(now.total ? 1 - now.free / now.total : 0, "active");
      setText(id, nodeName(now.id));
      setAttribute(id, "title", now.id);
      fill(
        who,
        [...countsOf(now.ranks)].map(([job, ranks]) =>
          h(
            "span",
            { class: "chip" },
            h("a", { href: link(`/jobs/${job}/ranks`) }, nameOf(job)),
            ranks.length > 6 ? counted(ranks.length, "rank") : `rank ${ranks.join(", ")}`,
          ),
        ),
      );
      fill(gpus, (now.gpus ?? []).map(gpuLine));
    },
  };
}

/** Sums over the nodes that respond; `{element, show(cluster)}`. */
function totalFigures() {
  const element = h("dl", { class: "figures totals" });
  let shown = "";
  return {
    element,
    show({ nodes }) {
      const alive = nodes.filter((node) => node.alive);
      const gpus = alive.flatMap((node) => node.gpus ?? []);
      const sum = (name) => alive.reduce((total, node) => total + (node[name] ?? 0), 0);
      const kind = alive.some((node) => node.accelerator === "gpu") ? "GPUs" : "Slots";
      const types = [...new Set(alive.map((node) => node.gpu_type).filter(Boolean))].join(", ");
      const mean = gpus.reduce((total, gpu) => total + gpu.utilization, 0) / gpus.length;
      const figures = [
        ["Nodes", `${number(alive.length)}${alive.length < nodes.length ? ` of ${number(nodes.length)}` : ""}`],
        [`${kind} in use`, `${number(sum("total") - sum("free"))} of ${number(sum("total"))}`],
        ["Ranks", number(alive.reduce((total, node) => total + node.ranks.length, 0))],
        ["Jobs", number(new Set(alive.flatMap((node) => node.ranks.map((each) => each.job))).size)],
        gpus.length ? ["GPU utilization", percent(mean, 0)] : null,
        types ? ["GPU type", types] : null,
      ].filter(Boolean);
      const text = JSON.stringify(figures);
      if (text === shown) return;
      shown = text;
      fill(
        element,
        figures.map(([name, value]) => h("div", { class: "figure" }, h("dt", {}, name), h("dd", {}, value))),
      );
    },
  };
}

async function copyId(id) {
  try {
    await navigator.clipboard.writeText(id);
    notify("The node ID is copied.", "good");
  } catch {
    notify(id); // without HTTPS browsers do not let pages copy
  }
}

function factsOf(node) {
  const gpus =
    node.accelerator === "gpu"
      ? `${number(node.free)} of ${number(node.total)} GPUs${node.gpu_type ? ` (${node.gpu_type}${node.gpu_memory_bytes ? `, ${bytes(node.gpu_memory_bytes)}` : ""})` : ""} free`
      : "";
  const slots = node.slots_total
    ? `${number(node.slots_free)} of ${number(node.slots_total)} slots free`
    : node.accelerator !== "gpu"
      ? `${number(node.free)} of ${number(node.total)} slots free`
      : "";
  return [gpus, slots].filter(Boolean).join(" · ");
}

function countsOf(ranks) {
  const found = new Map();
  for (const { job, rank } of ranks)
    found.set(
      job,
      [...(found.get(job) ?? []), rank].sort((one, other) => one - other),
    );
  return found;
}

function gpuLine(gpu) {
  const parts = [
    `GPU ${gpu.index}`,
    `utilization ${percent(gpu.utilization, 0)}`,
    `memory ${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}`,
    gpu.power_watts === null ? "" : `${number(gpu.power_watts)} W`,
    gpu.temperature_celsius === null ? "" : `${number(gpu.temperature_celsius)} °C`,
    gpu.clock_mhz === null ? "" : `${number(gpu.clock_mhz)} MHz`,
    gpu.answers === false ? "the driver does not respond" : "",
    gpu.ecc_errors ? `ECC errors ${number(gpu.ecc_errors)}` : "",
    gpu.xid?.length ? `XID ${gpu.xid.join(", ")}` : "",
  ];
  return h(
    "div",
    { class: gpu.answers === false || gpu.xid?.length || gpu.ecc_errors ? "tone-bad kind" : "" },
    parts.filter(Boolean).join(" · ") || UNKNOWN,
  );
}

async function drainNode(node, changed) {
  const ranks = node.ranks.length;
  const yes = await confirmed(
    "Drain this node?",
    [
      h(
        "p",
        {},
        `No new ranks are placed on ${node.address}. Its ranks (${number(ranks)} now) move to other nodes after their current step; a job that does not fit elsewhere saves its state and waits in the queue. The node takes no ranks until you choose “Use again”.`,
      ),
    ],
    { yes: "Drain" },
  );
  if (!yes) return;
  await send("POST", `/v1/nodes/${node.id}/drain`, {}).catch((error) => notify(error.message, "bad"));
  changed();
}

async function useAgain(node, changed) {
  await send("DELETE", `/v1/nodes/${node.id}/drain`).catch((error) => notify(error.message, "bad"));
  changed();
}

async function checkPorts(button) {
  button.disabled = true;
  try {
    const { problems, warnings, nodes, tries } = await send("POST", "/v1/cluster/check", {});
    notify(
      [...problems, ...warnings].join("\n") ||
        `All ports are open: ${counted(tries, "connection")} between ${counted(nodes, "node")}.`,
      problems.length ? "bad" : "good",
    );
  } catch (error) {
    notify(error.message, "bad");
  }
  button.disabled = false;
}
