/** What a viewer has written, as a document: JSON as it is, YAML as the service reads it. */

import { send } from "../core/api.js";

/** Throws Problem where it is neither. */
export async function documentOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return (await send("POST", "/ui/yaml", { text })).document;
  }
}
