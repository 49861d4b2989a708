/** What can be done with several jobs at once, after a question. */

import { Problem, Unreachable } from "../core/api.js";
import { h, setText, setVisible } from "../core/dom.js";
import { counted } from "../core/format.js";
import { confirmed, notify } from "../core/notices.js";
import { may } from "../core/shell.js";
import { ACTIONS } from "./actions.js";

const OFFERED = ["pause", "resume", "cancel"];

/** `{elements, show(jobs, me)}`: a button for each action that some of the `jobs` allow. `changed` is called after one. */
export function bulkActions(context, changed) {
  let able = {};
  const buttons = OFFERED.map((action) =>
    h("button", {
      class: `button ${ACTIONS[action].danger ? "danger-outline" : ""}`,
      hidden: true,
      onclick: () => act(action),
    }),
  );

  async function act(action) {
    const jobs = able[action];
    const verb = `${action[0].toUpperCase()}${action.slice(1)}`;
    const names = jobs.map((job) => job.name).join(", ");
    const cost = ACTIONS[action].danger ? "They are stopped permanently and cannot be resumed: " : "";
    const yes = await confirmed(`${verb} ${counted(jobs.length, "job")}?`, [h("p", {}, `${cost}${names}`)], {
      yes: verb,
      no: action === "cancel" ? "Keep them" : "Cancel",
      danger: Boolean(ACTIONS[action].danger),
    });
    if (!yes) return;
    for (const job of jobs) {
      try {
        await ACTIONS[action].call(job);
      } catch (error) {
        if (!(error instanceof Problem || error instanceof Unreachable)) throw error;
        notify(`${job.name}: ${error.message}`, "bad");
      }
    }
    await changed();
  }

  return {
    elements: buttons,
    show(jobs, me) {
      OFFERED.forEach((action, place) => {
        const allowed = may(me, ACTIONS[action].scope);
        able[action] = jobs.filter((job) => allowed && ACTIONS[action].offered(job, context.facts));
        setText(buttons[place], `${action[0].toUpperCase()}${action.slice(1)} ${able[action].length}`);
        setVisible(buttons[place], able[action].length > 0);
      });
    },
  };
}
