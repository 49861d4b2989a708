/** Light or dark: as the system is, or as the viewer wants it, which this browser remembers. */

import { remember, remembered } from "./preferences.js";

/** What a viewer can choose. */
export const THEMES = ["system", "light", "dark"];
const CHANGED = "themechange";
const system = matchMedia("(prefers-color-scheme: dark)");
const sheet = document.getElementById("dark");

/** The viewer's choice. */
export function theme() {
  const chosen = remembered("theme");
  return THEMES.includes(chosen) ? chosen : "system";
}

/** Choose one of THEMES, and remember it. */
export function chooseTheme(name) {
  remember("theme", name);
  apply();
}

/** Call `act` whenever the colors change. */
export function onThemeChanged(act) {
  document.addEventListener(CHANGED, act);
}

function apply() {
  sheet.media = { light: "not all", dark: "all" }[theme()] ?? "(prefers-color-scheme: dark)";
  document.dispatchEvent(new Event(CHANGED));
}

system.addEventListener("change", apply);
sheet.addEventListener("load", () => document.dispatchEvent(new Event(CHANGED)));
apply();
